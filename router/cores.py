"""Assigns CPU cores to the local workers.  Only `num_engines` looks at this machine.

On a machine with several NUMA nodes, each worker runs on one node: they are spread over the nodes
in their order, decode workers first.  If a node has `ENOUGH` physical cores or more for each
of its workers, each worker gets cores of its own.  Otherwise all workers of the node share its
cores, with one thread per core.

Workers on separate cores do not slow each other down, but the cores of an idle worker are wasted,
so a small number of cores is shared (measurements in DECISIONS.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Final, Literal

from wire.process import cores

Sharing = Literal["auto", "split", "shared"]
# One NUMA node: for each physical core, the ids of its hardware threads.
Node = Sequence[frozenset[int]]

# The fewest physical cores per worker with which workers get separate cores.
ENOUGH: Final = 4


def plan(
    nodes: Sequence[Node], workers: Sequence[tuple[str, int]], sharing: Sharing = "auto"
) -> dict[tuple[str, int], frozenset[int]]:
    """Return the cores of each worker, by role and rank.

    Args:
        nodes: The NUMA nodes of the machine.
        workers: Role and rank of each worker; if cores are left over, the first gets one.
        sharing: "split" gives each worker its own cores, however few; "shared" gives all workers
            all cores.
    """
    if sharing == "shared":
        nodes = [[core for node in nodes for core in node]]
    workers_of: list[list[tuple[str, int]]] = [[] for _ in nodes]
    for worker in workers:
        index = max(range(len(nodes)), key=lambda it: len(nodes[it]) / (len(workers_of[it]) + 1))
        workers_of[index].append(worker)
    min_cores = {"auto": ENOUGH, "split": 1, "shared": inf}[sharing]
    assigned: dict[tuple[str, int], frozenset[int]] = {}
    for node, members in zip(nodes, workers_of, strict=True):
        num_sets = len(members) if len(node) >= min_cores * len(members) else 1
        for number, worker in enumerate(members):
            assigned[worker] = _part(node, number % num_sets, num_sets)
    return assigned


def num_engines() -> int:
    """Return how many workers of role any are fastest on this machine.

    Workers that share cores or a GPU wait for each other, and each reads the model's weights for
    fewer sequences; a worker whose cores are on several NUMA nodes reads memory of the other nodes.
    """
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return 1
    return len(cores.nodes(cores.own_cores()))


def _part(node: Node, index: int, num_parts: int) -> frozenset[int]:
    """Divide a node's cores into `num_parts` parts; return the hardware threads of part `index`.

    The parts differ by at most one core, and the first is one of the larger.
    """
    start, end = (-(-len(node) * it // num_parts) for it in (index, index + 1))
    return frozenset[int]().union(*node[start:end])
