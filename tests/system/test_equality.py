"""Disaggregated greedy output equals `transformers` generate, token for token, fp32.

Through HTTP, the router, a prefill worker, ZeroMQ and a decode worker with another block size, on
small random checkpoints: of plain layers, of layers with windows, and of layers with states.
`tests/worker/compute/test_transformer.py` compares every family.
"""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest

from scripts.models.make_model import make_model
from tests.cluster import Cluster
from tests.expected import NUM_TOKENS, VOCAB_SIZE, expectations

# family, query heads, KV heads, prefill block size, decode block size
CASES = [
    ("qwen3_next", 4, 2, 8, 32),  # attention and states
    pytest.param("qwen3_next", 4, 2, 16, 8, marks=pytest.mark.full("other blocks")),
    pytest.param("llama", 6, 2, 8, 32, marks=pytest.mark.full("attention is in qwen3_next")),
    pytest.param("gpt_oss", 4, 2, 16, 16, marks=pytest.mark.full("windows: test_parallel.py")),
]


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations are not our subject
@pytest.mark.parametrize(("family", "heads", "kv_heads", "prefill_block", "decode_block"), CASES)
def test_greedy_output_equals_transformers(
    tmp_path: Path, family: str, heads: int, kv_heads: int, prefill_block: int, decode_block: int
) -> None:
    model = tmp_path / f"{family}-{kv_heads}"
    make_model(
        model,
        family=family,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=16 * heads,
        vocab_size=VOCAB_SIZE,
        seed=kv_heads,
    )
    draw = random.Random(f"{family} {heads}")
    expected = expectations(model, draw)

    with Cluster(tmp_path, local="0,0", model=str(model)) as cluster:
        cluster.worker("prefill", 0, "--block-size", str(prefill_block), "--dtype", "float32")
        cluster.worker("decode", 0, "--block-size", str(decode_block), "--dtype", "float32")
        body = {
            "model": cluster.model,
            "prompt": [it.prompt for it in expected],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        for choice, it in zip(choices, expected, strict=True):
            assert choice["token_ids"] == it.tokens, f"prompt of {len(it.prompt)} tokens"
        cluster.until_idle()
