"""scripts/schemas_check: many JSON schemas against a cluster; every finished answer must be valid.

Each schema is asked for several times at temperature 1.  What ends by itself must be JSON that the
schema allows; a schema that the server cannot hold to must be refused with 400, and only where the
list in `random_schemas` lets it.  The modes: plain, with drafts, with blocks for two long answers
only, so that some have to give way to others, and 2 + 2 workers of which the decode workers are
killed in turns meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema

from tests.clients.random_schemas import Case, cases
from tests.cluster import Cluster

MODES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "drafts": {"args": ("--worker-args", "--speculate ngram:4")},
    "few-blocks": {"args": ("--worker-args", "--num-blocks 136")},
    "kills": {"local": "2,2"},
}
# Takes a second, in which a heartbeat says how few of the blocks set aside for it are taken yet: so
# a router places a third where there is room for the whole of two, and one has to give way.
LONG: Final = Case(
    "many integers",
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 999},
        "minItems": 300,
        "maxItems": 310,
    },
)
NUM_LONG: Final = 40
QUESTION: Final = "Tell me of Mia, her fox and her lantern."
AT_ONCE: Final = 64


class Tally:
    """The counts of all answers by outcome."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def add(self, case: Case, response: httpx.Response) -> None:
        kind, words = _judge(case, response)
        self.counts[kind] += 1
        if words:
            self.wrong.append(f"{case.name}: {words}\n    {json.dumps(case.schema)[:400]}")


def _judge(case: Case, response: httpx.Response) -> tuple[str, str]:
    """The kind of end this is, and in words what is wrong with it, if anything."""
    if response.status_code == 400 and case.may_be_refused:
        return "refused", ""
    if response.status_code != 200:
        return "failed", f"{response.status_code} {response.text[:300]}"
    choice = response.json()["choices"][0]
    if choice["finish_reason"] != "stop":
        return "cut", ""
    try:
        body = json.loads(choice["message"]["content"])
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(case.schema, format_checker=checker).validate(body)
    except (ValueError, jsonschema.ValidationError) as problem:
        return "INVALID", f"{choice['message']['content']!r}: {str(problem).splitlines()[0]}"
    return "valid", ""


async def ask_all(cluster: Cluster, asked: list[tuple[Case, int]], tally: Tally) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=cluster.http, timeout=300, trust_env=False) as http:

        async def ask(case: Case, seed: int) -> None:
            body = {
                "model": cluster.model,
                "messages": [{"role": "user", "content": QUESTION}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "it", "schema": case.schema},
                },
                "temperature": 1,
                "seed": seed,
                "max_tokens": 1000,
            }
            async with gate:
                tally.add(case, await http.post("/v1/chat/completions", json=body))

        await asyncio.gather(*[ask(case, seed) for case, seed in asked])


class Killer(threading.Thread):
    """Kills a decode worker, waits until the router has started it again, kills the other one."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._over = threading.Event()
        self.kills = 0

    def run(self) -> None:
        while not self._over.wait(0.5):
            if all(self._cluster.find("decode", rank) for rank in (0, 1)):
                self._cluster.kill_local("decode", self.kills % 2)
                self.kills += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


def check(mode: str, asked: list[tuple[Case, int]]) -> Tally:
    tally = Tally()
    with Cluster(Path(tempfile.mkdtemp(prefix="baton-schemas-")), **MODES[mode]) as cluster:
        killer = Killer(cluster)
        if mode == "kills":
            killer.start()
        if mode == "few-blocks":
            asked = asked + [(LONG, seed) for seed in range(NUM_LONG)]
        asyncio.run(ask_all(cluster, asked, tally))
        if mode == "kills":
            killer.stop()
        tally.counts["kills"] = killer.kills
        metrics = httpx.get(f"{cluster.http}/metrics", trust_env=False).text.splitlines()
        given_way = [float(it.split()[-1]) for it in metrics if "worker_preemptions_total{" in it]
        tally.counts["preemptions"] = int(sum(given_way))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/schemas_check", description=__doc__)
    parser.add_argument("--mode", action="append", choices=list(MODES), help="default: all")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5, help="answers asked for of each schema")
    arguments = parser.parse_args()
    asked = [(case, seed) for case in cases(arguments.schemas) for seed in range(arguments.seeds)]
    wrong = 0
    for mode in arguments.mode or MODES:
        tally = check(mode, asked)
        print(f"{mode}: " + ", ".join(f"{n} {kind}" for kind, n in tally.counts.items()))
        for line in tally.wrong:
            print(f"  {line}")
        wrong += len(tally.wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
