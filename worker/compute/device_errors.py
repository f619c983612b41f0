"""Recognizes errors of a GPU and finds CUDA's sentence in them, without torch or CuPy.

CUDA reports an error late: at any later call, from any thread, and at every call from then on.  So
no later result of the device can be trusted, and the process must end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

# The exit status after a failed device, EX_OSERR: systemd and routers restart the process.
EXIT_DEVICE_FAILED: Final = 71
# torch.AcceleratorError; CuPy's of CUDA's runtime and driver; out of memory of both.
_TYPES: Final = {"AcceleratorError", "CUDARuntimeError", "CUDADriverError", "OutOfMemoryError"}
# A RuntimeError of torch's libraries, and all of an older torch.
_BEGINNINGS: Final = ("CUDA error", "CUDA driver error", "CUDA out of memory", "cuDNN error")


def device_error(error: BaseException) -> str | None:
    """Return CUDA's sentence, without the advice after it; None if the error is another one."""
    sentence = str(error).strip().partition("\n")[0]
    names = {kind.__name__ for kind in type(error).__mro__}
    return sentence if names & _TYPES or sentence.startswith(_BEGINNINGS) else None


def report_copy(error: Exception, post: Callable[[Callable[[Any], object]], None]) -> None:
    """Raise the error of a copy of KV in the engine's thread, if it has broken the device.

    A device that is only out of memory continues.

    Args:
        post: `EngineThread.post`: an error in a posted call ends the worker.
    """
    sentence = device_error(error)
    if sentence is None or "out of memory" in sentence.lower():
        return

    def fail(_: object) -> None:
        raise error

    error.add_note("in a copy of KV")
    post(fail)
