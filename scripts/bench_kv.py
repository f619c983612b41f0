"""Measure how fast KV moves from worker to worker, compared with the limits of the machine.

    python scripts/bench_kv.py                            # all transports
    python scripts/bench_kv.py --ways tcp --tokens 32768  # 4 GiB each; needs 8 GiB of memory
    python scripts/bench_kv.py --small                    # small prompts only
    python scripts/bench_kv.py --short                    # only check that KV arrives unchanged

Runs two real workers without a model, with the KV shape of Llama-8B (32 layers x 8 heads x 128,
bfloat16) in blocks that are not contiguous.  First, KV is written on one worker and compared on the
other.  Then transfers are timed from the offer to the last ACK, alternately with a lower bound:
`zmq+` or `memory` of `bench/kv_floor.py`.  Over TCP, segments use a separate connection, encrypted
if there are keys (SPEC 6.9), except for `tcp+zmq` and `tcp+curve`; over ipc they do not.  With
`--split` each worker has its own cores, like the router's local workers on a large machine.  A
segment is 2 MiB.  CPU seconds are user and kernel time of both workers together; `switches` are
voluntary context switches and `jobs` the jobs of the transfer threads, both per segment.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from router.command.bench.table import Table
from router.command.keys import make_keys
from scripts.bench import kv_floor
from scripts.bench.kv_pair import Moved, Pair, pair
from wire.layout import KVLayout

WAYS: Final = ("tcp", "tcp+zmq", "ipc", "tcp+keys", "tcp+curve", "ipc+keys", "memory")
LLAMA_8B: Final = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
SMALL: Final = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")
DEMO: Final = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=32, dtype="bfloat16")
BLOCK_SIZE: Final = 16
SEGMENT_BYTES: Final = 2 << 20
# The lengths of the checked prompts: whole blocks, a partial block, and one token.
CHECKED: Final = (128, 300, 17, 1)
SMALL_PROMPTS: Final = (64, 512)
SMALL_PER_ROUND: Final = 30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 1024, 8192])
    parser.add_argument("--at-once", type=int, default=16, help="transfers of --each tokens")
    parser.add_argument("--each", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--split", action="store_true", help="each worker on half of the cores")
    parser.add_argument("--small", action="store_true", help="prompts of the demo's size only")
    parser.add_argument("--short", action="store_true", help="check only, with a small layout")
    args = parser.parse_args()
    if not args.short and not args.small:
        show_floors(args.tokens)
    for way in args.ways:
        with settings_of(way) as settings:
            if args.short:
                asyncio.run(check(way, settings))
            else:
                asyncio.run(measure_small(way, settings, args.rounds))
            if not args.short and not args.small:
                asyncio.run(measure(way, settings, args))
    return 0


@contextmanager
def settings_of(way: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of the workers for one transport."""
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{directory}/kv" if way.startswith("ipc") else "tcp://127.0.0.1:0"
        settings: dict[str, Any] = {"kv_bind": endpoint, "block_size": BLOCK_SIZE}
        settings["kv_shared_memory"] = "auto" if way == "memory" else "off"
        if way in ("tcp+zmq", "tcp+curve"):
            settings["kv_segment_port"] = "off"
        if way.endswith(("keys", "curve")):
            settings["keys"] = Path(directory) / "keys"
            make_keys(settings["keys"], ["router", "prefill-0", "decode-0"])
        yield settings


async def check(way: str, settings: dict[str, Any]) -> None:
    """Transfer KV of a small layout and check that it arrives unchanged."""
    async with pair(SMALL, num_blocks=200, max_model_len=1000, **settings) as workers:
        await check_marks(workers)
    print(f"{way}: all KV arrived as it was")


async def check_marks(workers: Pair) -> None:
    for mark, num_tokens in enumerate(CHECKED, start=3):
        await workers.move(num_tokens, count=3, mark=mark)


def show_floors(tokens: list[int]) -> None:
    num_tokens = min(max(tokens), 4096)
    for way in kv_floor.WAYS:
        rate = kv_floor.measure(way, LLAMA_8B, num_tokens, BLOCK_SIZE)
        print(f"{way:8} {rate / 1e9:6.2f} GB/s", flush=True)


