"""A worker's settings: what they refuse, and what else may stand in the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from router.config import Config as RouterConfig
from wire.process.settings import parse
from worker.config import Config


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kv_bind": "tcp://10.0.0.5:5600"}, "--insecure"),
        ({"kv_bind": "tcp://*:0", "insecure": True}, "--kv-advertise is missing"),
        ({"kv_bind": "nowhere"}, "tcp://HOST:PORT"),
        ({"kv_advertise": "10.0.0.5:5600"}, "tcp://HOST:PORT"),
        ({"router": ("127.0.0.1:5570",)}, "tcp://HOST:PORT"),
        ({"router": ("tcp://127.0.0.1:0",)}, "a port from 1 to 65535"),
        ({"router": ("ipc:///a", "tcp://b:1", "ipc:///a")}, "names a router twice"),
        ({"router": ()}, "names no router: say where one has its --bus, tcp://HOST:PORT"),
        ({"credit_bytes": 8 << 20, "max_kv_inflight_bytes": 4 << 20}, "--max-kv-inflight-bytes"),
        ({"kv_unasked_bytes": 8 << 20, "credit_bytes": 4 << 20}, "--credit-bytes"),
        ({"kv_cache_bytes": 2**63}, "kv_cache_bytes"),
        ({"disk_kv": Path("kv")}, "--disk-kv is kv and --disk-kv-bytes 0: give both"),
        ({"disk_kv_bytes": 5}, "--disk-kv is empty and --disk-kv-bytes 5: give both"),
        ({"host_kv_bytes": 5, "prefix_cache": False}, "leave out --no-prefix-cache"),
        ({"max_model_len": 2**31}, "max_model_len"),
        ({"num_blocks": 2**31}, "num_blocks"),
        ({"kv_segment_port": "0"}, "neither auto, off nor a port from 1 to 65535"),
        ({"kv_segment_port": "65536"}, "'65536' is neither auto, off nor a port"),
        ({"rank": 0xFFFFFFFE}, "rank"),
        ({"ageing_s": 0}, "ageing_s"),
        ({"speculate": "draft:demo"}, "speculate"),
        ({"cores": "0..3"}, "neither a core nor a run of them"),
        ({"speculate": "ngram"}, "neither ngram:K nor draft:K:MODEL"),
        ({"speculate": "draft:3:"}, "neither ngram:K nor draft:K:MODEL"),
        ({"speculate": "ngram:0"}, "num_drafts is 0, not between 1 and 64"),
        ({"speculate": "draft:99:demo"}, "num_drafts is 99, not between 1 and 64"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Config(**settings)


TWO: dict[str, Any] = {"tensor_parallel": 2}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"executor": "hash", **TWO}, "a model of --executor torch, not of 'hash'; leave them out"),
        ({"rendezvous": "file:///tmp/meet"}, "is for several processes: .* --tensor-parallel"),
        ({"process": 1}, r"--process is 1, of 1 processes .*; the last is 0"),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 3, "process": 6},
            r"--process is 6, of 6 processes \(--tensor-parallel 2 x --pipeline-parallel 3\); .* 5",
        ),
        ({**TWO, "process": 1}, "--process is for --rendezvous: say where the processes meet"),
        (
            {**TWO, "rendezvous": "env://"},
            "'env://' is neither tcp://HOST:PORT, .*nor file:///PATH",
        ),
        ({**TWO, "rendezvous": "tcp://127.0.0.1"}, "'tcp://127.0.0.1' is neither"),
        ({**TWO, "rendezvous": "tcp://127.0.0.1:0"}, "a port from 1 to 65535"),
        (
            {**TWO, "rendezvous": "tcp://10.0.0.5:29500"},
            "no key to tell who may .*--insecure",
        ),
        ({**TWO, "rendezvous": "tcp://0.0.0.0:29500"}, "can be reached from other machines"),
    ],
)
def test_impossible_processes_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Config(**settings)


def test_an_open_rendezvous_needs_keys_or_insecure() -> None:
    assert Config().num_processes == 1
    assert Config(tensor_parallel=2, pipeline_parallel=3).num_processes == 6
    here = ("127.0.0.1:29500", "localhost:1", "[::1]:1", "::1:65535")
    for rendezvous in ("file:///tmp/meet", *(f"tcp://{it}" for it in here)):
        assert Config(**TWO, rendezvous=rendezvous, process=1).process == 1
    for settings in ({"insecure": True}, {"keys": Path("/k")}):
        assert Config(**TWO, rendezvous="tcp://10.0.0.5:29500", **settings).rendezvous


@pytest.mark.parametrize("digits", ["\u0663", "\u00b3"])  # Arabic-Indic, superscript
@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--cores", "{}"),
        ("--speculate", "ngram:{}"),
        ("--rendezvous", "tcp://127.0.0.1:{}"),
        ("--metrics", "127.0.0.1:{}"),
        ("--kv-segment-port", "{}"),
    ],
)
def test_digits_that_are_not_ascii_are_refused_by_name(
    flag: str, setting: str, digits: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="78"):
        parse(Config, ["--tensor-parallel=2", flag, setting.format(digits)])
    (line,) = capsys.readouterr().err.splitlines()
    assert f": {flag} " in line and digits in line


def test_a_prefill_worker_has_longer_steps() -> None:
    assert (Config(role="prefill").step_tokens, Config(role="decode").step_tokens) == (1024, 512)
    assert Config(role="prefill", max_ubatch_tokens=7).step_tokens == 7


def test_an_open_kv_port_needs_insecure() -> None:
    advertised = "tcp://10.0.0.5:5600"
    config = Config(kv_bind="tcp://0.0.0.0:5600", kv_advertise=advertised, insecure=True)
    assert config.kv_advertise == advertised
    assert Config(kv_bind="ipc:///tmp/kv", router=("ipc:///tmp/bus:0", "tcp://a:1")).router[1]


def test_keys_open_the_kv_port_and_so_do_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Config(kv_bind="tcp://10.0.0.5:5600", keys=tmp_path, rank=3).party == "decode-3"
    (tmp_path / "decode-3.key").touch()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    Config(kv_bind="tcp://10.0.0.5:5600", rank=3)
    with pytest.raises(ValidationError, match="baton keys"):
        Config(kv_bind="tcp://10.0.0.5:5600", rank=4)


def test_open_metrics_need_api_keys_or_insecure(tmp_path: Path) -> None:
    assert Config(metrics="127.0.0.1:0").metrics and Config(metrics="[::1]:9100").metrics
    with pytest.raises(ValidationError, match="baton keys --api-key"):
        Config(metrics="0.0.0.0:9100")
    assert Config(metrics="0.0.0.0:9100", insecure=True).metrics
    assert Config(metrics="0.0.0.0:9100", api_keys=tmp_path / "keys").metrics
    for wrong in ("9100", ":9100", "127.0.0.1:x", "127.0.0.1:65536"):
        with pytest.raises(ValidationError, match=f"--metrics '{wrong}' is not HOST:PORT"):
            Config(metrics=wrong)


def test_only_a_decode_worker_has_a_draft_model() -> None:
    config = Config(speculate="draft:3:/models/a:b")
    assert (config.draft_model, config.num_drafts) == ("/models/a:b", 3)
    assert Config(role="prefill", speculate="draft:3:demo").draft_model is None
    ngram = Config(speculate="ngram:12")
    assert (ngram.draft_model, ngram.num_drafts) == (None, 12)
    assert (Config().draft_model, Config().num_drafts) == (None, 0)


def test_the_settings_of_a_router_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {f"BATON_{name.upper()}": "" for name in RouterConfig.model_fields}
    parse(Config, [], beside="router.config", environ=environ)
    assert capsys.readouterr().err == ""


def test_one_file_of_variables_serves_both(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"BATON_HTTP": "127.0.0.1:1", "BATON_RANK": "1", "BATON_RNAK": "2"}
    parse(Config, [], beside="router.config", environ=environ)
    assert capsys.readouterr().err.count("is not a setting") == 1


def test_every_field_has_a_description() -> None:
    assert all(field.description for field in Config.model_fields.values())
