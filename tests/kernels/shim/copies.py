"""Copies to and from a device that run late: the host has gone on by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

POISON = -(1 << 30)


class LateCopies(TorchFunctionMode):
    """Copies run when `finish` is called, in order; what they write to is poison until then.

    Attributes:
        num_copies: Those between host and device for which the host does not wait.
        num_pinned: Pieces of pinned memory that were asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = self.num_pinned = 0
        self._copies: list[Callable[[], object]] = []
        self._num_finished = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            self.num_pinned += kwargs.pop("pin_memory", False)
            return torch.full(args, POISON, **kwargs)
        self.num_copies += kwargs.get("non_blocking", False)
        if func is torch.Tensor.to and kwargs.get("non_blocking"):
            target = torch.full_like(args[0], POISON)
            self._ask(torch.Tensor.copy_, target, args[0])
            return target
        if func in (torch.Tensor.copy_, torch._foreach_copy_):
            self._ask(func, *args)
            return args[0]
        return func(*args, **kwargs)

    def _ask(self, func: Any, *args: Any) -> None:
        self._copies.append(lambda: func(*args))

    def event(self) -> LateEvent:
        """Return a stand-in for `torch.cuda.Event` that waits for copies."""
        return LateEvent(self)

    @property
    def num_asked(self) -> int:
        return self._num_finished + len(self._copies)

    def finish(self, number: int | None = None) -> None:
        """Run all copies, or the first ones that were asked for."""
        count = self.num_asked if number is None else number
        copies = self._copies[: max(0, count - self._num_finished)]
        del self._copies[: len(copies)]
        self._num_finished += len(copies)
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            for copy in copies:
                copy()


class LateEvent:
    """Stands in the order of the copies where it is recorded."""

    def __init__(self, copies: LateCopies) -> None:
        self._copies, self._number = copies, 0

    def record(self, stream: object) -> None:
        self._number = self._copies.num_asked

    def synchronize(self) -> None:
        self._copies.finish(self._number)
