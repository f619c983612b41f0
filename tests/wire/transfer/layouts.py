"""Random layouts: of one group or several, of both kinds, with and without windows."""

from __future__ import annotations

from hypothesis import strategies as st

from wire.layout import KVGroup, KVLayout, StateGroup


def kv_groups() -> st.SearchStrategy[KVGroup]:
    return st.builds(
        KVGroup,
        num_layers=st.integers(1, 5),
        num_kv_heads=st.integers(1, 3),
        key_dim=st.integers(1, 3),
        value_dim=st.integers(0, 3),
        dtype=st.sampled_from(["uint8", "bfloat16", "float32"]),
        window=st.none() | st.integers(1, 9),
    )


def state_groups() -> st.SearchStrategy[StateGroup]:
    return st.builds(
        StateGroup,
        num_layers=st.integers(1, 3),
        num_heads=st.integers(1, 3),
        head_bytes=st.integers(1, 9),
    )


def layouts() -> st.SearchStrategy[KVLayout]:
    groups = st.lists(kv_groups() | state_groups(), min_size=1, max_size=3)
    return groups.map(lambda each: KVLayout(groups=tuple(each)))
