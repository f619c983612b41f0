"""One declaration is flags, environment, validation and help."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from pydantic import Field, model_validator

from wire.process.settings import EX_CONFIG, Settings, check_endpoint, parse, port_of, setting


class Config(Settings):
    """Serve tests."""

    max_kv_bytes: int = Field(
        default=1 << 10, ge=1, le=1 << 20, description="Refuse a larger KV cache, 100% of them."
    )
    rank: Annotated[int, Field(ge=0)] | None = None
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where to compute.")
    shard: int = Field(default=0, ge=0, lt=64)
    temperature: float = Field(default=1.0, gt=0, le=2)
    prefix_cache: bool = Field(default=True, description="Keep blocks of earlier prompts.")
    local: tuple[int, int] = setting((0, 0), "", title="P,D")
    stop: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank == 7 and self.device == "cpu":
            raise ValueError("--rank 7 needs --device cuda")
        return self


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)


def line_of(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The one line a bad setting is answered with."""
    with pytest.raises(SystemExit) as caught:
        parse(Config, argv)
    assert caught.value.code == EX_CONFIG == 78
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_defaults_are_the_declaration(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(Config, [])
    assert config == Config()
    assert (config.max_kv_bytes, config.local) == (1 << 10, (0, 0))
    assert capsys.readouterr() == ("", "")


def test_every_kind_of_flag() -> None:
    config = parse(
        Config,
        "--max-kv-bytes 5 --rank=3 --device cpu --temperature 0.5 "
        "--no-prefix-cache --local 2,3 --stop a,b".split(),
    )
    assert config == Config(
        max_kv_bytes=5,
        rank=3,
        device="cpu",
        temperature=0.5,
        prefix_cache=False,
        local=(2, 3),
        stop=("a", "b"),
    )
    assert parse(Config, ["--prefix-cache"]).prefix_cache is True
    assert parse(Config, ["--prefix-cache", "false"]).prefix_cache is False


def test_a_flag_beats_the_environment_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_RANK", "1")
    monkeypatch.setenv("BATON_LOCAL", "4,5")
    monkeypatch.setenv("BATON_DEVICE", "")
    config = parse(Config, ["--rank", "2"])
    assert (config.rank, config.local, config.device) == (2, (4, 5), "auto")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--max-kv-bytes", "0"],
            "--max-kv-bytes (BATON_MAX_KV_BYTES) = '0': must be an integer from 1 up to 1048576",
        ),
        (["--rank", "-1"], "--rank (BATON_RANK) = '-1': must be an integer from 0"),
        (["--rank", "three"], "--rank (BATON_RANK) = 'three': must be an integer from 0"),
        (["--shard", "64"], "--shard (BATON_SHARD) = '64': must be an integer from 0 below 64"),
        (["--device", "gpu"], "--device (BATON_DEVICE) = 'gpu': must be one of auto, cpu, cuda"),
        (
            ["--temperature", "0"],
            "--temperature (BATON_TEMPERATURE) = '0': must be a number above 0 up to 2",
        ),
        (
            ["--prefix-cache", "maybe"],
            "--prefix-cache (BATON_PREFIX_CACHE) = 'maybe': must be true or false",
        ),
        (["--local", "1"], "--local (BATON_LOCAL) = '1': Field required"),
        (["--rank", "7", "--device", "cpu"], "--rank 7 needs --device cuda"),
        (
            ["--rank"],
            "--rank: expected one argument; one that begins with a dash is written --rank=...",
        ),
        (["--rnak", "1"], "--rnak is not a flag; did you mean --rank?"),
        (["--max-kv", "1"], "--max-kv is not a flag"),
        (["decode"], "'decode' has no flag before it, as in --model decode"),
    ],
)
def test_a_bad_flag_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], line: str
) -> None:
    assert line_of(capsys, argv).partition(": ")[2] == line + "\n"


def test_both_ends_of_a_range_are_in_it() -> None:
    for argv in ("--max-kv-bytes=1 --shard=0", f"--max-kv-bytes={1 << 20} --shard=63"):
        config = parse(Config, argv.split())
        assert argv == f"--max-kv-bytes={config.max_kv_bytes} --shard={config.shard}"
    assert parse(Config, ["--temperature=2"]).temperature == 2


def test_help_tells_flags_variables_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Config, ["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Serve tests." in text
    assert "Refuse a larger KV cache, 100% of them. [default 1024; " in text
    assert "BATON_MAX_KV_BYTES]" in text
    assert "--device {auto,cpu,cuda} Where to compute. [default auto; BATON_DEVICE]" in text
    assert "--rank N [default none; BATON_RANK]" in text
    assert "--local P,D [default 0,0; BATON_LOCAL] --stop TEXT [default none; BATON_STOP]" in text


def test_unknown_variables_are_warned_of_and_those_of_other_roles_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    environ = {"BATON_RNAK": "1", "BATON_HTTP": "x", "BATON_RANK": "1", "OTHER": "1"}
    parse(Config, [], beside="router.config", environ=environ)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "warning: BATON_RNAK is not a setting; did you mean BATON_RANK?" in err


def test_a_credential_beats_the_default_and_the_environment_beats_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "baton_rank").write_text("5\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert parse(Config, []).rank == 5
    monkeypatch.setenv("BATON_RANK", "6")
    assert parse(Config, []).rank == 6


def test_a_value_that_looks_like_a_flag_gets_a_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--stop=..." in line_of(capsys, ["--stop", "--no-prefix-cache"])
    assert parse(Config, ["--stop=--no-prefix-cache"]).stop == ("--no-prefix-cache",)


@pytest.mark.parametrize("digits", ["\u0663", "\uff13", "\u00b3", "\u2462", "1\u0663"])
@pytest.mark.parametrize("flag", ["--max-kv-bytes", "--rank", "--temperature", "--local"])
def test_digits_that_are_not_ascii_are_no_number(
    capsys: pytest.CaptureFixture[str], flag: str, digits: str
) -> None:
    """Arabic-Indic, full-width, superscript and circled ones: Python takes some of them."""
    given = f"{digits},{digits}" if flag == "--local" else digits
    assert f": {flag} (BATON_" in (line := line_of(capsys, [f"{flag}={given}"])) and given in line


@pytest.mark.parametrize("port", ["0", "1", "65535"])
def test_a_port_is_written_in_ascii_digits(port: str) -> None:
    assert port_of(port) == int(port)
    for host in ("127.0.0.1", "[::1]", "*", "gpu-box"):
        assert check_endpoint(f"tcp://{host}:{port}") == f"tcp://{host}:{port}"


@pytest.mark.parametrize(
    "port", ["", "65536", "655350", "-1", "+1", " 1", "1 ", "1_0", "\u0663", "\u00b3", "9" * 5000]
)
def test_anything_else_is_no_port(port: str) -> None:
    assert port_of(port) is None
    with pytest.raises(ValueError, match=r"is neither tcp://HOST:PORT.* nor ipc://PATH"):
        check_endpoint(f"tcp://127.0.0.1:{port}")
