from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from router.config import Config, split_endpoint
from router.cores import num_engines
from router.local import command
from tests.cluster import ROOT
from wire.process.settings import (
    EX_CONFIG,
    SharedSettings,
    choices_of_flags,
    groups,
    parse,
    parse_with_origins,
)
from worker.config import Config as WorkerConfig
from worker.processes import command as follower_command


def test_pages_and_names_that_are_let_in() -> None:
    config = Config(
        http="box:1", insecure=True, allowed_origins="https://a.b, null", allowed_hosts="x,y.z"
    )
    assert config.origins == ["https://a.b", "null"]
    assert set(config.hosts) == {"x", "y.z", "box", socket.gethostname()}
    assert Config(http="*:1", insecure=True).hosts == [socket.gethostname()]
    assert Config().origins == []
    with pytest.raises(ValidationError, match=r"--allowed-origins: .* is not an origin"):
        Config(allowed_origins="example.org")


@pytest.mark.parametrize(("field", "kind"), [("http", ""), ("tcp", ""), ("bus", "tcp://")])
@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.1.2.3", "[::]", "gpu-box"])
def test_an_open_port_without_keys_needs_insecure(field: str, kind: str, host: str) -> None:
    endpoint = f"{kind}{host}:1"
    with pytest.raises(ValidationError, match=re.escape(f"--{field} {endpoint}") + ".*--insecure"):
        Config(**{field: endpoint})  # type: ignore[arg-type]
    Config(**{field: endpoint, "insecure": True})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "setting"), [("http", "api_keys"), ("tcp", "api_keys"), ("bus", "keys")]
)
def test_keys_open_a_port_and_only_their_own_kind(field: str, setting: str, tmp_path: Path) -> None:
    endpoint = "tcp://10.1.2.3:1" if field == "bus" else "10.1.2.3:1"
    Config(**{field: endpoint, setting: tmp_path})  # type: ignore[arg-type]
    other = "keys" if setting == "api_keys" else "api_keys"
    with pytest.raises(ValidationError, match="baton keys"):
        Config(**{field: endpoint, other: tmp_path})  # type: ignore[arg-type]


def test_credentials_open_ports_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "router.key").touch()
    (tmp_path / "api_keys").touch()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    Config(http="0.0.0.0:1", tcp="0.0.0.0:1", bus="tcp://0.0.0.0:1")


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="--tls-cert and --tls-key"):
        Config(tls_cert=tmp_path)


def test_a_flag_of_other_servers_names_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="78"):
        parse(Config, ["--port", "8001"])
    assert "--port is not a flag; did you mean --http?" in capsys.readouterr().err


def test_endpoints_are_split() -> None:
    assert split_endpoint("tcp://[::1]:5570") == ("::1", 5570)
    assert split_endpoint("localhost:0") == ("localhost", 0)
    assert split_endpoint("ipc:///run/baton.sock", "--bus") == ("localhost", 0)


def test_local_auto_is_as_many_workers_of_any_role_as_pay_here() -> None:
    config = parse(Config, ["--local=auto"])
    assert config.local_workers == [("any", rank) for rank in range(num_engines())]
    assert config.local_workers


@pytest.mark.parametrize("wrong", [",", "a", "a,b", "-1,2", "1,2,3", "65,0", "0,65"])
def test_anything_else_is_refused_by_name(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Config, [f"--local={wrong}"])
    said = capsys.readouterr().err
    assert caught.value.code == 78 and "--local" in said and "each from 0 to 64" in said


