"""A trail holds what was found when its writer was cut."""

from pathlib import Path

from tests.gpu.trail import Finding, State, Trail, figures_of


def test_the_last_word_on_a_part_counts(tmp_path: Path) -> None:
    trail = Trail(tmp_path / "deep" / "findings.jsonl")
    assert trail.findings() == [] and trail.open_part("a") is None
    trail.add(Finding("a", "one", State.BEGUN))
    trail.add(Finding("a", "one", State.OK, figures={"x": 1.5, "name": "GPU"}, seconds=2.0))
    trail.add(Finding("a", "two", State.BEGUN))
    trail.add(Finding("b", "two", State.FAILED, "why", figures={"y": 1.0}))
    assert trail.findings() == [
        Finding("a", "one", State.OK, figures={"x": 1.5, "name": "GPU"}, seconds=2.0),
        Finding("a", "two", State.BEGUN),
        Finding("b", "two", State.FAILED, "why", figures={"y": 1.0}),
    ]
    assert trail.open_part("a") == Finding("a", "two", State.BEGUN)
    assert trail.open_part("b") is None
    assert figures_of(trail.findings()) == {"x": 1.5, "name": "GPU"}  # not of what failed


def test_a_line_cut_in_the_middle_is_passed_over(tmp_path: Path) -> None:
    trail = Trail(tmp_path / "findings.jsonl")
    trail.add(Finding("a", "one", State.OK))
    whole = trail.path.read_text()
    trail.path.write_text(whole + whole[: len(whole) // 2])
    assert trail.findings() == [Finding("a", "one", State.OK)]
