"""The screen, driven by keys, beside a real cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from router.command.client import Client
from router.command.top.app import Top
from router.command.top.table import COLUMNS
from tests.cluster import Cluster
from tests.router import children


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("top"), executor="hash") as cluster:
        yield cluster


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await pilot.pause(0.02)


def column(app: Top, name: str) -> list[str]:
    index = COLUMNS.index(name)
    return [str(app.table.get_row_at(row)[index]) for row in range(app.table.row_count)]


def labels(app: Top) -> list[str]:
    return [str(each.label) for each in app.table.ordered_columns]


def line(app: Top) -> str:
    return str(app.line.render())


async def test_workers_are_shown_sorted_and_filtered_by_keys(cluster: Cluster) -> None:
    app = Top(Client(cluster.http), 0.2)
    async with app.run_test(size=(160, 20)) as pilot:
        await until(pilot, lambda: app.table.row_count == 2)
        assert column(app, "worker") == ["decode-0", "prefill-0"]
        await until(pilot, lambda: column(app, "state") == ["ready", "ready"])
        await pilot.press("r")
        await until(pilot, lambda: column(app, "worker") == ["prefill-0", "decode-0"])
        await pilot.press("s")
        await until(pilot, lambda: labels(app)[:2] == ["worker", "state ▼"])
        await pilot.press("slash")
        await until(pilot, lambda: app.query_one("#filter", Input).has_focus)
        await pilot.press(*"decode")
        await until(pilot, lambda: column(app, "worker") == ["decode-0"])
        await pilot.press("q")  # a letter of the filter, which no row has
        await until(pilot, lambda: app.table.row_count == 0)
        await pilot.press("escape")
        await until(pilot, lambda: app.table.row_count == 2)
        assert not app.query_one("#filter", Input).value
        await pilot.press("q")
        await children.until(lambda: app.return_code == 0)


async def test_steps_and_tokens_of_a_request_show_up(cluster: Cluster) -> None:
    app = Top(Client(cluster.http), 0.2)
    seen: set[str] = set()

    async with app.run_test(size=(160, 20)) as pilot:
        await until(pilot, lambda: app.table.row_count == 2)

        async def ask_until_seen() -> None:
            while not seen - {"0.0"}:
                await asyncio.to_thread(cluster.choices, [7, 8], max_tokens=64, ignore_eos=True)

        def has_moved() -> bool:
            seen.update(column(app, "steps/s"))
            return len(seen - {"0.0"}) > 0

        asking = asyncio.create_task(ask_until_seen())
        await until(pilot, has_moved)
        await asking
        await until(pilot, lambda: "2 ready" in line(app) and "tokens/s streamed" in line(app))


async def test_a_lost_worker_and_a_router_that_is_gone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with Cluster(tmp_path_factory.mktemp("gone"), local="", executor="hash") as cluster:
        worker = cluster.worker("any", 0)
        app = Top(Client(cluster.http), 0.2)
        async with app.run_test(size=(160, 20)) as pilot:
            await until(pilot, lambda: column(app, "state") == ["ready"])
            worker.kill()
            await until(pilot, lambda: column(app, "state") == ["lost"])
            assert "1 lost" in line(app)
            cluster.router.terminate()
            await until(pilot, lambda: "nothing listens at" in line(app))
            assert column(app, "state") == ["lost"]  # what was known last stays
