"""`baton config` shows each setting, its value and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.command.config import run, settings_of


def test_each_setting_has_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "baton.toml").write_text("[worker]\nrank = 3\n[router]\nhttp='[::1]:0'\n")
    monkeypatch.setenv("BATON_CONFIG", str(path))
    monkeypatch.setenv("BATON_MODEL", "m")
    assert run(["worker", "--role", "prefill"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:2] == "  "]
    found = {name: (value, " ".join(origin)) for name, value, *origin in rows}
    assert sorted(found) == sorted(settings_of("worker").model_fields)
    assert found["role"] == ("prefill", "--role")
    assert found["rank"] == ("3", f"{path}:2")
    assert found["model"] == ("m", "BATON_MODEL")
    assert found["keys"] == ("none", "default")
    assert run(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["http"] == {"value": "[::1]:0", "origin": f"{path}:4"}
    assert rows["local"] == {"value": [0, 0], "origin": "default"}


def test_a_wrong_setting_is_what_the_program_says(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["router", "--max-waiting=-1"])
    assert "python -m router: --max-waiting (BATON_MAX_WAITING)" in capsys.readouterr().err


def test_help_is_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == run(["worker", "-h"]) == 0
    assert capsys.readouterr().out.count("usage: baton config") == 2
