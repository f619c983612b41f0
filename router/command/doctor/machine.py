"""Checks of the machine: processor, cores, file descriptors, GPU, systemd units."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from router.app import OTHER_FILES
from router.command.doctor.finding import Finding, fault, ok, warning
from router.config import Config
from wire.process.cores import best_threads, own_cores, parse_cores, quota
from wire.process.settings import EX_CONFIG

_CPUINFO: Final = Path("/proc/cpuinfo")
_TIMEOUT_S: Final = 10.0
_START_LIMIT: Final = "start-limit-hit"


def processor_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Return the flags of the processor; none if this system does not say."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(found[1].split()) if found else frozenset()


def check_processor(flags: frozenset[str]) -> Finding:
    """Say which arithmetic workers get on the processor."""
    where = "processor"
    if {"amx_tile", "amx_bf16", "amx_int8"} <= flags:
        return ok("processor", where, "AMX: bfloat16 in matrix tiles")
    if "avx512_bf16" in flags:
        return ok("processor", where, "AVX512-BF16: bfloat16 in dot products of vectors")
    if "avx2" in flags or "asimd" in flags or not flags:
        return ok("processor", where, "no bfloat16 instructions: float32 in vectors")
    what = "neither AVX2 nor AVX-512: float32 in short vectors, several times slower"
    return warning("processor", where, what, "use a virtual machine that shows the host's flags")


def check_threads(workers: Sequence[Any], environ: Mapping[str, str]) -> list[Finding]:
    """Compare the threads of the workers with the cores that they may use."""
    most = best_threads()
    limit = f"{len(own_cores()) or most} cores" + (f", quota {quota():g}" if quota() < 1e6 else "")
    variable = environ.get("OMP_NUM_THREADS", "")
    found = []
    for worker in workers:
        absent = parse_cores(worker.cores) - own_cores() if own_cores() else frozenset()
        if absent:
            what = f"this process may not run on {sorted(absent)}"
            found.append(fault("cores", f"--cores {worker.cores}", what, "leave out --cores"))
        threads = worker.threads or (int(variable) if variable.isdecimal() else most)
        if threads > most:
            origin = f"--threads {threads}" if worker.threads else f"OMP_NUM_THREADS={variable}"
            what = f"more threads than this machine has use for ({limit}): steps take longer"
            cure = f"--threads {most}" if worker.threads else "unset OMP_NUM_THREADS"
            found.append(warning("cores", origin, what, cure))
    return found or [ok("cores", limit, f"{most} threads a worker")]


def check_descriptors(config: Config, num_files: int) -> Finding:
    """Compare --max-connections with how many files the router may open, as the router does."""
    wanted = config.max_connections * (4 if config.tls_cert else 2) + OTHER_FILES
    where = f"--max-connections {config.max_connections}"
    if num_files >= wanted:
        return ok("files", where, f"{num_files} files may be open")
    what = f"{num_files} files may be open and {wanted} are needed, so fewer connections are taken"
    cure = f"ulimit -Hn {wanted}, or LimitNOFILE={wanted} in the unit"
    return warning("files", where, what, cure)


def check_gpu(device: str) -> list[Finding]:
    """Check that the driver, torch and CuPy fit each other; `device` is the setting --device."""
    if device == "cpu":
        return [ok("gpu", "--device cpu", "no GPU is used")]
    program = shutil.which("nvidia-smi")
    if program is None and not any(Path("/dev").glob("nvidia[0-9]*")):
        if device == "auto":
            return [ok("gpu", "--device auto", "there is no NVIDIA GPU, so the CPU computes")]
        cure = "install the NVIDIA driver, or say --device cpu"
        return [fault("gpu", "--device cuda", "there is no NVIDIA driver", cure)]
    if program is None:
        cure = "install nvidia-smi of the driver's version"
        return [warning("gpu", "/dev/nvidia*", "devices, but no nvidia-smi to ask", cure)]
    status, said = output_of([program])
    driver = re.search(r"CUDA Version: *([0-9]+)\.", said)
    if status or driver is None:
        first = (said.strip().splitlines() or ["it says nothing"])[0]
        cure = "reboot, or reinstall the driver: dmesg | grep -i nvrm"
        return [fault("gpu", "nvidia-smi", f"the driver does not answer: {first[:200]}", cure)]
    return check_cuda(int(driver[1]), installed())


def free_gpu_memory(num_gpus: int) -> int | None:
    """Return how many bytes are free on the first GPUs together; None if no GPU answers."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    status, said = output_of(query)
    found = [int(line) for line in said.splitlines() if line.strip().isdecimal()]
    return None if status or not found else sum(found[:num_gpus]) << 20


