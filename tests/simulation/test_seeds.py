"""A seed is one history; histories hold the invariants; planted bugs are caught."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.core.fleet import Fleet
from router.core.replies import Replies
from tests.simulation.bugs import BUGS, BrokenPlant, Bug, hunt
from tests.simulation.seeds import Outcome, quiet, run_seed
from wire.transfer import KVReceiver
from worker.engine.engine import Engine
from worker.roles.prefill import PrefillRole

ROOT = Path(__file__).resolve().parents[2]
# Histories that once broke an invariant, and why.
FOUND = {
    368: "a client heard CANCELLED because a decode worker had lost its router",
    13988: "a decode worker took KV for a router it had lost, and held it for a lease",
}


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet():
        yield


def history(seed: int) -> Outcome:
    outcome = run_seed(seed)
    assert outcome.problem == ""
    return outcome


def test_a_seed_is_one_history() -> None:
    one, again, other = history(7), history(7), history(8)
    assert one == again and one.digest != other.digest


def test_a_seed_is_the_same_history_in_another_process() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seed", "7"]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert history(7).digest in output.stdout.decode()


@pytest.mark.parametrize("seed", FOUND, ids=str)
def test_histories_that_once_failed_hold(seed: int) -> None:
    history(seed)


def test_requests_survive_what_happens_to_them() -> None:
    ends = [end for seed in range(12) for end in history(seed).ends]
    assert ends.count("done") > len(ends) / 3


def _names_what_is_gone(sound: Any) -> Any:
    return lambda self, *args: self.gone


def _is_called_otherwise(sound: Any) -> Any:
    return lambda self: None


@pytest.mark.parametrize(
    "bug",
    [
        Bug(KVReceiver, "gone", _names_what_is_gone),
        Bug(KVReceiver, "verify", _names_what_is_gone),
        Bug(KVReceiver, "verify", _is_called_otherwise),
        Bug(Fleet, "overdue", _names_what_is_gone),
        Bug(Engine, "step", _names_what_is_gone),
        Bug(PrefillRole, "_send", _is_called_otherwise),
        Bug(Replies, "_on_tokens", lambda sound: None),
    ],
    ids=lambda bug: f"{bug.name}-{bug.make.__name__}",
)
def test_a_plant_that_fits_no_more_has_caught_nothing(
    bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUGS, "broken", bug)
    with pytest.raises(BrokenPlant):
        hunt("broken", range(4))
