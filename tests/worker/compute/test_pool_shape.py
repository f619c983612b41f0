"""Where the layers of groups lie in a pool that they share."""

from __future__ import annotations

import msgspec
import pytest

from wire.layout import KVGroup, KVLayout, StateGroup
from worker.compute.pool_shape import PoolShape, indices_in_pool, layers_by_window

FULL = KVGroup(num_layers=2, num_kv_heads=4, key_dim=8, value_dim=8, dtype="bfloat16")
WINDOWED = msgspec.structs.replace(FULL, num_layers=5, window=9)
STATE = StateGroup(num_layers=3, num_heads=1, head_bytes=7)


def test_layers_of_one_group_lie_side_by_side() -> None:
    wider = msgspec.structs.replace(WINDOWED, num_layers=3, window=20)
    layout = KVLayout(groups=(FULL, STATE, WINDOWED, wider))
    whole, windowed = (PoolShape.of(layout, windowed=it) for it in (False, True))
    assert whole[:4] == (2, 4, 8, "bfloat16") and windowed[:4] == (8, 4, 8, "bfloat16")
    assert whole.layers(0, range(2)) == range(2)
    assert windowed.layers(2, range(1, 5)) == range(1, 5)
    assert windowed.layers(3, range(1, 3)) == range(6, 8)
    for shape, group in ((whole, 1), (windowed, 1), (whole, 2), (windowed, 0)):
        with pytest.raises(KeyError):
            shape.layers(group, range(1))


def test_layers_that_see_all_come_first_then_the_smaller_windows() -> None:
    windows = (8, None, 4, 8, None)
    groups = layers_by_window(windows)
    assert list(groups.items()) == [(None, [1, 4]), (4, [2]), (8, [0, 3])]
    assert indices_in_pool(windows) == [1, 0, 0, 2, 1]
    assert indices_in_pool((None, None)) == indices_in_pool((5, 5)) == [0, 1]


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ((STATE,), "not 0"),
        ((FULL, msgspec.structs.replace(WINDOWED, num_kv_heads=2)), "not 2"),
        ((msgspec.structs.replace(FULL, value_dim=0),), "keys of 8 and values of 0"),
    ],
)
def test_what_shares_no_pool_is_refused(groups: tuple[KVGroup, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PoolShape.of(KVLayout(groups=groups), windowed=False)
