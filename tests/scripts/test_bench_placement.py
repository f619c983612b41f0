from __future__ import annotations

import json
from pathlib import Path

from scripts.bench.placement_model import Shape
from scripts.bench_placement import POLICIES, TRACE_BLOCK, agents, ideal, measure, read_trace

SHAPE = Shape(3, 3, 400_000, 16, prompt_tokens_per_s=500.0)


def test_sessions_of_agents_find_what_was_read_before() -> None:
    hits, loads = {}, {}
    for name, policy in POLICIES.items():
        model, (share, _, _, _, _, load, *_) = measure(SHAPE, policy, lambda: agents(6, 60.0))
        assert isinstance(share, float)
        assert len(model.served) == 6 * 20
        hits[name], loads[name] = share / ideal(model.served, SHAPE.block_size), load
    assert hits["baton"] > 0.93
    assert max(hits.values()) == hits["baton"] > hits["least loaded"] + 0.1


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 7]}
    path.write_text(json.dumps(row) + "\n")
    [arrival] = read_trace(path)
    assert arrival.at_s == 1.5 and len(arrival.answer) == 9
    assert arrival.token_ids == (4,) * TRACE_BLOCK + (7,) * (700 - TRACE_BLOCK)


def test_the_ideal_cache_holds_prompts_and_answers_once_they_are_known() -> None:
    model, _ = measure(SHAPE, POLICIES["baton"], lambda: agents(1, 1.0))
    first, *_ = sorted(model.served, key=lambda each: each.arrival.at_s)
    assert ideal([first], 16) == 0.0
    assert 0.8 < ideal(model.served, 16) < 1.0
