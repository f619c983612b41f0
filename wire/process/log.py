"""Logs: JSON lines on stderr, coloured ones on a terminal; logging never blocks.

structlog and the standard library's loggers (uvicorn, huggingface_hub) share one bounded queue and
a thread that writes it.  When the reader of stderr stalls, lines are dropped, and their number is
logged later.  Values bound with `structlog.contextvars` are on every line.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from typing import Any, Final, TextIO

import structlog
from structlog.processors import ExceptionRenderer
from structlog.typing import EventDict, Processor

from wire.process.exceptions import described, printed

MAX_LINES: Final = 10_000
# A process that exits gives its last lines this long.
FLUSH_S: Final = 1.0


class LogWriter:
    """Writes lines from a thread of its own.  `num_dropped` counts those that found no room."""

    def __init__(self, stream: TextIO, max_lines: int = MAX_LINES) -> None:
        self.num_dropped = 0
        self._stream = stream
        self._reported = 0
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue a line without its end; never wait."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Write what waits, for `timeout_s` at most."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=timeout_s)
            except queue.Full:
                return
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            # Not after a line that is lost: the report would be too, and be reported, for ever.
            if self._write(line) and self._lines.empty():
                self._report()
        self._report()
        while not self._lines.empty():
            self._write(self._lines.get() or "")

    def _write(self, line: str) -> bool:
        """Write a line if anybody reads."""
        try:
            self._stream.write(line + "\n")
            if self._lines.empty():
                self._stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream is closed
            self.num_dropped += 1
            return False
        return True

    def _report(self) -> None:
        count = self.num_dropped - self._reported
        if count:
            self._reported += count
            structlog.get_logger(__name__).warning("log lines dropped", count=count)


class _Logger:
    """The logger that structlog gives rendered lines to, whatever their level."""

    def __init__(self, writer: LogWriter, name: str) -> None:
        self.name = name
        self.msg = writer.put

    def __getattr__(self, level: str) -> Any:
        return self.msg


class _Handler(logging.Handler):
    """Passes records of the standard library's loggers to the writer."""

    def __init__(self, writer: LogWriter, formatter: logging.Formatter) -> None:
        super().__init__()
        self._writer = writer
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.format(record))
        except Exception:  # a record whose arguments do not fit its text
            self._writer.num_dropped += 1

    def close(self) -> None:
        """Write what waits: `logging.shutdown` calls this, and Python calls that at its end."""
        self._writer.close()
        super().close()


def configure(
    level: str = "info", stream: TextIO | None = None, *, is_terminal: bool | None = None
) -> LogWriter:
    """Set up logging for this process; the last call counts.

    Args:
        level: debug, info, warning or error.
        is_terminal: Whether people read it; found out from `stream` (stderr) if not given.
    """
    stream = stream or sys.stderr
    writer = LogWriter(stream)
    number = logging.getLevelNamesMapping()[level.upper()]
    if stream.isatty() if is_terminal is None else is_terminal:
        renderers: list[Processor] = [
            ExceptionRenderer(lambda exc_info: printed(exc_info[1])),
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ]
    else:
        renderers = [
            ExceptionRenderer(lambda exc_info: described(exc_info[1])),
            structlog.processors.JSONRenderer(),
        ]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, _add_name, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda name="": _Logger(writer, name),
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    )
    logging.basicConfig(level=number, handlers=[_Handler(writer, formatter)], force=True)
    return writer


def _add_name(logger: Any, method: str, event: EventDict) -> EventDict:
    event["logger"] = logger.name
    return event
