"""The plan of local workers on made-up machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import Config
from router.cores import ENOUGH, Sharing, plan
from wire.process.cores import format_cores


def machine(num_nodes: int, num_cores: int, threads: int = 1) -> list[list[frozenset[int]]]:
    """So many nodes of so many physical cores; sibling threads are numbered as Linux does it."""
    total = num_nodes * num_cores
    return [
        [
            frozenset(range(core, total * threads, total))
            for core in range(node * num_cores, (node + 1) * num_cores)
        ]
        for node in range(num_nodes)
    ]


def said(places: dict[tuple[str, int], frozenset[int]]) -> dict[str, str]:
    """The plan in short: p0 and d1 are workers."""
    return {f"{role[0]}{rank}": format_cores(cores) for (role, rank), cores in places.items()}


@pytest.mark.parametrize(
    ("nodes", "local", "sharing", "planned"),  # `local` as in --local
    [
        (machine(1, 2), (1, 1), "auto", {"d0": "0-1", "p0": "0-1"}),
        (machine(1, 2), (1, 1), "split", {"d0": "0", "p0": "1"}),
        (machine(1, 2), (2, 1), "split", {"d0": "0-1", "p0": "0-1", "p1": "0-1"}),
        (machine(1, 7), (1, 1), "auto", {"d0": "0-6", "p0": "0-6"}),
        (machine(1, 8), (1, 1), "auto", {"d0": "0-3", "p0": "4-7"}),
        (machine(1, 8), (1, 1), "shared", {"d0": "0-7", "p0": "0-7"}),
        (machine(1, 8, 2), (1, 1), "auto", {"d0": "0-3,8-11", "p0": "4-7,12-15"}),
        (machine(2, 16), (1, 2), "auto", {"d0": "0-7", "d1": "16-31", "p0": "8-15"}),
        (machine(2, 4), (1, 2), "auto", {"d0": "0-3", "d1": "4-7", "p0": "0-3"}),
        ([*machine(1, 4), [frozenset({9})]], (1, 1), "auto", {"d0": "0-3", "p0": "0-3"}),
        # A third of the large one is less than all of the small one.
        (
            [*machine(1, 8), [frozenset({8}), frozenset({9}), frozenset({10})]],
            (1, 2),
            "auto",
            {"d0": "0-3", "d1": "4-7", "p0": "8-10"},
        ),
        (machine(1, 4), (0, 0), "auto", {}),
        (machine(1, 8), (2,), "auto", {"a0": "0-3", "a1": "4-7"}),
        (machine(2, 4), (3,), "auto", {"a0": "0-3", "a1": "4-7", "a2": "0-3"}),
    ],
)
def test_the_plan_of_a_machine(
    nodes: list[list[frozenset[int]]],
    local: tuple[int, ...],
    sharing: Sharing,
    planned: dict[str, str],
) -> None:
    assert said(plan(nodes, Config(local=local).local_workers, sharing)) == planned


@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 2),
    st.tuples(st.integers(0, 8), st.integers(0, 8)) | st.tuples(st.integers(0, 8)),
    st.sampled_from(["auto", "split", "shared"]),
)
def test_plans_of_random_machines(
    num_nodes: int, num_cores: int, threads: int, local: tuple[int, ...], sharing: Sharing
) -> None:
    nodes = machine(num_nodes, num_cores, threads)
    places = plan(nodes, Config(local=local).local_workers, sharing)
    assert len(places) == sum(local)
    for cores in places.values():
        near = [node for node in nodes if cores & frozenset[int]().union(*node)]
        assert len(near) == (num_nodes if sharing == "shared" else 1)
        whole = [core for node in near for core in node if core & cores]
        assert cores == frozenset[int]().union(*whole), "no physical core is cut in two"
        others = [it for it in places.values() if it & cores]
        assert all(it == cores for it in others), "what is shared is shared wholly"
        if sharing == "auto":
            assert len(others) > 1 or len(whole) >= min(ENOUGH, num_cores)
