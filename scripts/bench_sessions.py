"""Run sessions of several turns on clusters of this machine; measure what is computed twice.

Each turn's prompt is the whole session so far, with the last answer, and some new tokens; all
sessions begin with the same system prompt.  The cached share is that of the tokens that earlier
turns have computed.  Every answer must have all its tokens.

    python scripts/bench_sessions.py --local 1 1,1 2,2 --sessions 5 --turns 20

With --kill-turn, a random worker is killed before this turn begins; each such turn may compute its
session once more, and no other turn may.  With --url, a running OpenAI server is measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.command.bench.load import LoadClient, Measured, Target, percentiles
from router.command.bench.table import Table
from scripts.bench.processes import Server, router


@dataclass(frozen=True)
class Turn:
    """One turn: its number from 0, how many of its tokens earlier turns computed, its figures."""

    number: int
    repeated: int
    measured: Measured


class Sessions:
    """Sessions on one server, which draw their tokens from `seed`."""

    def __init__(self, url: str, given: argparse.Namespace, seed: int) -> None:
        self._target, self._given = Target.find(url), given
        self._draw = random.Random(seed)
        self._system = self._tokens(given.system_tokens)
        self.turns: list[Turn] = []

    async def run(self, server: Server | None) -> float:
        """Run all sessions in step: a turn begins when the previous one has ended in all of them.

        Return how many seconds the turns took in total.
        """
        given, seconds = self._given, 0.0
        clients = [LoadClient(self._target) for _ in range(given.sessions)]
        histories = [list(self._system) for _ in clients]
        repeated = [0] * given.sessions
        for number in range(given.turns):
            if number == given.kill_turn and server is not None:
                await kill_one(server, self._draw)
            for history in histories:
                history += self._tokens(given.user_tokens)
            start = time.perf_counter()
            answers = await asyncio.gather(
                *[
                    self._answer(client, history, self._draw.uniform(0, given.pause_s))
                    for client, history in zip(clients, histories, strict=True)
                ]
            )
            seconds += time.perf_counter() - start
            for index, measured in enumerate(answers):
                self.turns.append(Turn(number, repeated[index], measured))
                histories[index] += measured.token_ids
                # Nobody has computed the KV of the last token of an answer.
                repeated[index] = len(histories[index]) - 1
        for client in clients:
            client.close()
        return seconds

    async def _answer(self, client: LoadClient, prompt: list[int], pause_s: float) -> Measured:
        await asyncio.sleep(pause_s)
        return await client.measure(list(prompt), self._given.output_tokens)

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(10, self._given.vocab_size) for _ in range(count)]


async def kill_one(server: Server, draw: random.Random) -> None:
    """Kill a worker, and wait until all workers are ready again."""
    workers = [each for each in server.process.children() if "worker" in each.cmdline()]
    draw.choice(workers).kill()
    await asyncio.sleep(1.0)  # until the router has noticed
    server.wait_until_ready()


def cached_share(turns: list[Turn]) -> float:
    """Return the share of the tokens computed by earlier turns that were cached, from 0 to 1."""
    found = sum(min(turn.measured.cached_tokens, turn.repeated) for turn in turns)
    return found / max(1, sum(turn.repeated for turn in turns))


def run(name: str, url: str, server: Server | None, given: argparse.Namespace, table: Table) -> int:
    """Run the sessions on a server and print a row; return the number of wrong answers."""
    sessions = Sessions(url, given, given.seed)
    seconds = asyncio.run(sessions.run(server))
    turns = sessions.turns
    problems = [turn.measured.problem for turn in turns if turn.measured.problem]
    if problems:
        print(f"{name}: {len(problems)} of {len(turns)} answers are wrong: {problems[0]}")
        return len(problems)
    later = [turn for turn in turns if turn.number]
    ttft = percentiles([turn.measured.ttft_s for turn in later])
    itl = percentiles([gap for turn in later for gap in turn.measured.itl_s])
    tokens = sum(turn.measured.num_tokens for turn in turns)
    untouched = [turn for turn in later if turn.number != given.kill_turn]
    table.row(
        name,
        cached_share(later),
        cached_share(untouched),
        ttft["p50"],
        ttft["p99"],
        itl["p50"],
        itl["p99"],
        tokens / seconds,
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--local", nargs="*", default=["1,1"], help="clusters to run, by turns")
    parser.add_argument("--url", help="a running OpenAI server to measure too")
    parser.add_argument("--model", default="demo", help="of the clusters")
    parser.add_argument("--flags", default="", help="further flags of the routers")
    parser.add_argument("--sessions", type=int, default=5, help="at the same time")
    parser.add_argument("--turns", type=int, default=20, help="of each session")
    parser.add_argument("--system-tokens", type=int, default=256, help="that all begin with")
    parser.add_argument("--user-tokens", type=int, default=48, help="new in each turn")
    parser.add_argument("--output-tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--pause-s", type=float, default=0.5, help="the longest before a turn")
    parser.add_argument("--kill-turn", type=int, default=-1, help="kill a worker before this turn")
    parser.add_argument("--vocab-size", type=int, default=1000, help="ids are drawn below this")
    parser.add_argument("--rounds", type=int, default=1, help="by turns")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens")
    given = parser.parse_args()
    columns = ("cached:>7.3f", "without kill:>13.3f", "TTFT p50:>9.1f", "p99:>8.1f")
    table = Table("cluster:<10", *columns, "ITL p50:>8.1f", "p99:>8.1f", "tok/s:>8.1f")
    wrong = 0
    for _ in range(given.rounds):
        for local in given.local:
            flags = ("--model", given.model, "--local", local, *given.flags.split())
            with router(*flags) as server:
                host, port = server.http
                wrong += run(local, f"http://{host}:{port}", server, given, table)
        if given.url:
            wrong += run("peer", given.url, None, given, table)
        given.seed += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
