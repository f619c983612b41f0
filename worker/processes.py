"""Starts and connects the processes that compute one model together.

Process 0 is the leader: only it connects to routers.  Without --rendezvous it starts the others on
this machine.  If one of the processes dies, the whole worker ends at once; a restart restarts all.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory, gettempdir
from threading import Thread
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from wire.process.children import die_with_parent, same_release
from wire.process.cores import best_threads
from wire.process.keys import open_keys
from wire.process.lifetime import ending_signals
from wire.process.model import check_files, fingerprint, locate
from wire.process.settings import MAKE_KEYS, SharedSettings, open_port
from worker.compute.device_errors import EXIT_DEVICE_FAILED, device_error
from worker.config import LOOPBACK_HOSTS, Config
from worker.executor.contract import Executor

if TYPE_CHECKING:
    from worker.compute.ranks import Ranks

log = structlog.get_logger("worker")

# Settings that must be equal in all processes.
_DTYPES: Final = ("dtype", "kv_dtype", "weights")
# Settings that process 0 passes on to the others.
_SHARED: Final = {
    *(*SharedSettings.model_fields.keys() - {"config"}, *_DTYPES, "threads"),
    *("tensor_parallel", "pipeline_parallel"),
}
# How long to wait for other processes to join, or for their part of a step.
STEP_TIMEOUT_S: Final = 600.0
# Linux's ioctl that returns the address of a network interface.
_SIOCGIFADDR: Final = 0x8915
_INTERFACE: Final = "NCCL_SOCKET_IFNAME"
# Only torchrun sets this variable.  Other programs set RANK, WORLD_SIZE and so on as well.
_TORCHRUN: Final = "TORCHELASTIC_RUN_ID"


class ProcessInfo(NamedTuple):
    """A process's number in its worker and on its machine, and the rendezvous address."""

    number: int
    rendezvous: str
    local_number: int
    num_local: int

    @property
    def is_one_machine(self) -> bool:
        """Whether all processes of the worker are on this machine."""
        return not self.rendezvous.startswith("tcp://")


def process_info(config: Config, environ: Mapping[str, str]) -> ProcessInfo:
    """Return this process's numbers and rendezvous, from --process or torchrun's variables.

    If `rendezvous` is empty, this process must start the others.

    Raises:
        ValueError: torchrun has started too many or too few processes, or it has started them on
            several machines and there are no keys.
    """
    if config.num_processes > 1 and not config.rendezvous and _TORCHRUN in environ:
        number, count = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        if count != config.num_processes:
            raise ValueError(
                f"torchrun has started {count} processes, --tensor-parallel "
                f"{config.tensor_parallel} x --pipeline-parallel {config.pipeline_parallel} are "
                f"{config.num_processes}; change --nnodes or --nproc-per-node, or these"
            )
        port, num_local = int(environ["MASTER_PORT"]), int(environ["LOCAL_WORLD_SIZE"])
        if num_local == count:
            return ProcessInfo(number, _on_this_machine(port), number, count)
        if not config.has_keys and not config.insecure:
            raise open_port("torchrun's processes on several machines", MAKE_KEYS)
        # torchrun itself uses MASTER_PORT.
        rendezvous = f"tcp://{environ['MASTER_ADDR']}:{port + 1}"
        return ProcessInfo(number, rendezvous, int(environ["LOCAL_RANK"]), num_local)
    if config.rendezvous.startswith("tcp://"):
        host, _, digits = config.rendezvous.removeprefix("tcp://").rpartition(":")
        if host not in LOOPBACK_HOSTS:
            return ProcessInfo(config.process, config.rendezvous, 0, 1)
        return ProcessInfo(config.process, _on_this_machine(int(digits)), 0, 1)
    return ProcessInfo(config.process, config.rendezvous, config.process, config.num_processes)


def _on_this_machine(port: int) -> str:
    """Return a local rendezvous address, the same in all processes that are given this port."""
    if sys.platform == "linux":
        return f"abstract://baton-{port}"
    return f"file://{gettempdir()}/baton-{port}"


def set_environment(config: Config, process: ProcessInfo) -> None:
    """Set environment variables for torch and NCCL: this process's GPU, threads and interface.

    Call it before torch is imported.  NCCL uses the network interface on the route to process 0,
    unless NCCL_SOCKET_IFNAME names another.  On one machine it always uses the loopback.
    """
    if config.num_processes == 1:
        return
    set_threads(config.threads, process.num_local)
    if config.device == "cpu":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = [str(gpu) for gpu in range(process.num_local)]
    gpus = every if visible is None else visible.split(",")  # "" means that there is no GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[process.local_number :][:1])
    host = process.rendezvous.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if (interface := interface_to(LOOPBACK_HOSTS[0] if process.is_one_machine else host)) is None:
        return
    configured = os.environ.setdefault(_INTERFACE, interface)
    if process.is_one_machine and configured != interface:
        os.environ[_INTERFACE] = interface
        log.warning(
            "the processes of this worker are on one machine, and talk over the loopback only",
            **{_INTERFACE: configured, "used": interface},
        )


