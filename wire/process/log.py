"""Configure logging: JSON lines on stderr, or coloured text on a terminal, without ever blocking.

structlog and the standard library's loggers (uvicorn, huggingface_hub) share one bounded queue,
which a thread writes to stderr.  If the reader of stderr stalls, lines are dropped, and their
number is logged later.  Values bound with `structlog.contextvars` are added to every line, and the
trace id of `bind_trace` to every line about its `request`.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections import OrderedDict
from typing import Any, Final, TextIO

import structlog
from structlog.processors import ExceptionRenderer
from structlog.typing import EventDict, Processor

from wire.process.exceptions import described, printed

MAX_LINES: Final = 10_000
# At exit, the process waits up to this long for its last lines to be written.
FLUSH_S: Final = 1.0
# Trace ids by request id, of the latest requests; more cannot be open, or only their lines lack it.
MAX_TRACES: Final = 4096
_traces: OrderedDict[int, str] = OrderedDict()


class LogWriter:
    """Writes lines to a stream in its own thread; `num_dropped` counts lines that were lost."""

    def __init__(self, stream: TextIO, max_lines: int = MAX_LINES) -> None:
        self.num_dropped = 0
        self._stream = stream
        self._reported = 0
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue a line (without a newline); never block."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Flush queued lines for up to `timeout_s`, and stop the thread."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=timeout_s)
            except queue.Full:
                return
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            # Only after a successful write: otherwise the report would be lost too, and would cause
            # another report, endlessly.
            if self._write(line) and self._lines.empty():
                self._report()
        self._report()
        while not self._lines.empty():
            self._write(self._lines.get() or "")

    def _write(self, line: str) -> bool:
        """Write a line; return False if that fails."""
        try:
            self._stream.write(line + "\n")
            if self._lines.empty():
                self._stream.flush()
        except (OSError, ValueError):  # a broken pipe, or a closed stream
            self.num_dropped += 1
            return False
        return True

    def _report(self) -> None:
        count = self.num_dropped - self._reported
        if count:
            self._reported += count
            structlog.get_logger(__name__).warning("log lines dropped", count=count)


class _Logger:
    """The logger behind structlog: writes rendered lines of all levels."""

    def __init__(self, writer: LogWriter, name: str) -> None:
        self.name = name
        self.msg = writer.put

    def __getattr__(self, level: str) -> Any:
        return self.msg


class _Handler(logging.Handler):
    """Writes the records of the standard library's loggers."""

    def __init__(self, writer: LogWriter, formatter: logging.Formatter) -> None:
        super().__init__()
        self._writer = writer
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.format(record))
        except Exception:  # a record whose arguments do not fit its format string
            self._writer.num_dropped += 1

    def close(self) -> None:
        """Flush queued lines.  Python calls this at exit, by `logging.shutdown`."""
        self._writer.close()
        super().close()


def bind_trace(request_id: int, trace_id: str | None) -> None:
    """Add a trace id, if there is one, to all later lines with `request=request_id`."""
    if trace_id is not None:
        _traces[request_id] = trace_id
        if len(_traces) > MAX_TRACES:
            _traces.popitem(last=False)


def configure(
    level: str = "info",
    stream: TextIO | None = None,
    *,
    is_terminal: bool | None = None,
    worker: str = "",
) -> LogWriter:
    """Configure logging for this process.  A later call replaces the configuration.

    Args:
        level: debug, info, warning or error.
        is_terminal: Whether to write coloured text; by default, if `stream` (stderr) is a terminal.
        worker: The role and rank of this process, added to all lines; "" if it is no worker.
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
        _add_trace_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *([lambda _, __, event: {"worker": worker, **event}] if worker else []),
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


def _add_trace_id(logger: Any, method: str, event: EventDict) -> EventDict:
    request_id = event.get("request")
    trace_id = _traces.get(request_id) if isinstance(request_id, int) else None
    return event if trace_id is None else {**event, "trace_id": trace_id}


def _add_name(logger: Any, method: str, event: EventDict) -> EventDict:
    event["logger"] = logger.name
    return event
