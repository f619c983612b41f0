"""Columns line up, and text stands where a number is missing."""

from __future__ import annotations

import pytest

from router.command.bench.table import Table


def test_headings_numbers_and_gaps_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("row:<6", "tokens/s:>9,.0f", "ratio:>6.1%")
    table.row("paced", 12_345.6, 0.5)
    table.row("floor", "-", "")
    assert capsys.readouterr().out.splitlines() == [
        "row     tokens/s  ratio",
        "paced     12,346  50.0%",
        "floor          -",
    ]
