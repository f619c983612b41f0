"""/readyz is about progress: it is 503 with reasons when no request could be served."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.cluster import until
from tests.faults.cluster import FaultyCluster
from tests.wedged_executor import WEDGE


def readiness(cluster: FaultyCluster) -> tuple[int, list[str]]:
    response = httpx.get(cluster.http + "/readyz", trust_env=False, timeout=60)
    if response.status_code == 503:
        assert int(response.headers["retry-after"]) >= 1
    return response.status_code, response.json()["reasons"]


def unready(cluster: FaultyCluster, *roles: str) -> list[str]:
    """Wait until /readyz names exactly these roles; return its reasons."""

    def reasons() -> list[str] | None:
        status, reasons = readiness(cluster)
        is_it = status == 503 and len(reasons) == len(roles)
        named = zip(roles, reasons, strict=False)
        return reasons if is_it and all(role in reason for role, reason in named) else None

    return until(reasons, f"unready because of {roles}")  # type: ignore[no-any-return]


def test_it_is_ready_as_long_as_somebody_is(tmp_path: Path) -> None:
    """Dead, frozen and back: decode and prefill, each alone and both."""
    with FaultyCluster(
        tmp_path, prefills=1, decodes=2, router_args=("--heartbeat-ms", "200"), is_supervised=False
    ) as cluster:
        # A worker that is late with a heartbeat is suspect until the next.
        until(lambda: readiness(cluster) == (200, []), "ready")
        cluster.kill("decode", 0)
        until(lambda: cluster.find("decode", 0) is None, "decode-0 is missed")
        until(lambda: readiness(cluster) == (200, []), "ready without it")
        cluster.freeze("decode", 1)
        assert "decode-1" in unready(cluster, "decode")[0]
        cluster.freeze("prefill", 0)
        unready(cluster, "prefill", "decode")
        cluster.thaw("decode", 1)
        unready(cluster, "prefill")
        cluster.thaw("prefill", 0)
        until(lambda: readiness(cluster) == (200, []), "ready again")


def test_a_worker_that_beats_but_makes_no_step_is_not_ready(tmp_path: Path) -> None:
    """An engine that stands still: alive is not enough."""
    cluster = FaultyCluster(
        tmp_path,
        prefills=1,
        decodes=1,
        router_args=("--stall-ms", "1000", "--max-attempts", "1"),
        executor="tests.wedged_executor:create",
        is_supervised=False,
    )
    cluster.environ |= {"WEDGED": str(tmp_path / "wedged"), "GO_ON": str(tmp_path / "go_on")}
    with cluster:
        until(lambda: readiness(cluster) == (200, []), "ready")
        body = {"prompt": [1, 2, WEDGE], "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(cluster.http + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 503, answer.text
        assert "prefill-0 is suspect" in unready(cluster, "prefill")[0]
        (tmp_path / "go_on").touch()
        until(lambda: readiness(cluster) == (200, []), "the step ended")
