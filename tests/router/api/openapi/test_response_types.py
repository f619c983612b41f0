"""Real answers are of the types that the description promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.api.openapi.operations import OPERATIONS, Operation
from tests.router.site import Answer, Site, write_model

NAMED = {"{model}": "letters", "{worker}": "decode-0"}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(write_model(tmp_path))


async def answer_to(site: Site, operation: Operation, **fields: Any) -> bytes:
    path = operation.path
    async with site.client() as client:
        for braces, name in NAMED.items():
            path = path.replace(braces, name)
        body = {**operation.example, "model": "letters", **fields} if operation.example else None
        answer = await client.request(operation.method, path, json=body)
    assert answer.status_code == 200, answer.text
    if isinstance(operation.answer, str):
        assert answer.headers["content-type"].startswith(operation.answer)
    return answer.content


def checked(raw: bytes, kind: Any) -> Any:
    """Return the answer, strictly of this type and of nothing looser."""
    return msgspec.json.decode(raw, type=kind) if isinstance(kind, type) else raw


# Paths with an id that must exist, and a stream that ends with the router (http/test_events.py).
UNANSWERED = ("{response}", "/input_items", "/cancel", "{request}", "/events", "/verify")


@pytest.mark.parametrize(
    "operation",
    [each for each in OPERATIONS if not each.path.endswith(UNANSWERED)],
    ids=lambda each: f"{each.method} {each.path}",
)
async def test_an_example_is_answered(site: Site, operation: Operation) -> None:
    checked(await answer_to(site, operation), operation.answer)
    if operation.is_streamed:
        assert b"data: " in await answer_to(site, operation, stream=True)


BY_NAME = {(each.method, each.path): each for each in OPERATIONS}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"logprobs": 2, "echo": True, "return_token_ids": True}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
        ("/v1/chat/completions", {"baton_usage": True, "n": 2}),
    ],
)
async def test_what_is_asked_for_besides(site: Site, path: str, fields: dict[str, Any]) -> None:
    site.answer = lambda prompt: Answer("hey", logprobs="logprobs" in fields)
    operation = BY_NAME["post", path]
    answer = checked(await answer_to(site, operation, **fields), operation.answer)
    assert answer.choices


async def test_a_response_that_is_kept(site: Site) -> None:
    made = checked(
        await answer_to(site, BY_NAME["post", "/v1/responses"]),
        BY_NAME["post", "/v1/responses"].answer,
    )
    path = "/v1/responses/{response}"
    async with site.client() as client:
        for method, rest in (("get", ""), ("get", "/input_items"), ("delete", "")):
            answer = await client.request(method, f"/v1/responses/{made.id}{rest}")
            assert answer.status_code == 200
            checked(answer.content, BY_NAME[method, path + rest].answer)


async def test_refusals(site: Site) -> None:
    async with site.client() as client:
        for operation in OPERATIONS:
            if operation.body is not None:
                refused = await client.post(operation.path, json=[])
                assert refused.status_code == 400
                checked(refused.content, operation.refusal)
