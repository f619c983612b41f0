"""`baton bench`: its table, its JSON, what it says of wrong responses, and Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.command.bench.command import run
from tests.cluster import Cluster, until
from tests.router.command.bench.openai_server import serving, stream
from tests.router.command.on_terminal import Terminal

QUICK = ("--warmup", "1", "--prompt-tokens", "12", "--shared-prefix-tokens", "4")


def test_a_router_and_a_peer_are_measured_by_turns(
    cluster: Cluster, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    keys = ("--api-key-file", str(key_file), "--peer-api-key-file", str(key_file))
    sizes = ("--output-tokens", "2", "--requests", "3", "--concurrency", "1,3", "--rounds", "2")
    where = ("--url", cluster.http, "--peer", cluster.http, "--json", str(file))
    assert run([*QUICK, *sizes, *where, *keys, "--long-every-s", "0.05"]) == 0
    head, *rows = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert head.split()[:4] == ["server", "clients", "requests", "tokens/s"]
    names = ["router", "peer", "ratio"]
    assert [row.split()[0] for row in rows] == 2 * names
    assert [row.split()[1:3] for row in rows[:2]] == 2 * [["1", "6"]]
    assert [row.split()[1:3] for row in rows[3:5]] == 2 * [["3", "6"]]
    result = json.loads(file.read_text())
    assert result["complete"] and result["settings"]["concurrency"] == [1, 3]
    assert key_file.read_text().strip() not in file.read_text()
    for row, figures in zip(rows[:2], result["results"], strict=False):
        assert [each["num_tokens"] for each in figures["each"]] == [2] * 6
        # A dash is 0: tokens that came together have no time between them.
        shown = [float(cell.replace(",", "").replace("-", "0")) for cell in row.split()[3:]]
        latencies = [figures[name] for name in ("ttft_ms", "itl_ms", "long_ttft_ms")]
        kept = [each[share] for each in latencies for share in ("p50", "p99")]
        assert shown == pytest.approx([figures["output_tokens_per_s"], *kept], abs=0.051)


def test_a_single_lost_token_is_reported_instead_of_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, short = stream(([5], None), ([6], "length")), stream(([5], "length"))
    flags = ("--output-tokens", "2", "--concurrency", "2", "--requests", "9", "--seed", "0")
    with serving(lambda number: short if number == 7 else whole) as url:
        assert run(["--url", url, *QUICK, *flags]) == 1
        out, err = capsys.readouterr()
        assert "1 of 9 requests" in err and "1 of 2 tokens" in err and url in err
        assert out.endswith("p99\n"), "no row"
        assert run(["--url", url, *QUICK, *flags]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("router       2        9 ")


def test_what_is_missing_is_said_in_a_sentence(
    cluster: Cluster, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("--api-key-file", str(key_file))
    for flags, sentence in (
        (("--url", "http://127.0.0.1:1"), "nothing listens at"),
        (("--url", cluster.http), "--api-key-file"),
        (("--url", cluster.http, *key, "--model", "none"), "has no model 'none'"),
        (("--url", cluster.http, *key, "--vocab-size", "999999"), "ids must be below 1326"),
        (("--url", cluster.http, *key, "--peer", cluster.http), "--api-key-file"),
        (("--url", cluster.http, *key, "--json", str(tmp_path / "no" / "file")), "no/file"),
    ):
        assert run(flags) == 1
        error = capsys.readouterr().err
        assert error.startswith("baton bench: ") and error.count("\n") == 1 and sentence in error


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--concurrency", "1,0"), "'0' is not a whole number from 1"),
        (("--rounds", "x"), "'x' is not a whole number from 1"),
        (("--prompt-tokens", "4", "--shared-prefix-tokens", "4"), "below --prompt-tokens"),
        (("--long-every-s", "-1"), "--long-every-s must be at least 0"),
    ],
)
def test_wrong_flags_are_refused(
    flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(flags)
    assert sentence in capsys.readouterr().err


def test_ctrl_c_prints_what_was_measured_and_cancels_the_rest(
    cluster: Cluster, key_file: Path, tmp_path: Path
) -> None:
    file, tokens = tmp_path / "result.json", 1500
    whole = stream(([5] * (tokens - 1), None), ([6], "length"))
    with serving(lambda number: whole) as url:
        flags = ("--url", url, "--peer", cluster.http, "--peer-api-key-file", str(key_file))
        sizes = ("--warmup", "0", "--output-tokens", str(tokens), "--concurrency", "2")
        terminal = Terminal("bench", *flags, *sizes, "--requests", "4", "--json", str(file))
        try:
            until(lambda: cluster.status()["router"]["running"] == 2, "both clients ask the peer")
            terminal.until("0 of 4 responses")
            terminal.type("\x03")
            rows = terminal.until("baton bench: interrupted")
            assert terminal.process.wait(60) == 130
        finally:
            terminal.close()
    assert "router       2        4" in rows and "peer  " not in rows and "ratio" not in rows
    cluster.until_idle()
    result = json.loads(file.read_text())
    assert not result["complete"]
    assert [(it["url"], it["requests"]) for it in result["results"]] == [(url, 4)]
