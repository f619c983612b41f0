"""Starts the processes that compute one model together, and makes them meet.

Process 0 leads: it is the worker that routers know.  Without --rendezvous it starts the others on
this machine.  When one of them is lost, the worker ends at once, and a restart starts all.
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
_NUMBERS: Final = ("dtype", "kv_dtype", "weights")
# Settings that process 0 passes on to the others.
_SHARED: Final = {
    *(*SharedSettings.model_fields, *_NUMBERS, "threads"),
    *("tensor_parallel", "pipeline_parallel"),
}
# For others to join, and for their part of a step; their death is noticed at once.
STEP_TIMEOUT_S: Final = 600.0
# Of Linux: the address of an interface.
_SIOCGIFADDR: Final = 0x8915
_INTERFACE: Final = "NCCL_SOCKET_IFNAME"
# Only torchrun sets this variable; other programs use the names of the others, too.
_TORCHRUN: Final = "TORCHELASTIC_RUN_ID"


class Place(NamedTuple):
    """The number of a process in its worker and on its machine, and where all meet."""

    number: int
    rendezvous: str
    local_number: int
    num_local: int

    @property
    def is_here(self) -> bool:
        """Whether all of them are on this machine."""
        return not self.rendezvous.startswith("tcp://")


def place_of(config: Config, environ: Mapping[str, str]) -> Place:
    """Return the place of this process; without a rendezvous it has to start the others.

    Raises:
        ValueError: torchrun has started too many or too few processes, or on several machines
            without keys.
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
            return Place(number, _on_this_machine(port), number, count)
        if not config.has_keys and not config.insecure:
            raise open_port("torchrun's processes on several machines", MAKE_KEYS)
        # At its own port torchrun keeps a store.
        rendezvous = f"tcp://{environ['MASTER_ADDR']}:{port + 1}"
        return Place(number, rendezvous, int(environ["LOCAL_RANK"]), num_local)
    if config.rendezvous.startswith("tcp://"):
        host, _, digits = config.rendezvous.removeprefix("tcp://").rpartition(":")
        if host not in LOOPBACK_HOSTS:
            return Place(config.process, config.rendezvous, 0, 1)
        return Place(config.process, _on_this_machine(int(digits)), 0, 1)
    return Place(config.process, config.rendezvous, config.process, config.num_processes)


def _on_this_machine(port: int) -> str:
    """Return the meeting point of processes that share nothing but a port of the loopback."""
    if sys.platform == "linux":
        return f"abstract://baton-{port}"
    return f"file://{gettempdir()}/baton-{port}"


def settle(config: Config, place: Place) -> None:
    """Choose the GPU and threads of this process in the environment, before torch is imported.

    NCCL uses the interface to process 0; on one machine the loopback, whatever is set.
    """
    if config.num_processes == 1:
        return
    set_threads(config.threads, place.num_local)
    if config.device == "cpu":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = [str(it) for it in range(place.num_local)]
    gpus = every if visible is None else visible.split(",")  # "" says that there is none
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[place.local_number :][:1])
    host = place.rendezvous.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if (interface := interface_to(LOOPBACK_HOSTS[0] if place.is_here else host)) is None:
        return
    said = os.environ.setdefault(_INTERFACE, interface)
    if place.is_here and said != interface:
        os.environ[_INTERFACE] = interface
        log.warning(
            "the processes of this worker are on one machine, and talk over the loopback only",
            **{_INTERFACE: said, "used": interface},
        )


def set_threads(num_threads: int, num_processes: int = 1) -> None:
    """Set the size of torch's thread pools in the environment, before its import."""
    if num_threads:  # the smaller of the two counts, so both are set
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, best_threads() // num_processes)))
    # Idle OpenMP threads spin by default, on the cores that `kernels.cpu.threads` needs: the few
    # operations that the sampler leaves to torch would slow a step by a quarter.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def interface_to(host: str) -> str | None:
    """Return the network interface on the IPv4 route to a host; None if there is none."""
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
                continue  # it has no address
            if socket.inet_ntoa(found[20:24]) == own:
                return name
    return None


def meet(config: Config, on_lost: Callable[[int], None]) -> Ranks | None:
    """Join the other processes of the worker, after starting them if need be; None: no others.

    Args:
        on_lost: Called on a thread of its own with the exit status of a process that ends by
            itself, negative for a signal.

    Raises:
        ValueError: They cannot compute the model together.
        TimeoutError, ConnectionError: Not all have joined, or one is gone.
    """
    if config.num_processes == 1:
        return None
    place, before = place_of(config, os.environ), dict(os.environ)
    settle(config, place)
    settings = equal_settings(config)
    keys = None if place.is_here else open_keys(config.keys, config.party)
    for ending in ending_signals():  # until this process serves or follows
        signal.signal(ending, _interrupt)
    # Here: it imports torch, whose threads are counted when it is imported.
    from worker.compute.device import find_device
    from worker.compute.ranks import Ranks
    from worker.model.shard import Shard

    shard = Shard.of_process(place.number, config.tensor_parallel, config.pipeline_parallel)
    device = find_device(config.device)
    rendezvous, followers = place.rendezvous, None
    if device.type == "cuda" and not (place.is_here or config.insecure):
        raise ValueError(
            "NCCL, by which GPUs of several machines talk, knows no keys; use a network that is "
            "yours alone and add --insecure"
        )
    if not rendezvous:
        followers = Followers(config, on_lost, before)
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
        ValueError: There is no such model, or it does not divide into these shards.
    """
    from worker.model.config import read_config
    from worker.model.shard import Shard

    path = locate(config.model)
    check_files(path)
    Shard.of_process(0, config.tensor_parallel, config.pipeline_parallel).of(read_config(path))
    flags = {f"--{it.replace('_', '-')}": getattr(config, it) for it in _NUMBERS}
    return {"the fingerprint of --model": fingerprint(path), **flags}


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


def _watch(ranks: Ranks, number: int, on_lost: Callable[[int], None]) -> None:
    """Wait for the end of a process that this one has not started, perhaps elsewhere."""
    try:
        ranks.watch(number)
    except RuntimeError as error:
        log.error("a process of the model is lost", process=number, reason=str(error))
        on_lost(1)


def follow(executor: Executor) -> int:
    """Compute what the leader asks for, to the end; return the exit status."""
    from worker.parallel.executor import ShardedExecutor

    assert isinstance(executor, ShardedExecutor)
    for number in ending_signals():  # they are for the leader, who may drain
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
    """The other processes of a worker, started on this machine; `on_lost` as for `meet`."""

    def __init__(
        self, config: Config, on_lost: Callable[[int], None], environ: Mapping[str, str]
    ) -> None:
        # Private to this user, and nobody else can listen there first.
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
    """Return the command line of another process of this worker."""
    shared = config.model_dump(include=_SHARED, exclude_none=True)
    settings = {**shared, "rendezvous": rendezvous, "process": number}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "worker", *flags]


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without settings and without systemd's variables."""
    dropped = ("BATON_", "NOTIFY_SOCKET", "WATCHDOG_")
    return same_release({name: ours[name] for name in ours if not name.startswith(dropped)})
