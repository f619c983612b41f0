"""`baton verify` on a whole cluster: equal answers, and a sick worker that is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import ROOT, START_S, Cluster, until
from tests.sick_executor import POSITION
from wire.process.api_keys import digest, name_of

CLIENT, OTHER, ADMIN = (f"sk-{name}-0123456789abc" for name in ("client", "other", "admin"))
BATON = "import sys; from router.command.main import main; sys.exit(main())"


class Verified(Cluster):
    """One prefill and one decode worker; the requests of CLIENT are kept."""

    def __init__(self, directory: Path) -> None:
        self.admin_keys = directory / "admin_keys"
        api_keys = directory / "api_keys"
        for path, keys in ((self.admin_keys, [ADMIN]), (api_keys, [CLIENT, OTHER])):
            path.write_text("\n".join(keys))
            path.chmod(0o600)
        flags = (
            *("--api-keys", str(api_keys), "--admin-keys", str(self.admin_keys)),
            *("--keep-requests", name_of(digest(CLIENT.encode()))),
        )
        super().__init__(directory, executor="hash", args=flags, api_key=CLIENT)

    def complete(self, key: str = CLIENT, **fields: Any) -> str:
        body = {"model": "demo", "prompt": [5, 6, 7] * 9, "max_tokens": 40, "ignore_eos": True}
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(
            f"{self.http}/v1/completions", json=body | fields, headers=headers, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def verify(self, name: str, *flags: str) -> tuple[int, Any, str]:
        """`baton verify --json`: its status, its answer and its error."""
        where = ("--url", self.http, "--api-key-file", str(self.admin_keys))
        command = [sys.executable, "-c", BATON, "verify", *where, "--json", *flags, name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S)
        return done.returncode, json.loads(done.stdout or "null"), done.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verified]:
    with Verified(tmp_path_factory.mktemp("verify")) as cluster:
        yield cluster


def test_equal_answers_then_a_sick_worker(cluster: Verified) -> None:
    greedy = cluster.complete(temperature=0)
    sampled = cluster.complete(temperature=1.0, n=2)
    natural = cluster.complete(temperature=0, ignore_eos=False, max_tokens=1000)
    others = cluster.complete(OTHER)
    cluster.until_idle()

    status, _, error = cluster.verify(greedy)
    assert status == 2 and "no other workers are ready" in error
    status, found, _ = cluster.verify(greedy, "--same-worker")
    assert status == 0 and found["choices"][0]["replayed"] == found["choices"][0]["kept"]
    status, _, error = cluster.verify(others)
    assert status == 2 and "--keep-requests" in error

    healthy = cluster.worker("decode", 1)
    for name, num_choices in ((greedy, 1), (sampled, 2), (natural, 1)):
        status, found, error = cluster.verify(name)
        assert (status, found["equal"], len(found["choices"])) == (0, True, num_choices), error
        for choice in found["choices"]:
            assert choice["tokens"] == 40 or name == natural
            [pair] = choice["replayed"]
            assert pair["decode"] == {"worker": "decode-1", "arithmetic": "hash"}
    assert found["choices"][0]["outcome"] == "stop", "it ended by EOS, and so did its replay"

    healthy.kill()
    until(lambda: cluster.find("decode", 1, "lost"), "it is lost")
    cluster.worker("decode", 2, "--executor", "tests.sick_executor:create")
    for name in (greedy, sampled):
        status, found, _ = cluster.verify(name)
        assert (status, found["equal"]) == (1, False)
        for choice in found["choices"]:
            difference = choice["first_difference"]
            assert difference["position"] == choice["tokens"] == POSITION
            assert difference["kept_by"] == {"worker": "decode-0", "arithmetic": "hash"}
            assert difference["replayed_by"] == {"worker": "decode-2", "arithmetic": "sick"}
            assert difference["replayed_token"] in (difference["kept_token"] + 1, 0)
    cluster.until_idle()
