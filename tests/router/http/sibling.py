"""A second router process beside that of a site, which answers as the test says."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from router.processes.channel import Answers, Ask, AskAll, Assignment, Channel
from router.processes.siblings import Siblings
from tests.router.site import Site


@asynccontextmanager
async def sibling(site: Site, answer: Callable[[Any], object]) -> AsyncIterator[Channel]:
    """Connect the site to a parent, which gets `answer(question)` from the other process.

    An answer that is an `Answers` is what the parent returns.
    Yields the parent's end of the channel.
    """

    async def parent(question: Any) -> Any:
        if question is Ask.ASSIGNMENT:
            return Assignment(0, 2, "", "", "", is_again=False)
        assert isinstance(question, AskAll)
        found = answer(question.question)
        if isinstance(found, Answers):  # of all processes
            return found
        mine = False if isinstance(found, bool) else None  # this process has nothing
        return Answers([mine, found], is_complete=True)

    ours, theirs = socket.socketpair()
    channel = Channel(ours, parent)
    await channel.open()
    siblings = Siblings(theirs, socket.socket())
    await siblings.begin()
    site.configure(siblings=siblings)
    try:
        yield channel
    finally:
        await siblings.close()
        await channel.close()
