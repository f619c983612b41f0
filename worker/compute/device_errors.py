"""Recognizes CUDA errors and extracts CUDA's message, without importing torch or CuPy.

CUDA reports an error asynchronously: at any later call from any thread, and then at every call.
So no later result of the device can be trusted, and the process must exit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

# The exit status after a device failure, EX_OSERR: systemd and routers restart the process.
EXIT_DEVICE_FAILED: Final = 71
# torch.AcceleratorError; CuPy's errors from the CUDA runtime and driver; both OutOfMemoryErrors.
_TYPES: Final = {"AcceleratorError", "CUDARuntimeError", "CUDADriverError", "OutOfMemoryError"}
# How messages begin if the type is a plain RuntimeError, as in torch's libraries and older torch.
_BEGINNINGS: Final = ("CUDA error", "CUDA driver error", "CUDA out of memory", "cuDNN error")


def device_error(error: BaseException) -> str | None:
    """Return the first line of CUDA's message; None if this is no CUDA error."""
    sentence = str(error).strip().partition("\n")[0]
    names = {kind.__name__ for kind in type(error).__mro__}
    return sentence if names & _TYPES or sentence.startswith(_BEGINNINGS) else None


def report_copy(error: Exception, post: Callable[[Callable[[Any], object]], None]) -> None:
    """Re-raise an error of a KV copy in the engine's thread if it is a fatal CUDA error.

    Out of memory is not fatal.

    Args:
        post: `EngineThread.post`; the worker exits if a posted call raises.
    """
    sentence = device_error(error)
    if sentence is None or "out of memory" in sentence.lower():
        return

    def fail(_: object) -> None:
        raise error

    error.add_note("in a copy of KV")
    post(fail)
