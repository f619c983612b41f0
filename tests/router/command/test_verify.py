"""`baton verify`: its verdict and exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.command.verify import run, verdict
from tests.router.command.serving import Cluster, serving

KEPT = [
    {
        "first_token": 0,
        "prefill": {"worker": "prefill-0", "arithmetic": "avx512"},
        "decode": {"worker": "decode-0", "arithmetic": "avx512"},
    }
]
REPLAYED = [{"first_token": 0, "prefill": None, "decode": {"worker": "any-1", "arithmetic": ""}}]


def choice(**changes: Any) -> dict[str, Any]:
    ours: dict[str, Any] = {"equal": True, "tokens": 9, "outcome": "stop", "client": "key-1"}
    ours |= {"first_difference": None, "kept": KEPT, "replayed": REPLAYED}
    return ours | changes


DIFFERENCE = {
    "position": 3,
    "kept_token": 17,
    "kept_by": KEPT[0]["decode"],
    "replayed_token": None,
    "replayed_by": REPLAYED[0]["decode"],
}


class Verifying(Cluster):
    found: Any

    def answer(self, path: str) -> object:
        self.asked.append(path)
        return self.found


@pytest.mark.parametrize("is_equal", [True, False])
@pytest.mark.parametrize("is_json", [True, False])
def test_the_exit_status_is_the_verdict(
    is_equal: bool, is_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    difference = None if is_equal else DIFFERENCE
    choices = [choice(equal=is_equal, first_difference=difference)]
    with Verifying([]) as cluster:
        cluster.found = {"id": "r/1", "equal": is_equal, "choices": choices}
        flags = ["--url", cluster.url, *(["--json", "--same-worker"] if is_json else [])]
        assert run([*flags, "r/1"]) == (0 if is_equal else 1)
    assert cluster.asked == ["/v1/requests/r%2F1/verify" + "?same_worker=true" * is_json]
    said = capsys.readouterr().out
    if is_json:
        assert json.loads(said) == cluster.found
        return
    verdict = (
        "equal, 9 tokens"
        if is_equal
        else "DIFFERENT at token 3: 17 from decode-0 (avx512), the end from any-1 in the replay"
    )
    assert said.splitlines() == [
        f"r/1: {verdict}",
        "  served by prefill-0 (avx512) -> decode-0 (avx512)",
        "  replayed by any-1",
    ]


def test_a_busy_cluster_is_asked_again_when_it_says() -> None:
    found = {"id": "r", "equal": True, "choices": [choice()]}
    busy = {"error": {"message": "no worker has room; try again"}}
    answers = [(429, busy), (429, busy), (200, found)]

    def respond(_: object) -> tuple[int, bytes]:
        status, body = answers.pop(0)
        return status, json.dumps(body).encode()

    with serving(respond) as url:
        assert run(["--url", url, "r"]) == 0
    assert answers == []


def test_several_choices_and_attempts() -> None:
    later = KEPT[0] | {"first_token": 4}
    choices = [choice(kept=[*KEPT, later]), choice(outcome="cancelled")]
    lines = verdict({"id": "r", "equal": True, "choices": choices}).splitlines()
    pair = "prefill-0 (avx512) -> decode-0 (avx512)"
    assert lines[1] == f"  served by {pair} from token 0; {pair} from token 4"
    assert lines[3] == "r, choice 1: equal, 9 tokens, all before it ended (cancelled)"


def test_what_cannot_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with Verifying([]) as cluster:
        cluster.refusal = b'{"error": {"message": "this is for operators"}}'
        assert run(["--url", cluster.url, "r"]) == 2
    assert "baton verify: this is for operators" in capsys.readouterr().err
