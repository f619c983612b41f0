"""The serving stage on a CPU: it warms up, and measures a monolithic engine on the same prompts."""

from __future__ import annotations

from typing import Any

import pytest

from router.command.bench.load import Target, Workload, load
from tests.gpu import serve
from tests.gpu.settings import Settings
from worker.executor.contract import MemoryRequirements

SETTINGS = Settings("shim", seed=3, is_quick=True)


@pytest.mark.timeout(360)  # it starts a cluster
@pytest.mark.full("it starts a cluster; run it before a GPU run")
def test_a_cluster_is_measured_warm_and_a_monolithic_engine_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Workload] = []

    async def watched(target: Target, workload: Workload, concurrency: int) -> Any:
        seen.append(workload)
        return await load(target, workload, concurrency)

    monkeypatch.setattr(serve, "load", watched)
    figures = serve.serve_parts(SETTINGS)["1b"]()
    for where in ("serve", "engine", "floor"):
        for count in (1, 2):
            assert float(figures[f"{where}_1b_{count}_tokens_per_s"]) > 0
    assert float(figures["transfer_1b_gbs"]) > 0
    warm, *measured = seen
    assert len(measured) == 2
    for each in measured:
        assert each.output_tokens == warm.output_tokens
        assert not any(prompt in warm.prompts for prompt in each.prompts), "not from a cache"


def test_a_floor_is_what_the_rates_allow() -> None:
    memory = MemoryRequirements(2_000, 0, kv_bytes_per_token=10)
    workload = Workload([[1] * 90], output_tokens=20)
    rates = {"matmul_tflops": 1e-9, "read_gbs": 1e-6}  # a thousand of each a second
    floors = serve._floors(memory, workload, 2, rates)  # noqa: SLF001
    # A prompt: 90 tokens by 1000 weights, two operations each.  A step: the weights, 2 x 100 rows.
    assert floors["ttft_ms"] == pytest.approx(180e3) and floors["itl_ms"] == pytest.approx(4e3)
    assert floors["tokens_per_s"] == pytest.approx(40 / (2 * 180 + 20 * 4))
