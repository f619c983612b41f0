"""The settings of the router and the workers of this machine."""

from __future__ import annotations

import pytest

from router.command.doctor.settings import read_site


def test_each_local_worker_has_its_settings() -> None:
    site, found = read_site(["--local", "1,2", "--worker-args", "--threads 3", "--model", "demo"])
    assert site is not None and site.is_local and [each.level for each in found] == ["ok"]
    assert [each.party for each in site.workers] == ["decode-0", "decode-1", "prefill-0"]
    assert {each.threads for each in site.workers} == {3}


def test_without_local_workers_the_settings_of_one_started_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_ROLE", "any")
    monkeypatch.setenv("BATON_NUM_BLOCKS", "7")
    site, _ = read_site(["--executor", "hash", "--worker-args", "--threads 3"])
    assert site is not None and not site.is_local
    (worker,) = site.workers
    assert (worker.role, worker.num_blocks, worker.threads, worker.executor) == (
        "any",
        7,
        3,
        "hash",
    )


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--nothing", "7"], "--nothing is not a flag"),
        (["--worker-args", "--threads many"], "--threads (BATON_THREADS) = 'many'"),
    ],
)
def test_a_wrong_setting_of_either_is_one_fault(flags: list[str], names: str) -> None:
    site, found = read_site(flags)
    assert site is None and [each.level for each in found] == ["fault"]
    assert names in found[0].what


def test_a_misspelt_variable_is_one_warning_although_both_programs_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_NOTHING_LIKE_IT", "7")
    _, found = read_site([])
    assert [(each.where, each.cure) for each in found] == [
        ("BATON_NOTHING_LIKE_IT", "unset BATON_NOTHING_LIKE_IT")
    ]
