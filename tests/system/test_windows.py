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

from tests.cluster import Cluster
from tests.oracle import oracle
from wire.options import Options
from wire.process.model import locate
from worker.executor.hash import MIXED, create

WINDOW = 40
VOCAB_SIZE = 512
NUM_TOKENS = 24


def complete(cluster: Cluster, prompt: list[int], n: int = 1, **fields: Any) -> list[list[int]]:
    body = {"n": n, "ignore_eos": True, "max_tokens": NUM_TOKENS, "temperature": 0} | fields
    choices = sorted(cluster.choices(prompt, **body), key=lambda choice: choice["index"])
    return [choice["token_ids"] for choice in choices]


def counted(cluster: Cluster, name: str) -> int:
    text = httpx.get(f"{cluster.http}/metrics", timeout=60).text
    (figure,) = re.findall(rf"^baton_(?:router_)?{name}_total (\S+)$", text, re.MULTILINE)
    return int(float(figure))


def test_windows_and_states_cross_at_their_size(tmp_path: Path) -> None:
    info, draw = create(model_path=locate("demo")).info, random.Random(7)

    def expected(prompt: list[int], options: Options) -> list[int]:
        return oracle(prompt, NUM_TOKENS, options, info.vocab_size, layout=MIXED)

    with Cluster(tmp_path, local="1,2", executor="worker.executor.hash:create_mixed") as cluster:
        prompts = [[draw.randrange(900) for _ in range(length)] for length in (1, 33, 300)]
        for prompt in prompts:
            assert complete(cluster, prompt) == [expected(prompt, Options(ignore_eos=True))]
        sent = sum(MIXED.transfer_bytes(len(prompt)) for prompt in prompts)
        assert counted(cluster, "kv_transfer_bytes") == sent
        prompt = prompts[-1]
        for turn in range(2):
            answers = complete(cluster, prompt, n=2, temperature=1.0, seed=turn)
            for choice, answer in enumerate(answers):
                options = Options(ignore_eos=True, temperature=1.0, seed=turn, choice=choice)
                assert answer == expected(prompt, options)
            prompt = [*prompt, *answers[1], turn]
        assert counted(cluster, "kv_skipped_tokens") > 300
        cluster.until_idle()
