"""Answers that are held to a structure: valid at temperature 1, the same whatever happens.

The answers of clusters are compared with those of one engine in this process, on the demo model.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from tests.cluster import START_S, Cluster, until
from tests.faults.clients import Record, TcpClient
from wire.errors import ErrorCode
from wire.options import Options, Structure
from wire.process.model import DEMO, locate
from worker.engine.draft_model import ModelDrafter
from worker.engine.engine import Engine
from worker.engine.outputs import Failed, Output, Token
from worker.engine.sequence import Sequence as Request
from worker.executor.grammars import Grammars
from worker.executor.torch import TorchExecutor

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "maxLength": 8},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["town"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
PERSONS = {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2}
PROMPTS = [[40 + (7 * n + k) % 300 for k in range(10 + 9 * n)] for n in range(6)]
EOS = {0, 4}


def structured(schema: dict[str, Any] = PERSON, **options: Any) -> Options:
    structure = Structure(kind="json_schema", text=json.dumps(schema))
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 600, "structure": structure}
    return Options(**fields | options)


@pytest.fixture(scope="module")
def executor() -> Iterator[TorchExecutor]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the clusters want the other cores
    yield TorchExecutor.load(locate("demo"), name="demo", device="cpu")
    torch.set_num_threads(num_threads)


def engine_of(executor: TorchExecutor, **settings: Any) -> Engine:
    return Engine(executor, **{"num_blocks": 400, "block_size": 16} | settings)


def answers_of(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of each request, which all end by themselves."""
    for request in requests:
        engine.add(request)
    texts: dict[int, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work():
        for output in engine.step():
            assert not isinstance(output, Failed), output
            if isinstance(output, Token):
                assert output.finish_reason != "length"
                if output.finish_reason is None:
                    texts[output.request_id].append(output.token_id)
    engine.check()
    return list(texts.values())


def requests(schema: dict[str, Any] = PERSON, seeds: int = 12, **options: Any) -> list[Request]:
    return [
        Request(seed + 1, PROMPTS[seed % 6], structured(schema, seed=seed, **options))
        for seed in range(seeds)
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def expected(executor: TorchExecutor, tokenizer: Tokenizer) -> list[list[int]]:
    """The answers of an engine that has room for all; each is valid."""
    answers = answers_of(engine_of(executor), requests())
    for answer in answers:
        jsonschema.validate(json.loads(tokenizer.decode(answer)), PERSON)
    return answers


def small_drafter(executor: TorchExecutor) -> ModelDrafter:
    return ModelDrafter(executor, 4, num_blocks=400, block_size=16)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 26, "swap_bytes": 1 << 24},
        {"speculate": "model", "num_blocks": 26},
        {"speculate": "ngram:4", "num_blocks": 26, "max_ubatch_tokens": 40},
    ],
    ids=lambda it: " ".join(f"{key}={value}" for key, value in it.items()),
)
def test_the_answer_is_the_same(
    executor: TorchExecutor, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    """Preempted, swapped, in small chunks, with drafts of both kinds."""
    if settings.get("speculate") == "model":
        other = TorchExecutor.load(locate("demo"), name="demo", device="cpu")
        settings = settings | {"speculate": small_drafter(other)}
    engine = engine_of(executor, **settings)
    assert answers_of(engine, requests()) == expected
    if "num_blocks" in settings:
        assert engine.counters.preemptions > 0
    if "speculate" in settings:
        assert engine.counters.accepted_tokens > 0


# Each "a" adds as many items as the long rule has parts: the limit is reached after 34 of them.
LONG = " ".join(["start"] * 60)
AMBIGUOUS = Structure(kind="lark", text=f'start: {LONG} | start start | "a" | ')
REFUSED = {
    "a keyword": (structured({"uniqueItems": True}), "uniqueItems"),
    "too ambiguous": (Options(ignore_eos=True, structure=AMBIGUOUS), "items"),
    "no token": (structured(allowed_token_ids=(7,)), "no token"),
}


def test_requests_that_cannot_be_are_refused_alone(
    executor: TorchExecutor, expected: list[list[int]]
) -> None:
    engine = engine_of(executor)
    for request in requests():
        engine.add(request)
    engine.step()
    for number, (options, _) in enumerate(REFUSED.values(), 90):
        engine.add(Request(number, PROMPTS[3], options))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    failed = {it.request_id: it for it in outputs if isinstance(it, Failed)}
    for number, (_, words) in enumerate(REFUSED.values(), 90):
        failure = failed.pop(number)
        assert failure.code is ErrorCode.INVALID_REQUEST
        assert words in failure.for_peers().message
    assert not failed
    first = [o.token_id for o in outputs if isinstance(o, Token) and o.request_id == 1]
    assert [token for token in first if token not in EOS] == expected[0][1:]
    engine.check()


@pytest.mark.parametrize("is_slow", [False, True], ids=["in steps", "outside of steps"])
def test_structures_whose_masks_cannot_be_made_end_their_sequences(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    def find_slow(grammars: Grammars, limit_s: float) -> None:
        for it in grammars._current:  # noqa: SLF001
            it.is_slow = is_slow

    monkeypatch.setattr(Grammars, "_find_slow", find_slow)
    engine = engine_of(executor)
    for number in range(2):
        engine.add(Request(number, PROMPTS[0], REFUSED["too ambiguous"][0]))
    outputs: list[Output] = []
    while engine.has_work():
        outputs += engine.step()
    failed = [output for output in outputs if isinstance(output, Failed)]
    assert sorted(it.request_id for it in failed) == [0, 1]
    assert all(it.code is ErrorCode.INVALID_REQUEST for it in failed)
    engine.check()


# Clusters of real processes, asked over raw TCP.


async def ask_all(cluster: Cluster, options: Sequence[Options]) -> list[Record]:
    client = await TcpClient.connect(*cluster.tcp)
    records = [
        Record(PROMPTS[number % 6], it, it.max_tokens or 1, "tcp")
        for number, it in enumerate(options)
    ]
    await asyncio.gather(*[client.ask(record) for record in records])
    await client.close()
    return records


def check_persons(records: Sequence[Record], tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    for record in records:
        assert record.finish == "stop", record.error
        jsonschema.validate(json.loads(tokenizer.decode(record.tokens)), schema)


async def test_answers_of_pairs_are_valid_and_those_of_one_engine(
    tmp_path: Path, expected: list[list[int]], tokenizer: Tokenizer
) -> None:
    """1 + 2 workers, drafts, prompts in chunks."""
    args = ("--worker-args=--max-ubatch-tokens 32 --speculate ngram:4",)
    with Cluster(tmp_path, local="1,2", args=args) as cluster:
        records = await ask_all(cluster, [structured(seed=seed) for seed in range(24)])
        assert [record.tokens for record in records[:12]] == expected
        check_persons(records, tokenizer, PERSON)
        texts = ("(yes|no)", "(yes")
        structures = (Structure(kind="regex", text=text) for text in texts)
        word, malformed = await ask_all(cluster, [structured(structure=it) for it in structures])
        assert re.fullmatch("yes|no", tokenizer.decode(word.tokens)) and word.finish == "stop"
        assert not malformed.tokens and "malformed" in malformed.error
        await asyncio.to_thread(cluster.until_idle)


SURVIVORS = [
    *(structured(PERSONS, seed=seed, max_tokens=900) for seed in range(8)),
    *(
        Options(
            temperature=0.9,
            presence_penalty=0.6,
            frequency_penalty=0.3,
            min_tokens=90,
            seed=seed,
            max_tokens=100,
        )
        for seed in range(4)
    ),
]


async def test_texts_survive_the_kill_of_their_decode_worker(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Structured and penalized ones, sampled with a seed: the same with and without a kill."""
    with Cluster(tmp_path, local="1,1") as cluster:
        undisturbed = [record.tokens for record in await ask_all(cluster, SURVIVORS)]
        for rank in range(1, 9):
            records = await ask_all_and_kill(cluster, rank)
            assert [record.tokens for record in records] == undisturbed
            if "worker_lost" in cluster.log():
                break
        else:
            pytest.fail("every kill came when the answers were over")
        check_persons(records[:8], tokenizer, PERSONS)
        await asyncio.to_thread(cluster.until_idle)


async def ask_all_and_kill(cluster: Cluster, rank: int) -> list[Record]:
    """Start one more decode worker, ask, and kill it when it has work, if it still has."""
    victim = await asyncio.to_thread(cluster.worker, "decode", rank)
    asking = asyncio.create_task(ask_all(cluster, SURVIVORS))

    def has_work() -> bool:
        row = cluster.find("decode", rank)
        return asking.done() or (row is not None and row["placed"] > 2)

    await asyncio.to_thread(until, has_work, f"decode-{rank} has work", START_S)
    victim.kill()
    return await asking
