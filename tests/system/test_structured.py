"""Answers that are held to a structure: valid at temperature 1, the same whatever happens.

The answers of clusters are compared with those of one engine in this process, on the demo model.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from tests.cluster import START_S, Cluster, until
from wire.errors import ErrorCode
from wire.options import Options, Structure
from wire.process.model import DEMO, locate
from worker.engine.draft_model import ModelDrafter
from worker.engine.engine import Engine
from worker.engine.outputs import Failed, Output, Token
from worker.engine.sequence import Sequence as Request
from worker.executor.grammars import Grammars
from worker.executor.hash import create
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
# What is asked in the system tests: PREFILL_REQUEST and DECODE_REQUEST, and what is said.
PREFILL_REQUEST, PREFILL_DONE, DECODE_REQUEST, TOKEN, DONE, ERROR = 30, 31, 34, 35, 36, 45


def held(schema: dict[str, Any] = PERSON, **options: Any) -> Options:
    structure = Structure(kind="json_schema", text=json.dumps(schema))
    held: dict[str, Any] = {"temperature": 1.0, "max_tokens": 600, "structure": structure}
    return Options(**held | options)


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
        Request(seed + 1, PROMPTS[seed % 6], held(schema, seed=seed, **options))
        for seed in range(seeds)
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def expected(executor: TorchExecutor, tokenizer: Tokenizer) -> list[list[int]]:
    """What an engine says that has room for all; every answer is valid."""
    answers = answers_of(engine_of(executor), requests())
    for answer in answers:
        jsonschema.validate(json.loads(tokenizer.decode(answer)), PERSON)
    return answers


def small_drafter(executor: TorchExecutor) -> ModelDrafter:
    return ModelDrafter(executor, 4, num_blocks=400, block_size=16)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 26},
        {"num_blocks": 26, "swap_bytes": 1 << 24},
        {"max_ubatch_tokens": 16},
        {"speculate": "ngram:4"},
        {"speculate": "model"},
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


def test_a_draft_model_that_obeys_too_is_always_right(executor: TorchExecutor) -> None:
    other = TorchExecutor.load(locate("demo"), name="demo", device="cpu")
    engine = engine_of(executor, speculate=small_drafter(other))
    answers_of(engine, requests(seeds=4))
    # Drafts are not taken back for the structure's sake; only those behind the end are for nothing.
    assert engine.counters.accepted_tokens > 0.8 * engine.counters.drafted_tokens


def test_an_answer_goes_on_where_an_earlier_attempt_left_it(
    executor: TorchExecutor, expected: list[list[int]]
) -> None:
    for cut in (1, 7, 20, len(expected[0])):
        given = [*PROMPTS[0], *expected[0][:cut]]
        request = Request(1, given, held(seed=0, generated_tokens=cut))
        assert answers_of(engine_of(executor), [request]) == [expected[0][cut:]]


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 500}])
def test_an_answer_ends_where_its_structure_does(
    executor: TorchExecutor, expected: list[list[int]], options: dict[str, Any]
) -> None:
    assert answers_of(engine_of(executor), requests(**options)) == expected


def test_an_answer_may_be_cut_off(executor: TorchExecutor) -> None:
    engine = engine_of(executor)
    engine.add(Request(1, PROMPTS[0], held(max_tokens=5)))
    outputs = [output for _ in range(20) if engine.has_work() for output in engine.step()]
    tokens = [output for output in outputs if isinstance(output, Token)]
    assert [token.finish_reason for token in tokens] == [None] * 4 + ["length"]


# Each "a" adds as many items as the long rule has parts: the limit is reached after 34 of them.
LONG = " ".join(["start"] * 60)
AMBIGUOUS = Structure(kind="lark", text=f'start: {LONG} | start start | "a" | ')
REFUSED = {
    "no schema": (Options(structure=Structure(kind="json_schema", text="{")), "no JSON"),
    "a keyword": (held({"uniqueItems": True}), "uniqueItems"),
    "too ambiguous": (Options(ignore_eos=True, structure=AMBIGUOUS), "items"),
    "no token": (held(allowed_token_ids=(7,)), "no token"),
    "no token at all": (Options(allowed_token_ids=(2_000_000_000,)), "no token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_be_is_refused_alone(
    executor: TorchExecutor, expected: list[list[int]], name: str
) -> None:
    options, said = REFUSED[name]
    engine = engine_of(executor)
    for request in requests():
        engine.add(request)
    engine.step()
    engine.add(Request(99, PROMPTS[3], options))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    (failed,) = [output for output in outputs if isinstance(output, Failed)]
    assert (failed.request_id, failed.code) == (99, ErrorCode.INVALID_REQUEST)
    assert said in failed.for_peers().message
    first = [o.token_id for o in outputs if isinstance(o, Token) and o.request_id == 1]
    assert [token for token in first if token not in EOS] == expected[0][1:]
    engine.check()


def test_structures_that_fail_in_one_step_end_in_it(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else their masks become slow first, and are made outside of steps.
    monkeypatch.setattr(Grammars, "_find_slow", lambda *_: None)
    engine = engine_of(executor)
    for number in range(2):
        engine.add(Request(number, PROMPTS[0], REFUSED["too ambiguous"][0]))
    failed: list[int] = []
    while not failed:
        failed = [output.request_id for output in engine.step() if isinstance(output, Failed)]
    assert sorted(failed) == [0, 1]


def test_structures_that_fail_while_their_masks_are_made_outside_of_steps_end_too(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_slow(grammars: Grammars, limit_s: float) -> None:
        for it in grammars._current:  # noqa: SLF001
            it.is_slow = True

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


def test_an_executor_that_cannot_says_so() -> None:
    engine = Engine(create(), num_blocks=20, block_size=4)
    engine.add(Request(1, [5, 6], held()))
    (failed,) = engine.step()
    assert isinstance(failed, Failed)
    assert failed.code is ErrorCode.INVALID_REQUEST and "structure" in failed.message


# Clusters of real processes, asked over raw TCP.


def ask(cluster: Cluster, prompt: Sequence[int], options: dict[str, Any]) -> tuple[list[int], Any]:
    """The tokens of an answer and its end: a map, or the code and message of an error."""
    packed = msgspec.msgpack.encode(options)
    tokens: list[int] = []
    with (
        socket.create_connection(cluster.tcp, timeout=60) as client,
        client.makefile("rwb") as peer,
    ):
        payload = struct.pack(f"<{len(prompt)}I", *prompt) + packed
        for tag, header, more in (
            (PREFILL_REQUEST, struct.pack("<QII", 1, len(prompt), 0xFFFFFFFF), payload),
            (DECODE_REQUEST, struct.pack("<QII", 1, 0xFFFFFFFF, 0), b""),
        ):
            peer.write(struct.pack("<II", tag, 16 + len(more)) + header + more)
        peer.flush()
        while True:
            tag, length = struct.unpack("<II", peer.read(8))
            body = peer.read(length)
            if tag == DONE:
                return tokens, msgspec.msgpack.decode(body[16:])
            if tag == ERROR:
                code = struct.unpack_from("<I", body, 8)[0]
                return tokens, (code, msgspec.msgpack.decode(body[16:])["message"])
            tokens.append(struct.unpack_from("<q", body, 16 if tag == PREFILL_DONE else 8)[0])


def wanted(schema: dict[str, Any], seed: int) -> dict[str, Any]:
    structure = {"kind": "json_schema", "text": json.dumps(schema)}
    return {"temperature": 1.0, "seed": seed, "max_tokens": 900, "structure": structure}


def ask_all(cluster: Cluster, schema: dict[str, Any], seeds: range) -> list[tuple[list[int], Any]]:
    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(lambda s: ask(cluster, PROMPTS[s % 6], wanted(schema, s)), seeds))


def test_answers_of_pairs_are_valid_and_those_of_one_engine(
    tmp_path: Path, expected: list[list[int]], tokenizer: Tokenizer
) -> None:
    """2 + 2 workers, drafts, prompts in chunks; raw TCP."""
    args = ("--worker-args=--max-ubatch-tokens 32 --speculate ngram:4",)
    with Cluster(tmp_path, local="2,2", args=args) as cluster:
        answers = ask_all(cluster, PERSON, range(48))
        assert [tokens for tokens, _ in answers[:12]] == expected
        for tokens, end in answers:
            assert end["finish_reason"] == "stop"
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), PERSON)
        options = wanted(PERSON, 1) | {"structure": {"kind": "regex", "text": "(yes|no)"}}
        tokens, end = ask(cluster, PROMPTS[1], options)
        assert re.fullmatch("yes|no", tokenizer.decode(tokens)) and end["finish_reason"] == "stop"
        options["structure"] = {"kind": "regex", "text": "(yes"}
        tokens, (code, message) = ask(cluster, PROMPTS[1], options)
        assert not tokens and code == ErrorCode.INVALID_REQUEST and "malformed" in message
        cluster.until_idle()


def test_an_object_survives_the_kill_of_its_decode_worker(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with Cluster(tmp_path, local="1,1") as cluster:
        undisturbed = ask_all(cluster, PERSONS, range(12))
        for rank in range(1, 9):
            answers = ask_all_and_kill(cluster, rank)
            assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in undisturbed]
            if "worker_lost" in cluster.log():
                break
        else:
            pytest.fail("every kill came when the answers were over")
        for tokens, end in answers:
            assert end["finish_reason"] == "stop"
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), PERSONS)
        cluster.until_idle()


def ask_all_and_kill(cluster: Cluster, rank: int) -> list[tuple[list[int], Any]]:
    """Start one more decode worker, ask, and kill it when it has work, if it still has."""
    victim = cluster.worker("decode", rank)
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(ask_all, cluster, PERSONS, range(12))

        def has_work() -> bool:
            row = cluster.find("decode", rank)
            return answers.done() or (row is not None and row["placed"] > 2)

        until(has_work, f"decode-{rank} has work", START_S)
        victim.send_signal(signal.SIGKILL)
        return answers.result()
