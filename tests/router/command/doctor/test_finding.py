"""The report."""

from __future__ import annotations

import json

from router.command.doctor.finding import fault, json_of, ok, text_of, warning

FINDINGS = [
    fault("ports", "--http 127.0.0.1:80", "is taken", "kill 7"),
    ok("model", "demo", "is whole"),
    warning("cores", "OMP_NUM_THREADS=9", "\x1b[2Jtoo many", "unset OMP_NUM_THREADS"),
]


def test_faults_come_last_and_each_has_its_cure() -> None:
    lines = text_of(FINDINGS).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok", "warning", "->", "fault", "->"]
    assert lines[1].endswith(": [2Jtoo many")
    assert lines[-2].endswith("-> kill 7") and lines[-1] == "1 faults, 1 warnings, 1 ok"


def test_json_has_every_finding_and_the_counts() -> None:
    body = json.loads(json_of(FINDINGS))
    assert (body["fault"], body["warning"], body["ok"]) == (1, 1, 1)
    assert body["findings"][0] == {
        "level": "fault",
        "check": "ports",
        "where": "--http 127.0.0.1:80",
        "what": "is taken",
        "cure": "kill 7",
    }
