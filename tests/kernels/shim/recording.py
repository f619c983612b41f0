"""A stand-in for CUDA graphs on the CPU: it repeats a step's operations on the addresses of then.

As CUDA does, it forgets the step once it is recorded.  What the step allocates belongs to the
recording; all else that the step reads or writes belongs to somebody else.  Where such memory has
been freed, a graph replays on whatever lies there now; the stand-in raises `FreedMemory`.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from kernels.cuda.launch import Launch
from tests.kernels.shim.backend import Shim
from worker.compute.graphs import DecodeStep


class FreedMemory(AssertionError):
    """A replay reads or writes memory that was freed after the recording."""


class Address(NamedTuple):
    """Where a tensor lay: its memory, which this does not keep alive, and its layout there."""

    memory: int  # torch's weak reference to a storage, which is also its identity
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Address:
        memory: Any = tensor.untyped_storage()._weak_ref()  # noqa: SLF001
        offset = int(tensor.storage_offset())
        return cls(memory, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def tensor(self, reader: str) -> torch.Tensor:
        """Return the tensor that lies there.

        Raises:
            FreedMemory: Nobody has kept it; names who was to read it.
        """
        memory: Any = torch.UntypedStorage
        if (kept := memory._new_with_weak_ptr(self.memory)) is None:  # noqa: SLF001
            raise FreedMemory(f"{reader} is given {list(self.shape)} {self.dtype}, freed by now")
        there = torch.empty(0, dtype=self.dtype)
        return there.set_(kept, self.offset, self.shape, self.stride)


class CopiedUploads(TorchFunctionMode):
    """Makes uploads copies, as on a device, though both sides are memory of the host here."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            kwargs["copy"] = True
        return func(*args, **kwargs)


class Recorder:
    """Stands in for `worker.compute.graphs.record_graph` where kernels run through the shim.

    Attributes:
        launched: The kernels that a replay of the last recording would start on a GPU, in order.
    """

    def __init__(self, shim: Shim) -> None:
        self.num_recorded = 0
        self.launched: list[str] = []
        self.shim = shim

    def __call__(self, step: DecodeStep) -> Callable[[], None]:
        self.num_recorded += 1
        step()  # what only the first run makes is not of the recording
        recording = _Recording()
        run = recording.watch_kernels(self.shim)
        with patch.object(self.shim, "run", run), recording:
            step()
        self.launched = recording.launched
        recording.forget_results()
        step.logits.fill_(torch.nan)
        return recording.replay


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of torch and the kernels of a step, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: list[str] = []
        self._calls: list[Callable[[], object]] = []
        self._allocated: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self:  # in inference mode torch gives `linear` or `to` as they were called
            if (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return result
        given, form = tree_flatten((args, kwargs or {}))
        addresses = [Address.of(it) if isinstance(it, torch.Tensor) else it for it in given]
        result = func(*args, **(kwargs or {}))
        made = _allocated(given, result)
        self._allocated += made
        # An allocation starts no kernel; neither does a view, which changes and allocates nothing.
        if func._schema.is_mutable or (made and "empty" not in str(func)):  # noqa: SLF001
            self.launched.append(str(func))
        self._calls.append(partial(_repeat, func, addresses, form, made))
        return result

    def watch_kernels(self, shim: Shim) -> Callable[[list[Launch]], None]:
        """Return `Shim.run` that also records what it starts."""
        run = shim.run

        def watched(launches: list[Launch]) -> None:
            run(launches)
            for it in launches:
                self.launched.append(it.kernel)
                pointers = {
                    getattr(it.arguments, name)
                    for name, kind, *_ in it.arguments._fields_
                    if kind is c_void_p
                }
                kept = {tensor.data_ptr(): Address.of(tensor) for tensor in it.keep}
                addresses = [kept[at] for at in pointers if at]
                self._calls.append(partial(_start, run, it._replace(keep=()), addresses))

        return watched

    def forget_results(self) -> None:
        """Leave nothing of this run in what it allocated: a graph computes when it is replayed."""
        for it in self._allocated:
            memory: Any = it.untyped_storage()
            memory.fill_(0xFF)  # a NaN in every dtype

    def replay(self) -> None:
        with torch.inference_mode():
            for call in self._calls:
                call()


def _allocated(given: list[Any], result: Any) -> list[torch.Tensor]:
    """Return the results that are neither a view of what an operation was given, nor that."""
    before = {Address.of(it).memory for it in given if isinstance(it, torch.Tensor)}
    found = [it for it in tree_flatten(result)[0] if isinstance(it, torch.Tensor)]
    return [it for it in found if Address.of(it).memory not in before]


def _repeat(func: Any, addresses: list[Any], form: Any, results: list[torch.Tensor]) -> None:
    name = str(func)
    given = [it.tensor(name) if isinstance(it, Address) else it for it in addresses]
    args, kwargs = tree_unflatten(given, form)
    for result, again in zip(results, _allocated(given, func(*args, **kwargs)), strict=True):
        result.copy_(again)


def _start(run: Callable[[list[Launch]], None], it: Launch, addresses: list[Address]) -> None:
    for address in addresses:
        address.tensor(it.kernel)
    run([it])
