"""/metrics of a worker: what its engine and its transfers came to, in names the router has too."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.worker.tiers.lazy import LazyTiers
from wire.options import Options
from wire.process.frame_counters import Traffic
from worker.config import Config
from worker.engine.engine import Engine
from worker.engine.sequence import Sequence
from worker.executor.hash import LAYOUT, create, create_mixed
from worker.metrics import Metrics, TransferCounts


class Books:
    """A role that has handed one prompt over and failed once."""

    kv_inflight_bytes = 5

    def __init__(self) -> None:
        self.transfers = TransferCounts()
        self.transfers.end("done", 640, 64, 0.02)
        self.transfers.end("failed", 0, 0, None)


def served(engine: Engine) -> Metrics:
    config = Config(max_kv_inflight_bytes=32 << 20)
    return Metrics(engine, Books(), config, {"bus": Traffic()}, lambda: {"router": 1})


def samples(metrics: Metrics) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def engine() -> Engine:
    return Engine(create(), num_blocks=16, block_size=4)


def test_what_an_engine_did() -> None:
    subject = engine()
    metrics = served(subject)
    subject.add(Sequence(1, (1, 2, 3, 4, 5), Options(max_tokens=3, ignore_eos=True)))
    subject.step()
    found = samples(metrics)
    assert (found["baton_worker_running"], found["baton_blocks{state=used}"]) == (1, 2)
    assert found["baton_worker_utilization_ratio"] == 1 / 256
    while subject.has_work():
        subject.step()
    found = samples(metrics)
    assert (found["baton_worker_running"], found["baton_blocks{state=used}"]) == (0, 0)
    assert found["baton_worker_utilization_ratio"] == found["baton_worker_tokens_per_second"] == 0
    assert found["baton_worker_tokens_total{kind=prefill}"] == 5
    assert found["baton_worker_tokens_total{kind=decode}"] == 3
    assert found["baton_worker_sequences_total{outcome=finished}"] == 1
    assert found["baton_step_seconds_count"] == found["baton_worker_steps_total"] == 3
    assert found["baton_step_seconds_sum"] > 0


def test_blocks_of_layers_with_a_window() -> None:
    subject = Engine(create_mixed(), num_blocks=60, block_size=4, max_ubatch_tokens=16)
    metrics = served(subject)
    subject.add(Sequence(1, range(10, 50), Options(max_tokens=3, ignore_eos=True)))
    while subject.has_work():
        subject.step()
        found = samples(metrics)
        states = {it: found[f"baton_window_blocks{{state={it}}}"] for it in ("used", "cached")}
        assert states["used"] <= 4, "what a window of 13 reaches"
    assert states == {"used": 0, "cached": 10}, "all full blocks, as there is room"
    assert found["baton_window_blocks{state=free}"] == 4 * 5 + 16 // 4 - 10
    assert "baton_window_blocks{state=used}" not in samples(served(engine()))


def test_how_full_and_how_fast_it_is() -> None:
    now = [0.0]
    subject = Engine(
        create(), num_blocks=16, block_size=4, clock=lambda: now[0], max_sbatch_sequences=4
    )
    metrics = served(subject)
    for request_id in (1, 2):
        subject.add(Sequence(request_id, (1, 2, request_id), Options(ignore_eos=True)))
    for _ in range(6):
        subject.step()
    now[0] = 0.5
    found = samples(metrics)
    assert found["baton_worker_utilization_ratio"] == 0.5
    assert found["baton_worker_tokens_per_second"] == 24.0


def test_what_was_handed_over() -> None:
    found = samples(served(engine()))
    assert found["baton_kv_transfers_total{outcome=done}"] == 1
    assert found["baton_kv_transfers_total{outcome=failed}"] == 1
    assert found["baton_kv_transfer_bytes_total"] == 640
    assert found["baton_kv_transfer_skipped_bytes_total"] == 64
    assert found["baton_kv_transfer_seconds_bucket{le=0.02}"] == 1
    assert found["baton_kv_inflight_bytes"] == 5
    assert found["baton_kv_inflight_limit_bytes"] == 32 << 20
    assert found["baton_peers_up{kind=router}"] == 1
    assert found["baton_worker_parallel{kind=shards}"] == 1


def test_names_and_units() -> None:
    names = {name.partition("{")[0] for name in samples(served(engine()))}
    assert all(re.fullmatch(r"baton_[a-z_]+", name) for name in names)
    assert not [name for name in names if re.search(r"_(ms|mb|gb|percent)$", name)]


def test_what_tiers_hold_and_gave(tmp_path: Path) -> None:
    subject, tiers = engine(), LazyTiers(tmp_path, 4, 8)
    subject.add_tiers(tiers.open)
    metrics = served(subject)
    for _ in range(2):
        subject.add(Sequence(1, range(9), Options(max_tokens=2, ignore_eos=True)))
        while subject.has_work() or tiers.num_jobs:
            tiers.copying.close(0)
            tiers.writing.close(0)
            subject.step()
        subject.pool.free(subject.pool.allocate(16))
    found = samples(metrics)
    for tier in ("host", "disk"):
        assert found[f"baton_tier_blocks{{tier={tier}}}"] == 2
        assert found[f"baton_tier_bytes{{tier={tier}}}"] >= 2 * 4 * LAYOUT.token_bytes
    assert found["baton_tier_tokens_total{tier=host}"] == 8
    assert found["baton_tier_tokens_total{tier=disk}"] == 0
    assert found["baton_tier_failures_total{kind=write}"] == 0
    assert "baton_tier_blocks{tier=host}" not in samples(served(engine()))
