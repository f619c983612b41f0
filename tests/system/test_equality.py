"""Disaggregated greedy output equals `transformers` generate, token for token, fp32.

Through HTTP, the router, a prefill worker, ZeroMQ and a decode worker, on small random checkpoints
of every family, with equal and with different block sizes on the two sides.
"""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest
import torch

from scripts.make_model import make_model
from tests.cluster import Cluster

PROMPT_LENGTHS = (1, 15, 16, 17, 200, 700)
NUM_TOKENS = 64
# Where the two best logits are closer than float32 sums can tell, both tokens are right.
MIN_MARGIN = 2e-5
VOCAB_SIZE = 512

# family, query heads, KV heads, prefill block size, decode block size
CASES = [
    ("llama", 4, 4, 16, 16),
    ("llama", 6, 2, 8, 32),
    ("mistral", 4, 1, 16, 16),
    ("mistral", 4, 2, 32, 16),
    ("qwen2", 4, 2, 16, 16),
    ("qwen2", 6, 3, 16, 8),
    ("qwen3", 8, 2, 16, 16),
    ("qwen3", 4, 4, 64, 16),
]


def reference(directory: Path, prompt: list[int]) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        logits = model(output).logits[0, len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.T
    assert (best - second).min() > MIN_MARGIN, "a tie; take another seed"
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations are not our subject
@pytest.mark.parametrize(("family", "heads", "kv_heads", "prefill_block", "decode_block"), CASES)
def test_greedy_output_equals_transformers(
    tmp_path: Path, family: str, heads: int, kv_heads: int, prefill_block: int, decode_block: int
) -> None:
    model = tmp_path / f"{family}-{kv_heads}"
    make_model(
        model,
        family=family,
        num_layers=3,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=VOCAB_SIZE,
        seed=kv_heads,
    )
    draw = random.Random(f"{family} {heads}")
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in PROMPT_LENGTHS]
    expected = [reference(model, prompt) for prompt in prompts]

    with Cluster(tmp_path, local="0,0", model=str(model)) as cluster:
        cluster.worker("prefill", 0, "--block-size", str(prefill_block), "--dtype", "float32")
        cluster.worker("decode", 0, "--block-size", str(decode_block), "--dtype", "float32")
        body = {
            "model": cluster.model,
            "prompt": prompts,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        for prompt, choice, tokens in zip(prompts, choices, expected, strict=True):
            assert choice["token_ids"] == tokens, f"prompt of {len(prompt)} tokens"
        cluster.until_idle()
