"""`baton doctor` beside a running cluster: nothing is wrong, then it finds what was planted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog

from router.command.doctor.command import diagnose
from router.command.doctor.finding import Finding
from tests.cluster import Cluster
from tests.router.command.doctor.planted import CLUSTER_FAULTS, Fault, Site, isolate, sickened


class Report(NamedTuple):
    """A cluster with faults, and what was found before they were planted."""

    cluster: Cluster
    healthy: list[Finding]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    directory, before = tmp_path_factory.mktemp("cluster"), structlog.get_config()
    with Cluster(directory, executor="hash") as cluster:
        tcp = cluster.endpoints["tcp"].removeprefix("tcp://")
        flags = ["--http", cluster.http.removeprefix("http://"), "--tcp", tcp]
        healthy = diagnose("", [*flags, "--bus", cluster.bus, "--executor", "hash"])
        with sickened(cluster, directory):
            yield Report(cluster, healthy)
    structlog.configure(**before)  # the command has set up its log


def test_a_running_cluster_has_no_fault(report: Report) -> None:
    assert not [each for each in report.healthy if each.level == "fault"]
    reached = [each for each in report.healthy if each.check == "reach"]
    assert [each.where for each in reached][1:] == [f"bus {report.cluster.bus}"]
    assert reached[0].where.startswith("decode-0 tcp://127.0.0.1:")
    ports = [each.what for each in report.healthy if each.check == "ports"]
    taken = f"is taken by the router that answers, process {report.cluster.router.pid} "
    assert len(ports) == 3 and all(what.startswith(taken) for what in ports)


@pytest.mark.parametrize("fault", CLUSTER_FAULTS, ids=str)
def test_each_planted_fault_is_found_with_its_cure(
    fault: Fault,
    report: Report,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    isolate(monkeypatch, tmp_path)
    # The sick workers are found whatever else is planted.
    fault.is_found(Site(tmp_path, monkeypatch, report.cluster), capsys, {"reach", "workers"})
