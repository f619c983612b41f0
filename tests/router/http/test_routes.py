"""Paths find their routes, methods their handlers, and wrong paths a hint."""

from __future__ import annotations

import pytest

from router.api.errors import HttpError
from router.http.asgi import HttpExchange
from router.http.routes import Route, Routes


async def answer(exchange: HttpExchange) -> None:
    """Say nothing."""


ROUTES = Routes(
    [
        Route("/v1/chat/completions", "chat", {"POST": answer}),
        Route("/v1/models", "models", {"GET": answer}),
        Route("/v1/models/{model}", "model", {"GET": answer}),
        Route("/v1/responses/{response_id}/cancel", "cancel", {"POST": answer}),
        Route("/v1/responses/{response_id}", "response", {"GET": answer, "DELETE": answer}),
        Route("/tokenize", "tokenize", {"POST": answer}),
    ]
)


@pytest.mark.parametrize(
    ("path", "name", "named"),
    [
        ("/v1/models", "models", ""),
        ("/v1/models/", "models", ""),
        ("/v1/models/some/model", "model", "some/model"),
        ("/v1/responses/resp_1", "response", "resp_1"),
        ("/v1/responses/resp_1/cancel", "cancel", "resp_1"),
        ("/v1/responses/cancel", "response", "cancel"),
        ("/v1/responses//cancel", "response", "/cancel"),
    ],
)
def test_a_path_finds_its_route(path: str, name: str, named: str) -> None:
    found = ROUTES.find(path)
    assert found is not None
    assert (found[0].name, found[1]) == (name, named)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1" * 20_000 + "/models", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/nowhere", None),
        ("/v1", None),
        ("/", None),
        ("/v1/responses/", None),
    ],
)
def test_a_wrong_path_is_told_the_right_one(path: str, meant: str | None) -> None:
    assert ROUTES.find(path) is None
    error = ROUTES.missing(path)
    assert (error.status, error.code) == (404, "not_found")
    assert error.message.partition(" here")[2] == (f": use {meant!r}" if meant else "")
    assert len(error.message) < 500


def test_methods() -> None:
    route, _ = ROUTES.find("/v1/responses/resp_1") or pytest.fail("no route")
    assert route.allow == b"GET, HEAD, DELETE, OPTIONS"
    assert route.handler("HEAD") is route.handler("GET") is answer
    with pytest.raises(HttpError) as caught:
        route.handler("POST")
    assert (caught.value.status, caught.value.message) == (405, "use GET or DELETE here")
    assert caught.value.headers == ((b"allow", route.allow),)
