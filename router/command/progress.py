"""The text that a terminal shows while a cluster starts, from the log lines of its processes.

Pure: `Progress` is given lines, and returns the text to print and the status to show.
"""

from __future__ import annotations

import json
from typing import Any, Final

_READY: Final = "ready; try "
# Log events of a worker, and what the worker then does.  Its own lines have its name as `worker`.
_PHASES: Final = {
    "local worker started": "starting",
    "loading": "loading",
    "loading weights": "loading weights",
    "warming up": "compiling and warming up",
    "recorded decode steps": "recording graphs",
    "warmed up": "joining",
    "child process ended": "ended, is restarted",
}
_MIB: Final = 1 << 20
_SPINNER: Final = "|/-\\"
# Fields of all log lines, which a person does not need.
_COMMON: Final = {"event", "level", "timestamp", "logger"}


class Progress:
    """Follows the log of a router that starts at `now` (s), and that of its local workers."""

    def __init__(self, now: float) -> None:
        self.is_ready = False
        self.is_stopping = False
        self._started = self._now = now
        self._url = ""
        self._model = ""
        self._download = ""
        self._waiting = ""
        self._workers: dict[str, str] = {}

    def on_line(self, line: str, now: float) -> str:
        """Take a line of the log; return the text to print for it, "" for none."""
        self._now = now
        try:
            event = json.loads(line)
            name, level = event["event"], event["level"]
        except (ValueError, TypeError, KeyError):
            return line  # of a library, or a traceback
        if name.startswith(_READY):
            return self._on_ready(name.removeprefix(_READY))
        self._follow(name, event)
        return "" if level in ("debug", "info") else _sentence(event)

    def status(self, now: float) -> str:
        """Return the status line: what each process does; "" if there is nothing to wait for."""
        if self.is_stopping:
            return "Stopping: open requests are finished.  Ctrl-C again ends them."
        if self.is_ready:
            return ""
        doing: dict[str, list[str]] = {}  # the workers of each phase
        for worker, phase in self._workers.items():
            if phase:
                doing.setdefault(phase, []).append(worker)
        phases = [f"{', '.join(workers)} {phase}" for phase, workers in doing.items()]
        text = "; ".join(phases) or self._download or self._waiting or "starting the router"
        seconds = now - self._started
        return f"{_SPINNER[int(4 * seconds) % len(_SPINNER)]} {seconds:.0f} s: {text}"

    def _follow(self, name: str, event: dict[str, Any]) -> None:
        worker = str(event.get("worker", ""))
        match name:
            case "downloading":
                self._download = f"downloading {event['model']}, {_share(event)}"
            case "listening":
                self._url, self._model = event["http"], event["model"]
                self._download = ""
            case "waiting for workers":
                self._waiting = f"waiting for workers: {'; '.join(event['reasons'])}"
            case "worker joined":
                self._workers[worker] = ""
                self._waiting = f"{worker} has joined"
            case _ if name in _PHASES and worker:
                share = f", {_share(event)}" if "of" in event else ""
                self._workers[worker] = _PHASES[name] + share

    def _on_ready(self, curl: str) -> str:
        if self.is_ready:
            return "Ready again."
        self.is_ready = True
        where = "" if self._url == "http://127.0.0.1:8000" else f" --url {self._url}"
        key = " --api-key-file FILE" if "$BATON_API_KEY" in curl else ""
        return "\n".join(
            [
                f"Ready after {self._now - self._started:.0f} s: {self._model} at {self._url}",
                f"  talk:  baton chat{where}{key}",
                f"  watch: {self._url}/",
                f"  call:  {curl}",
            ]
        )


def _share(event: dict[str, Any]) -> str:
    done, of = event["done"], event["of"]
    size = f" of {of / _MIB:,.0f} MiB" if of > _MIB else ""
    return f"{100 * done // of} %{size}"


def _sentence(event: dict[str, Any]) -> str:
    """Return a line for a warning or an error, and the traceback if it has one."""
    trace = str(event.pop("exception", ""))
    details = [f"{name}={value}" for name, value in event.items() if name not in _COMMON]
    text = " ".join([f"{event['level']}: {event['event']}", *details])
    return f"{text}\n{trace}" if trace else text
