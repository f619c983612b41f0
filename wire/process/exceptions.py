"""Exceptions in the log: types and frames, without locals and without text from requests.

Locals, and the text of many exceptions (``invalid literal for int(): 'what was in the prompt'``),
would bring prompts, token ids and keys into the log.  So only the texts of our own errors, of the
operating system's and of GPU libraries' are kept.  `catch_all` logs uncaught exceptions the same
way.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, Final

import structlog

from wire.errors import WireError

# The innermost frames tell most, and endless recursion has a thousand.
MAX_FRAMES: Final = 50
WITHHELD: Final = "(text not logged: it may repeat a request)"

_PLAIN: Final = (WireError, OSError, MemoryError, ImportError, AttributeError, NameError)
_PLAIN_MODULES: Final = frozenset({"torch", "cupy", "cupy_backends"})
_LOG = structlog.get_logger(__name__)


def text(error: BaseException) -> str:
    """Return the message of `error` if it cannot contain text of a request."""
    module = type(error).__module__.partition(".")[0]
    return str(error) if isinstance(error, _PLAIN) or module in _PLAIN_MODULES else WITHHELD


def described(error: BaseException) -> list[dict[str, Any]]:
    """Return an exception and its causes, for JSON."""
    return [_entry(each) for each in _chain(error)]


def printed(error: BaseException) -> str:
    """Return an exception and its causes as text, the first cause first."""
    return "\n\nthen:\n\n".join(reversed([_paragraph(each) for each in _chain(error)]))


def catch_all(loop: asyncio.AbstractEventLoop) -> None:
    """Log uncaught exceptions: of this loop, of any thread, of destructors."""
    loop.set_exception_handler(_on_loop)
    sys.excepthook = lambda kind, error, frames: _LOG.error("not caught", exc_info=error)
    sys.unraisablehook = _on_unraisable
    threading.excepthook = _on_thread


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__, -MAX_FRAMES)


def _entry(error: BaseException) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "exc_type": type(error).__name__,
        "exc_value": text(error),
        "frames": [
            {"filename": frame.filename, "lineno": frame.lineno, "name": frame.name}
            for frame in _frames(error)
        ],
    }
    if isinstance(error, BaseExceptionGroup):
        entry["exceptions"] = [described(each) for each in error.exceptions]
    return entry


def _paragraph(error: BaseException) -> str:
    lines = "".join(traceback.format_list(_frames(error)))
    paragraph = f"Traceback, innermost last:\n{lines}{type(error).__name__}: {text(error)}"
    if isinstance(error, BaseExceptionGroup):
        paragraph += "".join(f"\n\nin it:\n\n{printed(each)}" for each in error.exceptions)
    return paragraph


def _on_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # "Exception in callback f(arguments)": what comes after a bracket shows values.
    what = re.split("[<({]", context["message"])[0].strip()
    task = context.get("task") or context.get("future")
    name = task.get_name() if isinstance(task, asyncio.Task) else None
    _LOG.error("not caught", what=what, task=name, exc_info=context.get("exception"))


def _on_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else None
    _LOG.error("not caught", thread=name, exc_info=args.exc_value)


def _on_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    where = getattr(unraisable.object, "__qualname__", type(unraisable.object).__name__)
    _LOG.error("not caught", where=where, exc_info=unraisable.exc_value)