def set_threads(num_threads: int, num_processes: int = 1) -> None:
    """Set environment variables for torch's thread pools; call it before torch is imported.

    If `num_threads` is 0, keep OMP_NUM_THREADS, or divide the cores among `num_processes`.
    """
    if num_threads:  # torch uses the smaller of the two values, so set both
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, best_threads() // num_processes)))
    # Idle OpenMP threads spin by default, on the cores that `kernels.cpu.threads` needs.  So the
    # few torch operations of the sampler would make a step a quarter slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def interface_to(host: str) -> str | None:
    """Return the network interface on the IPv4 route to a host, or None if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(40, b"\0"))
            except OSError:
                continue  # the interface has no address
            if socket.inet_ntoa(found[20:24]) == own:
                return name
    return None


def join_processes(config: Config, on_lost: Callable[[int], None]) -> Ranks | None:
    """Connect to this worker's other processes, after starting them if necessary.

    Returns None if there are no others.

    Args:
        on_lost: Called on a separate thread if another process dies, with its exit status, which
            is negative for a signal.

    Raises:
        ValueError: The processes cannot compute the model together.
        TimeoutError, ConnectionError: Not all processes have joined, or one has died.
    """
    if config.num_processes == 1:
        return None
    process, environ = process_info(config, os.environ), dict(os.environ)
    set_environment(config, process)
    settings = equal_settings(config)
    keys = None if process.is_one_machine else open_keys(config.keys, config.party)
    for ending in ending_signals():  # replaced when this process starts to serve or to follow
        signal.signal(ending, _interrupt)
    # These import torch, which reads the environment when it is imported.
    from worker.compute.device import find_device
    from worker.compute.ranks import Ranks
    from worker.model.shard import Shard

    shard = Shard.of_process(process.number, config.tensor_parallel, config.pipeline_parallel)
    device = find_device(config.device)
    rendezvous, followers = process.rendezvous, None
    if device.type == "cuda" and not (process.is_one_machine or config.insecure):
        raise ValueError(
            "NCCL, by which GPUs of several machines talk, knows no keys; use a network that is "
            "yours alone and add --insecure"
        )
    if not rendezvous:
        followers = Followers(config, on_lost, environ)
        rendezvous = followers.rendezvous
    try:
        secret = b"" if keys is None else keys.pair.secret.encode()
        ranks = Ranks(shard, rendezvous, device, STEP_TIMEOUT_S, settings, secret)
    except RuntimeError as error:
        raise ConnectionError(f"the processes of this worker have parted: {error}") from error
    finally:
        if followers is not None:
            followers.directory.cleanup()
    if ranks.is_leader and followers is None:
        for number in range(1, config.num_processes):
            Thread(target=_watch, args=(ranks, number, on_lost), daemon=True).start()
    return ranks


def equal_settings(config: Config) -> dict[str, object]:
    """Return the settings that must be equal in all processes.

    Raises:
        ValueError: The model does not exist, or it cannot be divided into these shards.
    """
    from worker.model.config import read_config
    from worker.model.shard import Shard

    path = locate(config.model)
    check_files(path)
    Shard.of_process(0, config.tensor_parallel, config.pipeline_parallel).of(read_config(path))
    flags = {f"--{name.replace('_', '-')}": getattr(config, name) for name in _DTYPES}
    return {"the fingerprint of --model": fingerprint(path), **flags}


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


def _watch(ranks: Ranks, number: int, on_lost: Callable[[int], None]) -> None:
    """Report the death of a process that this one did not start; runs on its own thread."""
    try:
        ranks.watch(number)
    except RuntimeError as error:
        log.error("a process of the model is lost", process=number, reason=str(error))
        on_lost(1)


def follow(executor: Executor) -> int:
    """Run the steps that the leader sends until it ends; return the exit status."""
    from worker.parallel.executor import ShardedExecutor

    assert isinstance(executor, ShardedExecutor)
    for number in ending_signals():  # the leader handles them, as it may have to drain
        signal.signal(number, signal.SIG_IGN)
    try:
        executor.follow()
    except RuntimeError as error:
        if (sentence := device_error(error)) is not None:
            log.error("the GPU has failed, so this worker ends", reason=sentence)
            return EXIT_DEVICE_FAILED
        log.warning("the leader is gone", reason=str(error))
        return 1
    return 0


class Followers:
    """Starts a worker's other processes on this machine; `on_lost` is as in `join_processes`."""

    def __init__(
        self, config: Config, on_lost: Callable[[int], None], environ: Mapping[str, str]
    ) -> None:
        # The directory is private to this user, so no other user can listen there first.
        self.directory = TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True)
        self.rendezvous = f"file://{self.directory.name}/meet"
        self._on_lost = on_lost
        self._processes = [
            subprocess.Popen(
                command(config, number, self.rendezvous),
                stdin=subprocess.DEVNULL,
                env=_environment(environ),
                preexec_fn=die_with_parent(),
            )
            for number in range(1, config.num_processes)
        ]
        for number, process in enumerate(self._processes, 1):
            Thread(target=self._watch, args=(number, process), daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _watch(self, number: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if status:
            log.error("a process of the model is lost", process=number, status=status)
            self.directory.cleanup()
            self._on_lost(status)


def command(config: Config, number: int, rendezvous: str) -> list[str]:
    """Return the command line that starts process `number` of this worker."""
    shared = config.model_dump(include=_SHARED, exclude_none=True)
    settings = {**shared, "rendezvous": rendezvous, "process": number}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "worker", *flags]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without Baton's settings and systemd's variables, for another process."""
    dropped = ("BATON_", "NOTIFY_SOCKET", "WATCHDOG_")
    return same_release({name: environ[name] for name in environ if not name.startswith(dropped)})
