"""`baton doctor` finds each planted fault and names the cure, and none where there is none."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from router.command.doctor.command import api_key, check_site
from router.command.doctor.settings import read_site
from router.config import Config
from tests.cluster import ROOT
from tests.router.command.doctor.planted import FAULTS, Fault, Site, bad, diagnosed, listener


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_planted_fault_is_found_with_its_cure(
    fault: Fault,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault.is_found(Site(tmp_path, monkeypatch), capsys)


def test_a_port_that_another_process_has_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with listener() as (port, pid):
        status, findings = diagnosed(["--tcp", f"127.0.0.1:{port}"], capsys)
    (found,) = [each for each in findings if each["level"] == "fault"]
    assert status == 1 and found["cure"] == f"kill {pid}, or give --tcp another port"
    assert f"is taken by process {pid}" in found["what"] and found["check"] == "ports"


def test_a_clean_machine_has_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    status, findings = diagnosed(["--executor", "torch"], capsys)
    assert status == 0 and not [each for each in findings if each["level"] == "fault"]
    checks = {each["check"] for each in findings}
    assert checks >= {"ports", "keys", "model", "memory", "cores", "gpu", "links", "splitting"}


def test_the_memory_that_counts_is_that_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = 'case "$1" in --query*) echo 64; echo 9000;; *) echo "CUDA Version: 13.0";; esac'
    Site(tmp_path, monkeypatch).program("nvidia-smi", said)
    flags = ["--executor", "torch", "--worker-args"]
    for num_bytes, level in ((1 << 30, "fault"), (32 << 20, "ok")):
        _, findings = diagnosed([*flags, f"--kv-cache-bytes {num_bytes}"], capsys)
        (memory,) = [each for each in findings if each["check"] == "memory"]
        assert memory["level"] == level and "0.1 GiB are free on the GPU" in memory["what"]


def test_misspelt_variables_and_too_many_threads_are_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_MAX_WAITIN", "7")
    monkeypatch.setenv("BATON_NUM_BLOCKS", "7")  # a setting of workers
    monkeypatch.setenv("BATON_API_KEY", "sk-mine")  # of clients
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    status, findings = diagnosed([], capsys)
    cures = [each["cure"] for each in bad(findings)]
    assert 'export BATON_MAX_WAITING="$BATON_MAX_WAITIN"; unset BATON_MAX_WAITIN' in cures
    assert "unset OMP_NUM_THREADS" in cures and status == 0
    assert not [cure for cure in cures if "API_KEY" in cure]


def test_few_descriptors_are_a_warning_and_the_text_names_the_cure() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from router.command.main import main; main()", "doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
    )
    assert "200 files may be open and 8448 are needed" in done.stdout, done.stderr
    assert "-> ulimit -Hn 8448" in done.stdout


def test_a_bus_at_any_free_port_is_not_looked_for() -> None:
    site, _ = read_site(["--executor", "hash", "--bus", "tcp://127.0.0.1:0"])
    assert site is not None
    found = check_site(site, "", has_router=True, is_serving=True)
    assert not [each for each in found if each.check == "reach"]


def test_a_key_of_the_file_is_not_sent_to_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\nsk-0123456789abcdef\n")
    path.chmod(0o600)
    config = Config(api_keys=path)
    assert api_key(config, "") == api_key(config, "http://127.0.0.1:1") == "sk-0123456789abcdef"
    assert api_key(config, "http://192.0.2.7:8000") == ""
    monkeypatch.setenv("BATON_API_KEY", "sk-mine")
    assert api_key(config, "http://192.0.2.7:8000") == "sk-mine"
