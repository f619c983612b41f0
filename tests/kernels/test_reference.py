"""What is the reference's own: how it groups sequences; `test_operators` has what it computes."""

from __future__ import annotations

import pytest

from kernels import reference
from tests.kernels.scenes import check, scene


def test_decode_of_many_is_one_group() -> None:
    it = scene([(200, 1), (150, 1), (255, 1)])
    check(it, None)
    assert len(it.batch.scratch["groups", None]) == 1


def test_a_group_never_gathers_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_GROUP_VALUES", 4 * 64 * 16 * 2)
    it = scene([(40, 1)] * 5 + [(50, 4)])
    check(it, None)
    assert [group.shape[0] for group in it.batch.scratch["groups", None]] == [2, 2, 1, 1]
