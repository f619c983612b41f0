"""The bench of fairness in brief: every answer is the right one, whatever the figures are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.flood import LOADS
from scripts.bench_fairness import COLOUR, FIRST, KINDS, Times, new_schema, rows_of
from tests.cluster import ROOT


@pytest.mark.full("it floods a cluster for a table")
def test_a_victim_gets_its_answers_beside_a_flood(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [
        sys.executable,
        "scripts/bench_fairness.py",
        "--rows",
        "aborts",
        "--json",
        str(table),
    ]
    done = subprocess.run(
        [*command, "--seconds", "0.1"], cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(table.read_text())["aborts"]
    assert measured["problems"] == [] and set(measured["other"]["answers"]) == {"200"}
    rows = {row["kind"]: row for row in measured["rows"]}
    assert rows.keys() == {*KINDS, FIRST}
    for row in rows.values():
        assert row["failed"] == 0 and row["samples"] >= 1 and row["p50_s"] <= row["p99_s"]


def test_a_row_compares_the_slowest_and_counts_what_failed() -> None:
    alone, under = Times(), Times()
    for seconds in (0.1, 0.2, 0.3):
        alone.add("chat", seconds)
        alone.add("tokenize", seconds)
        under.add("chat", 4 * seconds)
    under.add("tokenize", 60)
    under.problems.append(("tokenize", "no answer"))
    chat, tokenize = rows_of("schemas", alone, under)
    assert (chat.p50_s, chat.p99_s, chat.failed) == (0.8, 1.2, 0)
    assert chat.ratio == pytest.approx(4)
    assert chat.cells()[-1] == "over 2"
    assert (tokenize.samples, tokenize.p50_s, tokenize.failed) == (1, 60, 1)


def test_every_request_of_a_schema_is_another_one() -> None:
    for request in (new_schema, LOADS["schemas"].request):
        held = [request(number)[1]["structured_outputs"]["json"] for number in range(3)]
        assert len({json.dumps(schema) for schema in held}) == 3
    assert new_schema(1)[1]["structured_outputs"]["json"]["required"] == COLOUR["required"]
    large = json.dumps(LOADS["schemas"].request(1)[1])
    assert 45_000 < len(large) < 60_000
