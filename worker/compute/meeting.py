"""Where the processes of a model meet, and whether their settings match.

All are there and agree before any connects to another: whoever waits for one that computes
something else would wait for long.  Until then a signal can end the wait.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

# Public as torch.distributed.Store and so on, where their types cannot be found.
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous as rendezvous_of

# How often to look whether others have come; a signal is noticed as late as that.
_LOOK_S: Final = 0.05


def meet(
    rendezvous: str, process: int, count: int, settings: Mapping[str, object], timeout_s: float
) -> Store:
    """Return a store that all processes share, once all are there with the same settings.

    Args:
        rendezvous: See `worker.compute.ranks.Ranks`.
        settings: What must be the same in all, under the names that an operator knows.

    Raises:
        ValueError: Somebody was here before as this process, or has other settings.
        TimeoutError: Not all have come.
        OSError: The place cannot be opened.
    """
    deadline = time.monotonic() + timeout_s
    store = _open(rendezvous, process, count, deadline)
    if store.add(f"came {process}", 1) > 1:
        raise ValueError(
            f"process {process} of a worker has been at --rendezvous {rendezvous} before; give "
            "each process its own --process, and each start a new file or a port of its own"
        )
    store.set(f"settings {process}", json.dumps(settings))
    for other in range(count) if process == 0 else [0]:
        while not store.check([f"settings {other}"]):
            _wait(deadline, f"process {other} of {count} has not come", rendezvous)
        theirs = json.loads(store.get(f"settings {other}"))
        for name, value in settings.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"the processes of one worker need the same settings: {name} is {value} for "
                    f"process {process} and {theirs.get(name)} for process {other}"
                )
    return store


def _open(rendezvous: str, process: int, count: int, deadline: float) -> Store:
    kind, _, place = rendezvous.partition("://")
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if kind == "file":
        return FileStore(place, count)
    if kind == "env":  # torchrun's
        store, _, _ = next(rendezvous_of(rendezvous, process, count, timeout=timeout))
        assert isinstance(store, Store)
        return store
    host, _, port = place.rpartition(":")
    host, address = host.strip("[]"), (host.strip("[]"), int(port))
    if process:
        while not _answers(address):
            _wait(deadline, "process 0 is not there", rendezvous)
        return TCPStore(*address, count, timeout=timeout, wait_for_workers=False)
    listening = None
    if host in ("127.0.0.1", "localhost", "::1"):  # by itself a store listens on all interfaces
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server(address, family=family).detach()
    return TCPStore(
        *address,
        count,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 1.0).close()
    except OSError:
        return False
    return True


def _wait(deadline: float, what: str, rendezvous: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{what} to --rendezvous {rendezvous}; look into its log, or for it")
    time.sleep(_LOOK_S)
