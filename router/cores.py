"""The cores of each local worker.  Pure.

| cores | each worker has |
|---|---|
| several nodes | one node: decode workers are spread over them first, then prefill workers |
| `ENOUGH` physical cores or more for each worker of a node | some of its own |
| fewer | all of the node's, with a thread for each |

Workers on their own cores do not slow each other down, but unused cores are idle, so few cores are
shared (figures in DECISIONS.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, Literal

Sharing = Literal["auto", "split", "shared"]
# The physical cores of one node.
Node = Sequence[frozenset[int]]

ENOUGH: Final = 4


def plan(
    nodes: Sequence[Node], num_prefill: int, num_decode: int, sharing: Sharing = "auto"
) -> dict[tuple[str, int], frozenset[int]]:
    """Return each worker's cores, by role and rank.

    Args:
        nodes: The machine.
        sharing: "split": own cores for each worker, however few; "shared": all cores for all.
    """
    if sharing == "shared":
        nodes = [[core for node in nodes for core in node]]
    workers = [("decode", rank) for rank in range(num_decode)]
    workers += [("prefill", rank) for rank in range(num_prefill)]
    crews: list[list[tuple[str, int]]] = [[] for _ in nodes]
    for worker in workers:
        most = max(range(len(nodes)), key=lambda it: len(nodes[it]) / (len(crews[it]) + 1))
        crews[most].append(worker)
    least = {"auto": ENOUGH, "split": 1, "shared": inf}[sharing]
    places: dict[tuple[str, int], frozenset[int]] = {}
    for node, crew in zip(nodes, crews, strict=True):
        num_sets = len(crew) if len(node) >= least * len(crew) else 1
        for index, worker in enumerate(crew):
            places[worker] = _part(node, index % num_sets, num_sets)
    return places


def _part(node: Node, index: int, num_parts: int) -> frozenset[int]:
    """Return one of so many equal parts; the remainder goes to the first, which decode."""
    start, end = (-(-len(node) * it // num_parts) for it in (index, index + 1))
    return frozenset[int]().union(*node[start:end])
