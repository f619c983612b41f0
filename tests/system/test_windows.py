"""Layers with a window, and states, through a cluster: right tokens, few bytes, prefixes shared.

The decode worker holds less of a prompt than the prefill worker computed, and shares what it holds
with other turns of a conversation and with other choices of a prompt.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from scripts.models.make_model import make_model
from tests.cluster import Cluster
from tests.oracle import oracle
from wire.options import Options
from wire.process.model import locate
from worker.executor.hash import MIXED, create

WINDOW = 40
VOCAB_SIZE = 512
NUM_TOKENS = 24


def complete(cluster: Cluster, prompt: list[int], n: int = 1, **fields: Any) -> list[list[int]]:
    body = {"model": cluster.model, "prompt": prompt, "n": n, "ignore_eos": True}
    body |= {"max_tokens": NUM_TOKENS, "return_token_ids": True, "temperature": 0} | fields
    response = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    return [choice["token_ids"] for choice in choices]


def counted(cluster: Cluster, name: str) -> int:
    text = httpx.get(f"{cluster.http}/metrics", timeout=60).text
    (figure,) = re.findall(rf"^baton_(?:router_)?{name}_total (\S+)$", text, re.MULTILINE)
    return int(float(figure))


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations are not our subject
@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 16), (32, 8)])
def test_a_conversation_with_a_model_that_has_windows(
    tmp_path: Path, prefill_block: int, decode_block: int
) -> None:
    from transformers import AutoModelForCausalLM

    path = make_model(
        tmp_path / "windowed",
        family="qwen2",
        num_hidden_layers=3,
        vocab_size=VOCAB_SIZE,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )

    def expected(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    draw = random.Random(5)
    with Cluster(tmp_path, local="0,0", model=str(path)) as cluster:
        cluster.worker("prefill", 0, "--block-size", str(prefill_block), "--dtype", "float32")
        cluster.worker("decode", 0, "--block-size", str(decode_block), "--dtype", "float32")
        prompt: list[int] = []
        for _ in range(5):
            prompt += [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([7, 50, 120]))]
            answers = complete(cluster, prompt, n=2)
            assert answers == [expected(prompt)] * 2
            prompt += answers[0]
        skipped = counted(cluster, "kv_skipped_tokens")
        assert skipped > len(prompt), "turns and choices share what is there"
        cluster.until_idle()


def test_windows_and_states_cross_at_their_size(tmp_path: Path) -> None:
    info, draw = create(model_path=locate("demo")).info, random.Random(7)

    def expected(prompt: list[int], options: Options) -> list[int]:
        return oracle(prompt, NUM_TOKENS, options, info.vocab_size, layout=MIXED)

    with Cluster(tmp_path, local="1,2", executor="worker.executor.hash:create_mixed") as cluster:
        prompts = [[draw.randrange(900) for _ in range(length)] for length in (1, 16, 33, 500)]
        for prompt in prompts:
            assert complete(cluster, prompt) == [expected(prompt, Options(ignore_eos=True))]
        sent = sum(MIXED.transfer_bytes(len(prompt)) for prompt in prompts)
        assert counted(cluster, "kv_transfer_bytes") == sent
        prompt = prompts[-1]
        for turn in range(4):
            answers = complete(cluster, prompt, n=3, temperature=1.0, seed=turn)
            for choice, answer in enumerate(answers):
                options = Options(ignore_eos=True, temperature=1.0, seed=turn, choice=choice)
                assert answer == expected(prompt, options)
            prompt = [*prompt, *answers[1], turn]
        assert counted(cluster, "kv_skipped_tokens") > 4 * 500
        cluster.until_idle()