async def measure(way: str, settings: dict[str, Any], args: argparse.Namespace) -> None:
    """Check transfers, then time each size, alternately with the lower bound."""
    sizes = [(num_tokens, 1) for num_tokens in args.tokens] + [(args.each, args.at_once)]
    most = max(num_tokens * count for num_tokens, count in sizes)
    limits = {"num_blocks": most // BLOCK_SIZE + args.at_once, "max_model_len": most + BLOCK_SIZE}
    workers_of = partial(pair, LLAMA_8B, is_split=args.split, max_ubatch_tokens=most)
    async with workers_of(**limits, **settings) as workers:
        await check_marks(workers)
        floor_way = "memory" if way == "memory" else "zmq+"
        floors: list[float] = []
        series = [Series(num_tokens, count) for num_tokens, count in sizes]
        for _ in range(args.rounds):
            rate = await asyncio.to_thread(kv_floor.measure, floor_way, LLAMA_8B, 4096, BLOCK_SIZE)
            floors.append(rate)
            for it in series:
                await it.run(workers)
        floor = statistics.median(floors)
        print(f"{way}: floor {floor_way} {floor / 1e9:.2f} GB/s in the same minutes")
        table = Table(
            *("at once:>7", "tokens:>7", "GB/s:>6.2f", "x floor:>7.2f", "ms:>8.1f"),
            *("slowest x median:>16.2f", "CPU s/GB:>8.2f", "switches:>8.1f", "jobs:>6.1f"),
        )
        for it in series:
            table.row(*it.figures(floor))


async def measure_small(way: str, settings: dict[str, Any], rounds: int) -> None:
    """Time small prompts, alternately with KV sent with the offer and with KV sent on credit."""
    limits = {"num_blocks": 200, "max_model_len": 1000, **settings}
    async with (
        pair(DEMO, **limits) as unasked,
        pair(DEMO, **limits, kv_unasked_bytes=0) as on_credit,
    ):
        for num_tokens in SMALL_PROMPTS:
            took: dict[Pair, list[float]] = {unasked: [], on_credit: []}
            for _ in range(rounds):
                for workers, seconds in took.items():
                    for _ in range(SMALL_PER_ROUND):
                        (moved,) = await workers.move(num_tokens)
                        seconds.append(1e3 * moved.seconds)
            with_offer, with_credit = (statistics.median(it) for it in took.values())
            print(
                f"{way}: demo, {num_tokens:4} tokens: {with_offer:.2f} ms with the offer, "
                f"{with_credit:.2f} on credit",
                flush=True,
            )


class Series:
    """Measured transfers of one size, `count` at a time."""

    def __init__(self, num_tokens: int, count: int) -> None:
        self._num_tokens, self._count = num_tokens, count
        self._repeats: list[list[Moved]] = []
        self._used: dict[str, float] = {"cpu_s": 0.0, "switches": 0.0, "jobs": 0.0}

    async def run(self, workers: Pair) -> None:
        """Transfer about 1 GiB, in at least as many repetitions as the lower bound has."""
        num_bytes = self._num_tokens * self._count * LLAMA_8B.token_bytes
        before = await workers.figures()
        for _ in range(max(kv_floor.REPEATS, (1 << 30) // num_bytes)):
            self._repeats.append(await workers.move(self._num_tokens, self._count))
        after = await workers.figures()
        for name in self._used:
            self._used[name] += sum(after[role][name] - before[role][name] for role in after)

    def figures(self, floor: float) -> list[float]:
        """Return the cells of the table row; `floor` is the bound in bytes per second."""
        rates, seconds, slowest = [], [], 0.0
        for turn in self._repeats:
            took = max(it.ready_s for it in turn) - min(it.offered_s for it in turn)
            rates.append(sum(it.num_bytes for it in turn) / took)
            seconds.append(took)
            each = [it.seconds for it in turn]
            slowest = max(slowest, max(each) / statistics.median(each))
        total = sum(it.num_bytes for turn in self._repeats for it in turn)
        rate, segments = statistics.median(rates), total / SEGMENT_BYTES
        return [
            *(self._count, self._num_tokens, rate / 1e9, rate / floor),
            *(1e3 * statistics.median(seconds), slowest, self._used["cpu_s"] / total * 1e9),
            *(self._used["switches"] / segments, self._used["jobs"] / segments),
        ]


if __name__ == "__main__":
    sys.exit(main())