@pytest.mark.parametrize(
    ("flag", "least", "most"),
    [
        ("--processes", 1, 64),
        ("--max-attempts", 1, 16),
        ("--max-kv-transfer-bytes", 1, 2**63 - 1),
        ("--heartbeat-ms", 10, 60_000),
        ("--lease-ms", 100, 3_600_000),
        ("--deadline-ms", 1, 2**31 - 1),
        ("--drain-s", 0, 3600),
    ],
)
def test_the_ends_of_a_range_are_in_it_and_what_is_beyond_is_told_the_range(
    flag: str,
    least: int,
    most: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")  # elsewhere there is one process
    name = flag[2:].replace("-", "_")
    for count in (least, most):
        assert getattr(parse(Config, [f"{flag}={count}"]), name) == count
    noun = "a number" if flag.endswith("-s") else "an integer"
    for count in (least - 1, most + 1):
        with pytest.raises(SystemExit, match="78"):
            parse(Config, [f"{flag}={count}"])
        given = f"{flag} (BATON_{name.upper()}) = '{count}'"
        said = capsys.readouterr().err
        assert said.endswith(f"{given}: must be {noun} from {least} up to {most}\n")


@pytest.mark.parametrize(
    ("flag", "least"),
    [
        ("--max-waiting", 0),
        ("--max-running-per-worker", 1),
        ("--max-connections", 1),
        ("--max-requests-per-connection", 1),
        ("--max-kept-bytes", 0),
    ],
)
def test_the_least_is_allowed_and_less_is_told_what_is_least(
    flag: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert getattr(parse(Config, [f"{flag}={least}"]), flag[2:].replace("-", "_")) == least
    with pytest.raises(SystemExit, match="78"):
        parse(Config, [f"{flag}={least - 1}"])
    said = capsys.readouterr().err
    assert f"{flag} (" in said and said.endswith(f": must be an integer from {least}\n")


@pytest.mark.parametrize(
    "port", ["65536", "9" * 5000, "-1", "\u0661", "\uff11", "\u00b9", "\u2460", "1\u0660"]
)
@pytest.mark.parametrize("flag", ["--http", "--tcp"])
def test_malformed_ports_are_refused(
    flag: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor are digits that are not ASCII: Arabic-Indic, full-width, superscript or circled."""
    with pytest.raises(SystemExit, match="78"):
        parse(Config, [f"{flag}=127.0.0.1:{port}"])
    sentence = f"{flag} '127.0.0.1:{port}' is not HOST:PORT with a port from 0 to 65535\n"
    assert capsys.readouterr().err == f"python -m router: {sentence}"


def test_the_model_name_comes_from_the_model() -> None:
    assert Config(model="org/Tiny-1").model_name == "Tiny-1"
    assert Config(model="/models/tiny/").model_name == "tiny"
    assert Config(model="org/x", served_model_name="y").model_name == "y"


@pytest.mark.parametrize("bad", ["a\nb", "a\x1b[2J", "a\r", "a\x7f", "a\u202eb", "a\u2028b"])
@pytest.mark.parametrize(
    ("kind", "flag", "start"),
    [
        (Config, "--served-model-name", ""),
        (Config, "--model", "/models/"),
        (Config, "--executor", "plug_in:"),
        (WorkerConfig, "--model", "/models/"),
        (WorkerConfig, "--speculate", "draft:4:/models/"),
    ],
)
def test_names_for_logs_and_clients_can_be_printed(
    kind: type[SharedSettings], flag: str, start: str, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="78"):
        parse(kind, [f"{flag}={start}{bad}"])
    said = capsys.readouterr().err
    assert flag in said and "cannot be printed" in said
    assert said.count("\n") == 1 and said.strip().isprintable()
    assert parse(kind, ["--model=/m/Käse 2"]).model == "/m/Käse 2"


def test_router_and_workers_agree_on_their_common_defaults() -> None:
    router, worker = parse(Config, []), parse(WorkerConfig, [])
    assert worker.router == (router.bus,)
    assert worker.model == router.model
    assert worker.max_kv_transfer_bytes == router.max_kv_transfer_bytes


def test_the_settings_of_local_workers_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {f"BATON_{name.upper()}": "" for name in WorkerConfig.model_fields}
    parse(Config, [], beside="worker.config", environ=environ)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("role", ["router", "worker"])
def test_each_process_knows_the_variables_of_the_other(role: str) -> None:
    command = [sys.executable, "-m", role, "--model", "/nowhere"]
    variables = {"BATON_BUS": "tcp://127.0.0.1:0", "BATON_RANK": "1", "BATON_RNAK": "2"}
    ended = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == EX_CONFIG
    [warning] = [line for line in ended.stderr.splitlines() if "is not a setting" in line]
    assert "BATON_RNAK is not a setting; did you mean BATON_RANK?" in warning


def test_every_field_has_a_description() -> None:
    assert all(field.description for field in Config.model_fields.values())


@pytest.mark.parametrize(
    ("bus", "buses"),
    [
        ("tcp://127.0.0.1:7000", ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"]),
        ("tcp://[::1]:7000", ["tcp://[::1]:7000", "tcp://[::1]:7001"]),
        ("tcp://127.0.0.1:0", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:0"]),
        ("ipc:///run/bus", ["ipc:///run/bus", "ipc:///run/bus-1"]),
        ("ipc:///run/a:7", ["ipc:///run/a:7", "ipc:///run/a:7-1"]),
    ],
)
def test_every_process_has_a_bus_of_its_own(bus: str, buses: list[str]) -> None:
    config = Config(bus=bus, processes=2)
    assert [config.bus_of(index) for index in range(2)] == buses


def test_buses_need_as_many_ports() -> None:
    Config(bus="tcp://127.0.0.1:65534", processes=2)
    with pytest.raises(ValidationError, match="would be over 65535: begin with a lower one"):
        Config(bus="tcp://127.0.0.1:65534", processes=3)


def test_several_processes_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    Config(processes=1)
    with pytest.raises(ValidationError, match="--processes 2 needs Linux"):
        Config(processes=2)


def test_a_process_has_its_part_of_what_limits_the_whole(tmp_path: Path) -> None:
    whole = Config(
        processes=3, max_connections=100, max_waiting=0, local=(1, 1), ready_file=tmp_path / "r"
    )
    part = whole.for_process(3, bus="tcp://127.0.0.1:7002")
    assert (part.max_connections, part.max_waiting) == (34, 0)
    assert part.max_running_per_worker == 86 and part.max_kept_responses == 334
    assert (part.request_history, part.request_history_bytes) == (3334, 22369622)
    assert (part.local, part.ready_file, part.bus) == ((0, 0), None, "tcp://127.0.0.1:7002")
    assert part.max_requests_per_connection == whole.max_requests_per_connection


@pytest.mark.parametrize("bus", ["127.0.0.1:5570", "udp://a:1", "tcp://a", "tcp://a:65536", ""])
def test_a_bus_that_zeromq_cannot_bind_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], bus: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Config, [f"--bus={bus}"])
    assert caught.value.code == EX_CONFIG
    said = capsys.readouterr().err
    assert "--bus (BATON_BUS)" in said
    assert "neither tcp://HOST:PORT, with a port from 0 to 65535, nor ipc://PATH" in said


@pytest.mark.parametrize("flags", ["--role decode", "--threads 2 --rank=3", "--router=tcp://a:1"])
def test_worker_args_cannot_set_role_rank_and_router(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Config, ["--local=1,1", f"--worker-args={flags}"])
    assert caught.value.code == EX_CONFIG
    flag = next(name for name in ("--role", "--rank", "--router") if name in flags)
    assert f"{flag} is not for all of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("local", "flag", "sharing"),
    [
        ("1,1", "--metrics=127.0.0.1:9100", 2),
        ("0,2", "--metrics [::1]:9100", 2),
        ("1,3", "--threads 2 --kv-bind tcp://127.0.0.1:5600", 3),
        ("0,2", "--kv-segment-port=5601 --threads 2", 2),
        ("0,2", "--kv-bind=ipc:///tmp/kv", 2),
        ("2", "--kv-segment-port=5601", 2),
    ],
)
def test_no_address_is_given_to_several_local_workers(local: str, flag: str, sharing: int) -> None:
    with pytest.raises(
        ValidationError, match=f"is one address, which {sharing} workers would take"
    ):
        Config(local=local, worker_args=flag)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("local", "flag"),
    [
        ("0,1", "--metrics 127.0.0.1:9100"),
        ("1,1", "--metrics 127.0.0.1:0"),
        ("2,1", "--kv-bind tcp://127.0.0.1:5600"),  # of which prefill workers take no notice
        ("0,2", "--kv-segment-port auto"),
        ("1", "--kv-bind tcp://127.0.0.1:5600"),
        ("2,2", "--metrics"),
    ],
)
def test_an_address_that_one_local_worker_takes_is_its_own(local: str, flag: str) -> None:
    assert Config(local=local, worker_args=flag).worker_args == flag  # type: ignore[arg-type]


FILE = """
model = "/m"                 # both programs have it
num_blocks = 7               # only workers have it
max_waiting = 5
[router]
http = "127.0.0.1:1"
max_waiting = 6
local = [1, 1]
[worker]
rank = 4
prefix_cache = false
"""


def test_one_file_has_the_settings_of_both_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "baton.toml").write_text(FILE)
    monkeypatch.setenv("BATON_CONFIG", str(path))
    router, worker = (
        parse(Config, [], beside="worker.config"),
        parse(WorkerConfig, [], beside="router.config"),
    )
    assert (router.model, router.http, router.max_waiting) == ("/m", "127.0.0.1:1", 6)
    assert router.local == (1, 1) and router.config == path
    assert (worker.model, worker.num_blocks, worker.rank) == ("/m", 7, 4)
    assert worker.prefix_cache is False
    assert capsys.readouterr() == ("", "")


def test_the_file_in_the_readme_is_one(tmp_path: Path) -> None:
    shown = re.findall(r"```toml\n(.*?)```", (ROOT / "router/README.md").read_text(), re.DOTALL)
    (path := tmp_path / "baton.toml").write_text(shown[0])
    argv = [f"--config={path}"]
    assert parse(Config, argv, beside="worker.config").local == (1, 1)
    assert parse(WorkerConfig, argv, beside="router.config").host_kv_bytes == 8_000_000_000


def test_a_flag_beats_a_variable_beats_a_credential_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "baton.toml").write_text("max_waiting = 5\n")
    argv = [f"--config={path}"]

    def found(*more: str) -> tuple[int, str]:
        config, origins = parse_with_origins(Config, [*argv, *more], beside="worker.config")
        return config.max_waiting, origins["max_waiting"]

    assert found() == (5, f"{path}:1")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "baton_max_waiting").write_text("6\n")
    assert found() == (6, "credential baton_max_waiting")
    monkeypatch.setenv("baton_max_waiting", "7")
    assert found() == (7, "BATON_MAX_WAITING")
    assert found("--max-waiting=8") == (8, "--max-waiting")
    assert parse(Config, argv).max_waiting == 7
    assert parse_with_origins(Config, [])[1]["max_waiting"] == "BATON_MAX_WAITING"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "max_wating = 5\n",
            "baton.toml:1: max_wating is not a setting; did you mean max_waiting?",
        ),
        ("\n[worker]\nhttp = ''\n", "baton.toml:3: http is not a setting of [worker]"),
        ("[ruoter]\n", "[ruoter] is not a table of settings; did you mean router?"),
        ("config = 'other'\n", "baton.toml:1: config is not a setting"),
        ("\nmax_waiting = -1\n", "baton.toml:2) = '-1': must be an integer from 0"),
        ("max_waiting = true\n", "baton.toml:1) = 'true': must be an integer from 0"),
    ],
)
def test_a_bad_line_of_the_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, sentence: str
) -> None:
    (path := tmp_path / "baton.toml").write_text(content)
    with pytest.raises(SystemExit) as caught:
        parse(Config, [f"--config={path}"], beside="worker.config")
    assert caught.value.code == EX_CONFIG
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and sentence in err


def test_local_workers_read_the_file_and_other_processes_of_one_do_not(tmp_path: Path) -> None:
    (path := tmp_path / "baton.toml").write_text("[worker]\nnum_blocks = 7\nrank = 3\n")
    config = parse(Config, [f"--config={path}", "--local=1,1"], beside="worker.config")
    argv = command(config, "tcp://127.0.0.1:9", "decode", 0)[3:]
    worker = parse(WorkerConfig, argv, beside="router.config")
    assert (worker.num_blocks, worker.rank) == (7, 0)  # what --local says is said by flags
    follower = follower_command(worker.model_copy(update={"tensor_parallel": 2}), 1, "file:///m")
    assert not [flag for flag in follower if flag.startswith("--config")]


def test_the_chat_key_is_no_misspelt_setting(capsys: pytest.CaptureFixture[str]) -> None:
    parse(Config, [], beside="worker.config", environ={"BATON_API_KEY": "x"})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", [Config, WorkerConfig])
def test_help_shows_every_setting_in_a_group(
    kind: type[Config] | type[WorkerConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    grouped = groups(kind)
    assert (
        sorted(name for names in grouped.values() for name in names) == sorted(kind.model_fields)
        and "" not in grouped
    )
    with pytest.raises(SystemExit):
        parse(kind, ["--help"])
    text = capsys.readouterr().out
    places = [text.index(f"\n{title}:\n") for title in grouped]
    assert places == sorted(places)
    flags = choices_of_flags(kind)
    assert flags["--device"] == ["auto", "cpu", "cuda"] and "--no-insecure" in flags
