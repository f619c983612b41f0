"""A short run of every fuzz target, and that a target with a bug is found out."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import Finding, Tally, Target, fuzz, main, targets

INPUTS = 2_000  # `scripts/fuzz` takes more


@pytest.mark.parametrize("name", list(targets()))
def test_nothing_but_documented_errors(name: str) -> None:
    result = fuzz(targets()[name], INPUTS)
    assert isinstance(result, Tally), f"{result.problem}: --replay {result.raw.hex()}"
    assert result.accepted + result.refused == INPUTS
    assert result.refused > INPUTS // 10
    assert result.accepted > INPUTS // 100, "mutations that are all refused at once prove little"


def test_an_undocumented_error_is_a_finding() -> None:
    def feed(raw: bytes) -> None:
        if raw[:1] != b"a":
            raise KeyError("a bug")

    result = fuzz(Target(feed, [b"abc"], ValueError), INPUTS)
    assert isinstance(result, Finding)
    assert result.raw[:1] != b"a"
    assert "a bug" in result.problem


def test_the_same_seed_gives_the_same_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        assert main(["--target", "segment", "--inputs", "500", "--seed", "7"]) == 0
        printed.append(capsys.readouterr().out.split(" refused")[0])
    assert printed[0] == printed[1]
