"""One request has one answer: whoever shares the batch, whichever workers, whatever is asked.

The answers of a cluster are compared with those of one engine in this process, on the demo model;
prompt logprobs with those of `transformers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.cluster import Cluster
from tests.faults.clients import Record, TcpClient
from wire.options import Options
from wire.process.model import locate
from worker.engine.engine import Engine
from worker.engine.outputs import Token
from worker.engine.sequence import Sequence as Request
from worker.executor.torch import TorchExecutor

STORY = "Once upon a time there was a little fox who lived near the river. Every day the fox"
NUM_TOKENS = 32
SAMPLED = Options(temperature=1.0, seed=20, ignore_eos=True, max_tokens=NUM_TOKENS)
PENALIZED = Options(
    temperature=1.0,
    seed=21,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias=((300, 2.0), (13, -100.0)),
    ignore_eos=True,
    max_tokens=NUM_TOKENS,
)
REPETITIVE = Options(repetition_penalty=1.8, ignore_eos=True, max_tokens=NUM_TOKENS)
EVERY = pytest.mark.parametrize(
    "options", [SAMPLED, PENALIZED, REPETITIVE], ids=["sampled", "penalized", "repetition"]
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill and two decode workers on the demo model."""
    with Cluster(tmp_path_factory.mktemp("pairs"), local="1,2") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def executor() -> Iterator[TorchExecutor]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the clusters want the other cores
    yield TorchExecutor.load(locate("demo"), name="demo", device="cpu")
    torch.set_num_threads(num_threads)


def engine_of(executor: TorchExecutor, **settings: Any) -> Engine:
    return Engine(executor, **{"num_blocks": 64, "block_size": 16} | settings)


def texts_of(engine: Engine) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            if isinstance(output, Token) and output.finish_reason != "stop":
                texts.setdefault(output.request_id, []).append(output.token_id)
    engine.check()
    return texts


def alone(executor: TorchExecutor, prompt: Sequence[int], options: Options) -> list[int]:
    engine = engine_of(executor)
    engine.add(Request(1, prompt, options))
    return texts_of(engine)[1]


def prompt_of(cluster: Cluster, text: str = STORY) -> list[int]:
    response = httpx.post(
        f"{cluster.http}/tokenize", json={"prompt": text}, trust_env=False, timeout=60
    )
    return response.json()["tokens"]  # type: ignore[no-any-return]


def asked(options: Options) -> dict[str, Any]:
    """The same options as fields of a body."""
    names = ("temperature", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")
    fields = {name: getattr(options, name) for name in (*names, "max_tokens", "ignore_eos")}
    return fields | {"logit_bias": {str(key): bias for key, bias in options.logit_bias}}


def over_tcp(cluster: Cluster, prompt: Sequence[int], options: Options) -> list[int]:
    """The tokens that a raw TCP client gets."""

    async def ask() -> list[int]:
        client = await TcpClient.connect(*cluster.tcp)
        record = Record(list(prompt), options, options.max_tokens or 1, "tcp")
        await client.ask(record)
        await client.close()
        return record.tokens

    return asyncio.run(ask())


# The same tokens everywhere.


@EVERY
def test_the_same_tokens_alone_in_a_crowd_and_on_any_workers(
    pairs: Cluster, executor: TorchExecutor, options: Options
) -> None:
    prompt = prompt_of(pairs)
    expected = alone(executor, prompt, options)
    fields = asked(options)
    [choice] = pairs.choices(prompt, **fields)
    assert choice["token_ids"] == expected

    def mate(number: int) -> list[int]:
        if number % 4 == 0:
            return over_tcp(pairs, prompt, options)
        if number % 4 == 1:
            [choice] = pairs.choices(prompt, **fields)
            return choice["token_ids"]  # type: ignore[no-any-return]
        other = prompt[: 3 + number]
        pairs.choices(other, temperature=1.2, seed=number, max_tokens=40, frequency_penalty=1)
        return []

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(mate, range(16)))
    assert [answer for answer in answers if answer] == [expected] * 8
    pairs.until_idle()


# Each option, end to end.


def test_min_tokens_stop_ids_and_bias(cluster: Cluster) -> None:
    prompt = prompt_of(cluster)
    greedy = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    [plain] = cluster.choices(prompt, **greedy)
    text = plain["token_ids"]
    stop = text[6]
    first = text.index(stop)
    [stopped] = cluster.choices(prompt, stop_token_ids=[stop], **greedy)
    assert (stopped["token_ids"], stopped["finish_reason"]) == (text[: first + 1], "stop")
    [choice] = cluster.choices(prompt, stop_token_ids=[stop], min_tokens=10, **greedy)
    assert stop not in choice["token_ids"][:10]
    assert len(choice["token_ids"]) >= 10
    [banned] = cluster.choices(prompt, logit_bias={stop: -100}, **greedy)
    assert stop not in banned["token_ids"]
    assert banned["token_ids"][:first] == text[:first]
    [forced] = cluster.choices(prompt, logit_bias={stop: 100}, **greedy)
    assert forced["token_ids"] == [stop] * 24


