"""verified.json: what may stand in it, what a run adds, and what kernels/README.md says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernels.cuda import backend as cuda
from tests.gpu import record
from tests.gpu.record import Record, Verified
from tests.gpu.settings import Settings
from tests.gpu.stages import STAGES
from tests.gpu.trail import Finding, State

MOVE = Verified("kv", cuda.source_hash("kv"), True, "H200", "2026-11-21", 7)


def parts(state: State = State.OK, **other: State) -> list[Finding]:
    """Return a finding for every part of the verification on a GPU."""
    settings = Settings("cuda", 7, False)
    names = [
        (stage.name, part)
        for stage in STAGES
        if stage.name.startswith("verify") and stage.name not in ("verify staging", "verify graphs")
        for part in stage.parts_of(settings)
    ]
    return [
        Finding(stage, part, other.get(part.split()[0], state), figures={"cases": 3})
        for stage, part in names
    ]


def test_every_kernel_is_covered_by_a_part() -> None:
    assert record.results(parts()) == dict.fromkeys(record.sources(), True)


def test_a_kernel_that_no_part_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = set(record.sources()) - set(record.uncovered())
    assert known == set(record.results(parts()))
    monkeypatch.setattr(record, "sources", lambda: {"move": "kv", "new_one": "new"})
    assert record.uncovered() == ["new_one"]


@pytest.mark.parametrize("state", [State.FAILED, State.LOST])
def test_one_bad_part_is_enough_to_be_wrong(state: State) -> None:
    found = parts()
    index = next(n for n, it in enumerate(found) if it.part == "tiled 80 float16")
    found[index] = replace(found[index], state=state)
    results = record.results(found)
    assert results == {**record.results(parts()), "attend": False}


@pytest.mark.parametrize("state", [State.SKIPPED, State.BEGUN])
def test_what_was_not_tried_to_the_end_leaves_a_kernel_open(state: State) -> None:
    results = record.results(parts(move=state))
    assert "move" not in results and results["rotate_and_append"]


def test_a_run_is_merged_over_what_was_known() -> None:
    old = Record(
        {"move": replace(MOVE, hash="0" * 16), "rotate_and_append": MOVE}, {"copy_gbs": 1.0}
    )
    found = [*parts(heads=State.FAILED, tiled=State.SKIPPED), Finding("bench", "m", State.OK)]
    found += [replace(found[-1], part="n", figures={"copy_gbs": 4300.0})]
    new = record.merged(old, found, device="H200", day="2026-11-22", seed=9)
    assert new.kernels["move"] == Verified("kv", MOVE.hash, True, "H200", "2026-11-22", 9)
    assert not new.kernels["rotate_and_append"].passed and "attend" not in new.kernels
    assert new.figures == {"device": "H200", "date": "2026-11-22", "copy_gbs": 4300.0}


def test_the_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "verified.json"
    for it in (Record(), Record({"move": MOVE}, {"device": "H200", "copy_gbs": 4300.5})):
        record.write(it, path)
        assert record.read(path) == it


def test_a_kernel_that_does_not_exist_is_named(tmp_path: Path) -> None:
    record.write(Record({"shove": MOVE}), path := tmp_path / "verified.json")
    with pytest.raises(ValueError, match="there is no kernel shove"):
        record.read(path)


def test_a_kernel_says_what_is_known_of_it() -> None:
    states = {
        "never run on a GPU": Record(),
        "right on H200, 2026-11-21": Record({"move": MOVE}),
        "failed on H200, 2026-11-21": Record({"move": replace(MOVE, passed=False)}),
        "changed since it was right on H200, 2026-11-21": Record(
            {"move": replace(MOVE, hash="0" * 16)}
        ),
    }
    for words, it in states.items():
        assert record.state_of("move", it) == words
        assert f"| `move` | `csrc/kv.cu` | {words} |" in record.table(it).splitlines()


def test_the_table_is_put_between_its_marks() -> None:
    text = f"before\n{record.BEGIN}\nold\n{record.END}\nafter\n"
    new = record.with_table(text, Record())
    assert new.startswith("before\n") and new.endswith("\nafter\n") and "old" not in new
    assert record.with_table(new, Record()) == new
    with pytest.raises(ValueError, match="lacks"):
        record.with_table("no marks", Record())
