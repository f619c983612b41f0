"""Structures are checked once, in turns; one that is known waits for nobody."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from typing import Any, Literal
from weakref import WeakSet

import pytest

from router.api.errors import HttpError
from router.api.requests.structures import Wanted
from router.http.asgi import Disconnected, Event, HttpExchange
from router.http.structures import Structures
from tests.router.http.checks import Checks
from wire.options import Structure
from wire.process.fair_threads import FairThreads

PARAM = "structured_outputs.regex"


class Asking:
    """Structures over two threads, and those who ask for them."""

    def __init__(self) -> None:
        self.structures = Structures(FairThreads(2, "test"))

    def ask(
        self,
        asker: str,
        text: str,
        has_left: asyncio.Event | None = None,
        *,
        param: str = PARAM,
        kind: Literal["regex", "lark"] = "regex",
        salt: str = "",
    ) -> asyncio.Task[Structure]:
        async def receive() -> Event:
            await (has_left or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(event: Event) -> None:
            raise AssertionError(event)

        exchange = HttpExchange({"headers": []}, receive, send, "id", 0.0, key_name=asker)
        exchange.cache_salt = lambda _: salt
        wanted = Wanted(param, kind, text)
        return asyncio.create_task(self.structures.validate(exchange, wanted))


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    return Checks(monkeypatch)


@pytest.fixture
def asking() -> Asking:
    return Asking()


async def test_a_known_structure_is_not_checked_again(checks: Checks, asking: Asking) -> None:
    for asker in ("anna", "anna", "ben"):
        assert await asking.ask(asker, "a+") == Structure("regex", "a+")
        with pytest.raises(HttpError, match=PARAM) as caught:
            await asking.ask(asker, "(")
        assert (caught.value.status, caught.value.param) == (400, PARAM)
    assert checks.checked == ["a+", "("]


async def test_a_key_does_not_find_what_another_key_has_sent(
    checks: Checks, asking: Asking
) -> None:
    for asker, salt in (("anna", "a"), ("anna", "a"), ("ben", "b"), ("ben", "")):
        await asking.ask(asker, "a+", salt=salt)
    assert checks.checked == ["a+"] * 3


async def test_a_known_structure_does_not_wait(checks: Checks, asking: Asking) -> None:
    await asking.ask("anna", "a+")
    asked = [asking.ask(asker, f"slow{asker}{number}") for number in (1, 2) for asker in "abcd"]
    await checks.have_begun()
    try:
        assert await asking.ask("anna", "a+") == Structure("regex", "a+")
    finally:
        checks.may_go_on.set()
        await asyncio.gather(*asked)


async def test_concurrent_requests_share_one_check(checks: Checks, asking: Asking) -> None:
    asked = [asking.ask(asker, "slow") for asker in ("anna", "anna", "ben")]
    await checks.have_begun()
    checks.may_go_on.set()
    assert await asyncio.gather(*asked) == [Structure("regex", "slow")] * 3
    assert checks.checked == ["slow"]


async def test_nothing_is_checked_or_kept_for_clients_that_have_left(
    checks: Checks, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures, wrap = WeakSet[Future[Any]](), asyncio.wrap_future

    def noted(future: Future[Any]) -> asyncio.Future[Any]:
        futures.add(future)
        return wrap(future)

    monkeypatch.setattr(asyncio, "wrap_future", noted)
    first = asking.ask("anna", "slow")
    await checks.have_begun()
    has_left = asyncio.Event()
    gone = [asking.ask("anna", text, has_left) for text in ("left", "left", "one left")]
    stays = asking.ask("anna", "one left")
    await asyncio.sleep(0)
    has_left.set()
    for each in gone:
        with pytest.raises(Disconnected):
            await each
    checks.may_go_on.set()
    await asyncio.gather(first, stays)
    assert checks.checked == ["slow", "one left"]
    assert await asking.ask("anna", "left") == Structure("regex", "left")
    del each, gone  # their errors refer to what they waited for
    gc.collect()
    assert not [it for it in futures if it.cancelled()]