# Ends without a decode step.


def test_ends_at_the_first_token_take_no_decode_step(pairs: Cluster) -> None:
    prompt = prompt_of(pairs)
    eos = min(TorchExecutor.load(locate("demo"), name="demo", device="cpu").info.eos_token_ids)

    def decode_steps() -> int:
        workers = pairs.until_idle()["workers"]
        return sum([worker["step"] for worker in workers if worker["role"] == "decode"])

    greedy = {"temperature": 0, "max_tokens": 20}
    [plain] = pairs.choices(prompt, **greedy)
    first_text = pairs.choices(prompt, temperature=0, max_tokens=1)[0]["text"]
    assert first_text.strip()
    steps = decode_steps()
    for fields, reason in [
        ({"logit_bias": {eos: 100}}, "stop"),
        ({"stop_token_ids": plain["token_ids"][:1]}, "stop"),
        ({"stop": first_text}, "stop"),
        ({"stop": first_text.strip()[:1]}, "stop"),
        ({"max_tokens": 1}, "length"),
        ({"echo": True, "max_tokens": 0}, "length"),
    ]:
        [choice] = pairs.choices(prompt, **greedy | fields)
        assert choice["finish_reason"] == reason, fields
    # Two tokens are one decode step: and it is the only one that anybody counted.
    pairs.choices(prompt, **greedy | {"max_tokens": 2, "ignore_eos": True})
    assert decode_steps() == steps + 1


# Echo with logprobs, as evaluators ask for it.


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations are not our subject
def test_an_evaluation_gets_what_transformers_says(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with Cluster(tmp_path, args=("--worker-args=--dtype float32",)) as cluster:
        prompts = [
            prompt_of(cluster),
            prompt_of(cluster, "Tom had a red ball. He gave it to Ben."),
            [9],
        ]
        body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
        choices = cluster.choices(prompts, **body)
    model = AutoModelForCausalLM.from_pretrained(locate("demo"), dtype=torch.float32)
    for prompt, choice in zip(prompts, choices, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0]
        scores = logits.log_softmax(-1)
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert len(logprobs["tokens"]) == len(prompt) + 1
        expected = [float(scores[i, token_id]) for i, token_id in enumerate(prompt[1:])]
        assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected, abs=2e-3)
        best = scores.max(-1).values.tolist()
        assert [max(top.values()) for top in logprobs["top_logprobs"][1:]] == pytest.approx(
            best, abs=2e-3
        )


def test_echo_with_logprobs_in_every_shape(cluster: Cluster) -> None:
    prompt = prompt_of(cluster)
    base: dict[str, Any] = {"echo": True, "temperature": 0, "seed": 1}
    [long] = cluster.choices(STORY, logprobs=5, max_tokens=6, **base)
    logprobs = long["logprobs"]
    assert long["text"].startswith(STORY)
    assert len(logprobs["tokens"]) == len(prompt) + len(long["token_ids"])
    assert all(len(top) >= 4 for top in logprobs["top_logprobs"][1:])
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and offsets[len(prompt)] == len(STORY)
    for text, offset in zip(logprobs["tokens"], offsets, strict=True):
        if text.isascii() and not text.startswith("<"):
            assert long["text"][offset:].startswith(text)

    # Nothing generated; no top; from the prefix cache or not; streamed; two choices.
    [none] = cluster.choices(prompt, logprobs=5, max_tokens=0, **base)
    count = len(prompt)
    assert (none["text"], none["finish_reason"], none["token_ids"]) == (STORY, "length", [])
    assert len(none["logprobs"]["tokens"]) == count
    close = pytest.approx(logprobs["token_logprobs"][1:count], abs=1e-3)
    assert none["logprobs"]["token_logprobs"][1:] == close
    for choice in cluster.choices(prompt, logprobs=0, max_tokens=2, n=2, **base):
        assert choice["logprobs"]["token_logprobs"][1:count] == close
        assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])


def test_an_echo_may_fill_the_context(cluster: Cluster) -> None:
    """Evaluators of long texts send prompts as long as the model's context."""
    models = httpx.get(f"{cluster.http}/v1/models", trust_env=False, timeout=60).json()
    length = models["data"][0]["max_model_len"]
    prompt = (prompt_of(cluster) * length)[:length]
    [choice] = cluster.choices(prompt, echo=True, logprobs=1, max_tokens=0)
    assert (choice["token_ids"], choice["finish_reason"]) == ([], "length")
    assert len(choice["logprobs"]["token_logprobs"]) == length
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])
