"""One request begins in each iteration of the loop; clients take turns; those that left do not."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from router.http.admission import Admission
from router.http.asgi import Disconnected, Event, HttpExchange


class Client:
    """One request of a client, which leaves when the test says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_left = asyncio.Event()

    async def _receive(self) -> Event:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: Event) -> None:
        raise AssertionError(event)

    async def begin(self, admission: Admission, begun: list[str]) -> None:
        exchange = HttpExchange({}, self._receive, self._send, "id", 0.0, key_name=self.name)
        await admission.wait(exchange)
        begun.append(self.name)


async def test_a_request_alone_begins_at_once() -> None:
    admission, begun = Admission(), list[str]()
    for _ in range(2):
        with pytest.raises(StopIteration):
            Client("anna").begin(admission, begun).send(None)
        await asyncio.sleep(0)
    assert begun == ["anna", "anna"]


async def test_the_first_request_of_another_client_begins_before_the_rest_of_many() -> None:
    admission, begun = Admission(), list[str]()
    names = ["anna"] * 50 + ["ben"] * 2
    await asyncio.gather(*[Client(name).begin(admission, begun) for name in names])
    assert begun == ["anna", "anna", "ben", "anna", "ben", *["anna"] * 47]


async def test_others_are_served_between_two_requests() -> None:
    admission, begun = Admission(), list[str]()
    lengths: list[int] = []
    requests = asyncio.gather(*[Client("anna").begin(admission, begun) for _ in range(9)])
    while not requests.done():
        lengths.append(len(begun))
        await asyncio.sleep(0)
    steps = [after - before for before, after in pairwise(lengths)]
    assert len(begun) == 9 and max(steps) == 1


async def test_a_request_whose_client_leaves_while_it_waits_never_begins() -> None:
    admission, begun = Admission(), list[str]()
    clients = [Client("anna") for _ in range(40)]
    requests = [asyncio.create_task(client.begin(admission, begun)) for client in clients]
    for client in clients[10:]:  # noticed long before it would be their turn
        client.has_left.set()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert begun == ["anna"] * 10
    assert [type(result) for result in results[10:]] == [Disconnected] * 30
    await asyncio.sleep(0)
    with pytest.raises(StopIteration):  # Those that left have no turns to wait for.
        Client("anna").begin(admission, begun).send(None)
