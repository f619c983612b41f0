"""Copies to and from a device that run late: the host has gone on by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

POISON = -(1 << 30)


class LateCopies(TorchFunctionMode):
    """Copies run when `finish` is called, in order; what they write to is poison until then."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0
        self._copies: list[Callable[[], object]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and kwargs.get("non_blocking"):
            target = torch.full_like(args[0], POISON)
            self._ask(torch.Tensor.copy_, target, args[0])
            self.num_copies += 1
            return target
        if func in (torch.Tensor.copy_, torch._foreach_copy_):
            self._ask(func, *args)
            return args[0]
        return func(*args, **kwargs)

    def _ask(self, func: Any, *args: Any) -> None:
        self._copies.append(lambda: func(*args))

    def finish(self) -> None:
        copies, self._copies = self._copies, []
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            for copy in copies:
                copy()
