"""The flags of `baton top`, and where it cannot run."""

from __future__ import annotations

import sys

import pytest

from router.command.main import main


def test_wrong_flags_say_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--interval", "0"])
    assert "--interval is 0: it is from 0.1" in capsys.readouterr().err
    assert main(["top", "--url", "127.0.0.1:8000"]) == 1
    assert "baton top: --url 127.0.0.1:8000 is not http://" in capsys.readouterr().err


def test_without_textual_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("router.command.top.command.find_spec", lambda name: None)
    assert main(["top"]) == 1
    assert "pip install 'baton-serve[top]'" in capsys.readouterr().err


def test_without_a_terminal_it_names_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert main(["top"]) == 1
    assert "GET /v1/cluster" in capsys.readouterr().err
