"""The table that every benchmark prints."""

from __future__ import annotations

from router.command.terminal import say


class Table:
    """Prints headings at creation, then one row per call.

    Each column is a heading and a format for numbers, as in "answer s:>10.2f".  A cell with text
    uses only the width of the format.
    """

    def __init__(self, *columns: str) -> None:
        parts = [column.rpartition(":") for column in columns]
        self._formats = [form for _, _, form in parts]
        self.row(*[heading for heading, _, _ in parts])

    def row(self, *cells: str | float) -> None:
        columns = zip(self._formats, cells, strict=True)
        say(" ".join([_cell(form, cell) for form, cell in columns]).rstrip())


def _cell(form: str, cell: str | float) -> str:
    return format(cell, form.partition(".")[0].rstrip(",%") if isinstance(cell, str) else form)
