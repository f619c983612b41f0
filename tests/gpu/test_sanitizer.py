"""The meaning of compute-sanitizer's last lines."""

import pytest

from tests.gpu.sanitizer import problem_of


@pytest.mark.parametrize(
    ("status", "output", "says"),
    [
        (0, "========= ERROR SUMMARY: 0 errors\n", ""),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", ""),
        (
            77,
            "= Invalid __global__ read of size 16\n=   at attend\n= ERROR SUMMARY: 3 errors\n",
            "3 errors, exit status 77: Invalid __global__ read of size 16",
        ),
        (
            77,
            "= Error: Race reported on Write\n= RACECHECK SUMMARY: 1 hazard displayed\n",
            "1 errors, exit status 77: Error: Race reported on Write",
        ),
        (1, "Traceback\n========= ERROR SUMMARY: 0 errors\n", "0 errors, exit status 1: "),
        (127, "no such device", "exit status 127 and no summary: no such device"),
    ],
)
def test_a_summary_says_what_was_found(status: int, output: str, says: str) -> None:
    problem = problem_of(status, output)
    assert problem.startswith(says) and bool(problem) == bool(says)
