"""Processes for tests of what several compute together: each runs a function as one rank."""

from __future__ import annotations

import itertools
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch

from worker.compute.ranks import Ranks
from worker.model.shard import Shard

CPU = torch.device("cpu")
# What tasks need, beside torch: once, not in each process.
IMPORTED = ("pytest", "worker.executor.torch")
# Long enough for a loaded machine; nothing that works waits so long.
TIMEOUT_S = 55


class Processes:
    """So many processes, forked from one that has imported torch, for any number of tasks."""

    def __init__(self, count: int, directory: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *IMPORTED])
        self._directory, self._names = directory, itertools.count()
        pipes = [context.Pipe() for _ in range(count)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(TIMEOUT_S)
            process.kill()  # in case it is stuck

    def run(self, size: int, stages: int, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `task(ranks, *args)` in size x stages processes; return what each returns."""
        answers = self.outcomes(size, stages, task, *args)
        problems = [answer for is_done, answer in answers if not is_done]
        assert not problems, "\n".join(problems)
        return [answer for _, answer in answers]

    def outcomes(
        self, size: int, stages: int, task: Callable[..., Any], *args: Any
    ) -> list[tuple[bool, Any]]:
        """Run a task as `run` does; return of each whether it is done, and what it returns.

        Of one that failed the traceback, or that it died or does not answer.
        """
        meeting = f"file://{self._directory}/{next(self._names)}"
        used = self._connections[: size * stages]
        for number, connection in enumerate(used):
            shard = Shard.of_process(number, size, stages)
            connection.send((shard, meeting, task, args))
        answers = []
        for connection in used:
            try:
                is_there = connection.poll(TIMEOUT_S)
                answers.append(connection.recv() if is_there else (False, "no answer"))
            except EOFError:
                answers.append((False, "died"))
        return answers


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            shard, meeting, task, args = connection.recv()
        except EOFError:
            return
        try:
            ranks = Ranks(shard, meeting, CPU, TIMEOUT_S)
            try:
                answer = True, task(ranks, *args)
            finally:
                ranks.leave()  # an executor has left by itself; then nothing happens
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)
