"""The screen of `baton top`."""

from __future__ import annotations

import threading
from typing import Final

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import get_current_worker

from router.command.client import Client, RequestError
from router.command.terminal import printable
from router.command.top.table import COLUMNS, Row, Sample, rows_of, sample, shown, summary

COLOURS: Final = {
    "ready": "green",
    "joining": "cyan",
    "draining": "yellow",
    "suspect": "dark_orange",
    "lost": "red",
}


class Top(App[None]):
    """The workers of a cluster as a table, and a line about its router above."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: 1; padding: 0 1; text-style: bold; }
    #filter { display: none; dock: bottom; }
    #filter.is-open { display: block; }
    """
    BINDINGS = [  # noqa: RUF012 - Textual declares it so
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort by next column"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "all", "Show all"),
    ]

    def __init__(self, router: Client, interval_s: float = 1.0) -> None:
        super().__init__()
        self._router = router
        self._interval_s = interval_s
        self._is_closed = threading.Event()
        self._before: Sample | None = None
        self._now: Sample | None = None
        self._by = COLUMNS[0]
        self._is_reversed = False
        self.line = Static("connecting", id="summary")
        self.table: DataTable[Text] = DataTable(cursor_type="none", zebra_stripes=True)
        self._text = Input(placeholder="show only rows with this text", id="filter")

    def compose(self) -> ComposeResult:
        yield self.line
        yield self.table
        yield self._text
        yield Footer()

    def on_mount(self) -> None:
        self._label()
        self.table.focus()
        self.watch_cluster()

    def on_unmount(self) -> None:
        self._is_closed.set()

    @work(thread=True)
    def watch_cluster(self) -> None:
        """Take samples in a thread until the screen is closed."""
        worker = get_current_worker()
        while not worker.is_cancelled:
            try:
                found: Sample | RequestError = sample(self._router)
            except RequestError as error:
                found = error
            if not self._is_closed.is_set():
                self.call_from_thread(self.show_sample, found)
            if self._is_closed.wait(self._interval_s):
                return

    def show_sample(self, found: Sample | RequestError) -> None:
        if not self.line.is_attached:  # the screen is being closed
            return
        if isinstance(found, RequestError):
            self.line.update(Text(printable(str(found)), style="red"))
            return
        self._before, self._now = self._now, found
        self.line.update(Text(summary(found, self._before)))
        self._fill()

    def on_input_changed(self) -> None:
        self._fill()

    def on_input_submitted(self) -> None:
        self.table.focus()

    def action_sort(self) -> None:
        self._by = COLUMNS[(COLUMNS.index(self._by) + 1) % len(COLUMNS)]
        self._label()

    def action_reverse(self) -> None:
        self._is_reversed = not self._is_reversed
        self._label()

    def action_filter(self) -> None:
        self._text.add_class("is-open")
        self._text.focus()

    def action_all(self) -> None:
        self._text.value = ""
        self._text.remove_class("is-open")
        self.table.focus()

    def _label(self) -> None:
        """Write the columns, with a mark at the one that rows are sorted by."""
        self.table.clear(columns=True)
        mark = "▼" if self._is_reversed else "▲"
        for name in COLUMNS:
            self.table.add_column(f"{name} {mark}" if name == self._by else name, key=name)
        self._fill()

    def _fill(self) -> None:
        if self._now is None:
            return
        table, text = self.table, self._text.value
        rows = rows_of(self._now, self._before)
        position = table.scroll_offset
        table.clear()
        for row in shown(rows, by=self._by, is_reversed=self._is_reversed, text=text):
            table.add_row(*_styled(row), key=row["worker"].text)
        table.scroll_to(*position, animate=False)


def _styled(row: Row) -> list[Text]:
    """Return the cells as text, never as markup: workers wrote parts of it."""
    styles = {"worker": "bold", "state": COLOURS.get(row["state"].text, "")}
    return [Text(cell.text, style=styles.get(name, "")) for name, cell in row.items()]