def check_cuda(driver: int, versions: Mapping[str, str]) -> list[Finding]:
    """Check CuPy and torch against the CUDA version of the driver.

    Args:
        driver: The major version of CUDA that the driver supports.
        versions: The version of each installed distribution, by its name.
    """
    extra = "cuda" if driver >= 13 else "cuda12"
    install = f"{sys.executable} -m pip install 'baton-serve[{extra}]'"
    built = [name for name in versions if re.fullmatch(r"cupy-cuda[0-9]+x", name)]
    found = []
    newest = max((int(name[9:-1]) for name in built), default=0)
    if not built and "cupy" not in versions:
        what = "there is a GPU but no CuPy, so workers compute on the CPU"
        found.append(fault("gpu", "CuPy", what, install))
    elif newest > driver:
        what = f"is for CUDA {newest}, and the driver supports {driver}"
        cure = f"{sys.executable} -m pip uninstall -y {' '.join(built)} && {install}"
        found.append(fault("gpu", "CuPy", what, cure))
    if versions.get("torch", "").endswith("+cpu"):
        cure = f"{sys.executable} -m pip install --force-reinstall torch"
        found.append(fault("gpu", "torch", "is the build without CUDA", cure))
    return found or [ok("gpu", "driver, torch and CuPy", f"fit each other (CUDA {driver})")]


def installed() -> dict[str, str]:
    """Return the version of each installed distribution, by its name."""
    return {each.name.lower(): each.version for each in metadata.distributions() if each.name}


def check_units() -> list[Finding]:
    """Ask systemd about Baton's units."""
    properties = "--property=Id,ActiveState,Result,ExecMainStatus,NRestarts"
    status, said = output_of(["systemctl", "show", properties, "--all", "baton-*.service"])
    if status:
        return [ok("systemd", "systemctl", "is not there or does not run this machine: no units")]
    units = [
        dict(line.partition("=")[::2] for line in block.splitlines())
        for block in said.split("\n\n")
        if block.strip()
    ]
    return [check_unit(unit) for unit in units] or [ok("systemd", "baton-*", "no units here")]


def check_unit(unit: Mapping[str, str]) -> Finding:
    """Check a unit; `unit` has its properties as `systemctl show` prints them."""
    name, state = unit.get("Id", "?"), unit.get("ActiveState", "?")
    result, status = unit.get("Result", ""), unit.get("ExecMainStatus", "0")
    why = f"journalctl -u {name} -n 50"
    if state == "failed" or result == _START_LIMIT:
        what, cure = f"failed: {result or 'unknown'}, status {status}", why
        if status == str(EX_CONFIG):
            what, cure = f"{what}: its settings are wrong", f"{why}; correct /etc/baton"
        if result == _START_LIMIT:
            what += ", too often in a short time, so systemd starts it no more"
        cure += f"; then systemctl reset-failed {name} && systemctl restart {name}"
        return fault("systemd", name, what, cure)
    if unit.get("NRestarts", "0") not in ("", "0"):
        return warning("systemd", name, f"{state}, restarted {unit['NRestarts']} times", why)
    return ok("systemd", name, state)


def output_of(command: Sequence[str]) -> tuple[int, str]:
    """Run a command; return its exit status, 1 if it does not end in time, and what it wrote."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout or done.stderr
