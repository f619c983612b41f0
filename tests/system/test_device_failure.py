"""A worker whose GPU fails while it serves writes one line and is started again."""

from __future__ import annotations

from pathlib import Path

from tests.cluster import START_S, Cluster, until
from tests.failing_device import SENTENCE
from tests.oracle import hash_oracle
from wire.options import Options
from worker.compute.device_errors import EXIT_DEVICE_FAILED

NUM_TOKENS = 60
FAILED = "the GPU has failed, so this worker ends"


def test_requests_go_on_elsewhere_and_the_worker_comes_back(tmp_path: Path) -> None:
    executor = "tests.failing_device:create"
    cluster = Cluster(tmp_path, local="1,2", executor=executor)
    cluster.environ["TEST_DEVICE_FAILS"] = str(tmp_path / "fails")
    (tmp_path / "fails").touch()
    with cluster:
        prompts = [[prompt, 7, 9] * 10 for prompt in range(12)]
        fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
        token_ids = [choice["token_ids"] for choice in cluster.choices(prompts, **fields)]
        options = Options(ignore_eos=True)
        assert token_ids == [hash_oracle(prompt, NUM_TOKENS, options) for prompt in prompts]

        def again() -> list[int]:
            return [rank for rank in (0, 1) if len(cluster.local_pids("decode", rank)) == 2]

        [rank] = until(again, "the worker is started again", START_S)
        cluster.ready("decode", rank)
        cluster.until_idle()
    [line] = [event for event in cluster.events() if event["level"] == "error"]
    assert line["event"] == FAILED
    assert line["reason"] == SENTENCE
    assert line["noticed"].startswith("in forward of a decode step, batch size ")
    assert f'"status": {EXIT_DEVICE_FAILED}' in cluster.log()
