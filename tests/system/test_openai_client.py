"""The openai package works unchanged, and every body is what OpenAI's own schema says.

`openai_schema.json` is an excerpt of the public OpenAPI description; its head says of which.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator

from tests.cluster import Cluster

SCHEMA = json.loads((Path(__file__).parent / "openai_schema.json").read_text())
STORY = "Once upon a time there was a"
CHAT: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with sync_client(cluster.http) as client:
        yield client


def sync_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


def async_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


def validate(kind: str, body: Any) -> None:
    Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{kind}"}).validate(body)


def post(cluster: Cluster, path: str, **body: Any) -> httpx.Response:
    with httpx.Client(base_url=cluster.http, timeout=60, trust_env=False) as http:
        return http.post(path, json={"model": cluster.model, **body})


def chunks_of(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# Answers.


def test_a_completion(client: openai.OpenAI, cluster: Cluster) -> None:
    answer = client.completions.create(model=cluster.model, prompt=STORY, **GREEDY)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens > 0
    assert 0 < usage.completion_tokens <= 40
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None


def test_a_chat(client: openai.OpenAI, cluster: Cluster) -> None:
    answer = client.chat.completions.create(model=cluster.model, messages=CHAT, **GREEDY)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_streams_say_what_whole_answers_say(client: openai.OpenAI, cluster: Cluster) -> None:
    whole = client.completions.create(model=cluster.model, prompt=STORY, **GREEDY)
    stream = client.completions.create(model=cluster.model, prompt=STORY, stream=True, **GREEDY)
    assert "".join([chunk.choices[0].text for chunk in stream]) == whole.choices[0].text

    said = client.chat.completions.create(model=cluster.model, messages=CHAT, **GREEDY)
    chunks = list(
        client.chat.completions.create(model=cluster.model, messages=CHAT, stream=True, **GREEDY)
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join([c.delta.content or "" for c in choices]) == said.choices[0].message.content
    assert choices[0].delta.role == "assistant"
    assert [c.finish_reason for c in choices if c.finish_reason] == [said.choices[0].finish_reason]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_usage_at_the_end_of_a_stream(client: openai.OpenAI, cluster: Cluster) -> None:
    chunks = list(
        client.chat.completions.create(
            model=cluster.model,
            messages=CHAT,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens >= len(chunks) - 2


async def test_many_streams_at_once(cluster: Cluster) -> None:
    async with async_client(cluster.http) as client:

        async def tell(name: str) -> str:
            stream = await client.chat.completions.create(
                model=cluster.model,
                messages=[{"role": "user", "content": f"Tell me a story about {name}."}],
                stream=True,
                **GREEDY,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        names = ["Anna", "a fox", "the sea", "Tom and Ben"]
        together = await asyncio.gather(*[tell(name) for name in names])
        assert together == [await tell(name) for name in names]
        whole = await client.completions.create(model=cluster.model, prompt=STORY, **GREEDY)
        assert whole.choices[0].text
    cluster.until_idle()


# What one can ask for.


def test_stop_strings_across_token_borders(client: openai.OpenAI, cluster: Cluster) -> None:
    asked: dict[str, Any] = {"model": cluster.model, "prompt": STORY, **GREEDY}
    text = client.completions.create(**asked).choices[0].text
    for start in range(4, min(len(text) - 6, 40), 5):
        stop = text[start : start + 6]
        answer = client.completions.create(**asked, stop=["\u0001never", stop])
        assert answer.choices[0].text == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        stream = client.completions.create(**asked, stop=stop, stream=True)
        assert "".join([chunk.choices[0].text for chunk in stream]) == text[: text.index(stop)]
    cluster.until_idle()


def test_choices_and_seeds(client: openai.OpenAI, cluster: Cluster) -> None:
    def tell(n: int, seed: int, prompt: Any = STORY) -> list[str]:
        answer = client.completions.create(
            model=cluster.model, prompt=prompt, n=n, seed=seed, temperature=1.0, max_tokens=24
        )
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    texts = tell(3, 7)
    assert len(set(texts)) > 1
    assert tell(3, 7) == texts
    assert tell(2, 7) == texts[:2]
    assert tell(3, 8) != texts
    assert tell(2, 7, [STORY, STORY]) == [*texts[:2], *texts[:2]]


def test_max_tokens(client: openai.OpenAI, cluster: Cluster) -> None:
    for count in (1, 2, 5):
        answer = client.chat.completions.create(
            model=cluster.model,
            messages=CHAT,
            temperature=0,
            max_completion_tokens=count,
            extra_body={"ignore_eos": True},
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == count


def test_token_ids_in_and_out(client: openai.OpenAI, cluster: Cluster) -> None:
    tokens = post(cluster, "/tokenize", prompt=STORY).json()
    assert tokens["count"] == len(tokens["tokens"])
    extra: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    texts = client.completions.create(model=cluster.model, prompt=STORY, **GREEDY, **extra)
    ids = client.completions.create(model=cluster.model, prompt=tokens["tokens"], **GREEDY, **extra)
    assert texts.choices[0].text == ids.choices[0].text
    (choice,) = ids.model_dump()["choices"]
    assert choice["prompt_token_ids"] == tokens["tokens"]
    assert ids.usage is not None
    assert len(choice["token_ids"]) == ids.usage.completion_tokens


def test_echo(client: openai.OpenAI, cluster: Cluster) -> None:
    answer = client.completions.create(model=cluster.model, prompt=STORY, echo=True, **GREEDY)
    assert answer.choices[0].text.startswith(STORY)
    assert len(answer.choices[0].text) > len(STORY)


def test_logprobs(client: openai.OpenAI, cluster: Cluster) -> None:
    text = client.completions.create(model=cluster.model, prompt=STORY, logprobs=3, **GREEDY)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert text.usage is not None
    assert len(logprobs.token_logprobs) == text.usage.completion_tokens
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)
    chat = client.chat.completions.create(
        model=cluster.model, messages=CHAT, logprobs=True, top_logprobs=2, **GREEDY
    )
    scores = chat.choices[0].logprobs
    assert scores is not None and scores.content is not None
    for entry in scores.content:
        assert len(entry.top_logprobs) == 2
        # Greedy: nothing is likelier than what was chosen.
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_echo_with_logprobs(client: openai.OpenAI, cluster: Cluster) -> None:
    count = len(post(cluster, "/tokenize", prompt=STORY).json()["tokens"])
    answer = client.completions.create(
        model=cluster.model, prompt=STORY, echo=True, logprobs=2, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and answer.usage is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == count + answer.usage.completion_tokens
    first, *others = logprobs.model_dump()["token_logprobs"]
    assert first is None, "nothing precedes the first token"
    assert all(value <= 0 for value in others)


def test_penalties_and_biases(client: openai.OpenAI, cluster: Cluster) -> None:
    chat: dict[str, Any] = {"model": cluster.model, "messages": CHAT, **GREEDY}
    plain = client.chat.completions.create(**chat, extra_body={"return_token_ids": True})
    token_ids = plain.model_dump()["choices"][0]["token_ids"]
    other = client.chat.completions.create(
        **chat,
        presence_penalty=1,
        frequency_penalty=1,
        logit_bias={str(token_ids[0]): -100},
        extra_body={"return_token_ids": True, "repetition_penalty": 1.3},
    )
    assert token_ids[0] not in other.model_dump()["choices"][0]["token_ids"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**chat, logit_bias={"123456": 1})
    assert caught.value.param == "logit_bias"


def test_models(client: openai.OpenAI, cluster: Cluster) -> None:
    assert [model.id for model in client.models.list()] == [cluster.model]
    assert client.models.retrieve(cluster.model).owned_by == "baton"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


# Errors.


def test_errors_are_what_the_client_expects(client: openai.OpenAI, cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=cluster.model, prompt=STORY, temperature=9)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=cluster.model, prompt=STORY, max_tokens=10_000_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-none", messages=CHAT)
    assert missing.value.code == "model_not_found"


def test_the_request_id_comes_back(client: openai.OpenAI, cluster: Cluster) -> None:
    headers = {"x-request-id": "trace-me"}
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=cluster.model, prompt=STORY, top_p=7, extra_headers=headers)
    assert bad.value.request_id == "trace-me"
    answer = client.completions.with_raw_response.create(
        model=cluster.model, prompt=STORY, max_tokens=1, extra_headers=headers
    )
    assert answer.request_id == "trace-me"


def test_no_worker_is_a_503_to_come_back_for(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, local="0,0", executor="hash") as empty,
        sync_client(empty.http) as client,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=empty.model, messages=CHAT)
        assert (caught.value.status_code, caught.value.code) == (503, "no_worker")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert httpx.get(f"{empty.http}/readyz", trust_env=False, timeout=60).status_code == 503
        assert httpx.get(f"{empty.http}/livez", trust_env=False, timeout=60).status_code == 200


def test_a_client_that_leaves_leaves_nothing_behind(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    stream = client.completions.create(
        model=cluster.model,
        prompt=STORY,
        stream=True,
        max_tokens=400,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    cluster.until_idle()


# Bodies against the schema.


@pytest.mark.parametrize("logprobs", [False, True])
def test_bodies_are_valid(cluster: Cluster, logprobs: bool) -> None:
    text: dict[str, Any] = {"prompt": STORY, **GREEDY} | ({"logprobs": 2} if logprobs else {})
    chat: dict[str, Any] = {"messages": CHAT, **GREEDY, "logprobs": logprobs}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    validate("CreateCompletionResponse", post(cluster, "/v1/completions", **text).json())
    validate("CreateChatCompletionResponse", post(cluster, "/v1/chat/completions", **chat).json())
    for chunk in chunks_of(post(cluster, "/v1/chat/completions", **chat, **usage)):
        validate("CreateChatCompletionStreamResponse", chunk)
    for chunk in chunks_of(post(cluster, "/v1/completions", **text, **usage)):
        # The schema is that of the whole answer; OpenAI streams null here until the end, and
        # null usage until the last chunk.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        if chunk["usage"] is None:
            del chunk["usage"]
        validate("CreateCompletionResponse", chunk)


def test_lists_and_errors_are_valid(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.http, trust_env=False, timeout=60) as http:
        validate("ListModelsResponse", http.get("/v1/models").json())
        for path in ("/v1/nowhere", "/v1/completions", "/v1/models/none"):
            validate("ErrorResponse", http.get(path).json())
    refused: list[dict[str, Any]] = [{}, {"prompt": STORY, "n": 0}, {"prompt": []}]
    for fields in refused:
        response = post(cluster, "/v1/completions", **fields)
        assert response.status_code == 400
        validate("ErrorResponse", response.json())
