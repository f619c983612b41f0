"""scripts/vllm_tests: vLLM's own server tests against a cluster on the demo model."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.clients.vllm_tests import chosen, source

HERE = Path(__file__).parent
WORDS = {"passed": "passed", "failed": "FAILED", "skipped": "not applicable"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/vllm_tests", description=__doc__)
    parser.add_argument("parts", nargs="*", help="parts of file names; none: every file")
    parser.add_argument("-k", default="", help="as pytest takes it: tests by name")
    parser.add_argument("--results", type=Path, help="a file that keeps one JSON line a test")
    parser.add_argument("--why", action="store_true", help="say of each test why it did not pass")
    parser.add_argument("--left", action="store_true", help="say of each file why it is left out")
    arguments = parser.parse_args()
    if arguments.left:
        _show_left(source.tests() / "tests")
        return 0
    files = [it for it in chosen.FILES if not arguments.parts or _fits(it, arguments.parts)]
    results = arguments.results or source.cache() / "results.jsonl"
    root = source.tests()
    results.unlink(missing_ok=True)
    _run(root, files, arguments.k, results)
    rows = _rows(results)
    _show(rows, arguments.why)
    return 0 if all(row["outcome"] != "failed" for row in rows) else 1


def _show_left(root: Path) -> None:
    for folder in ("entrypoints", "tool_use"):
        for path in sorted((root / folder).rglob("test_*.py")):
            file = str(path.relative_to(root))
            if why := chosen.why_left(file):
                print(f"{file}: {why}")


def _fits(file: str, parts: list[str]) -> bool:
    return any(part in file for part in parts)


def _run(root: Path, files: list[str], names: str, results: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": f"{root}:{HERE}",
        "VLLM_TESTS_RESULTS": str(results.absolute()),
        "VLLM_TESTS_RULES": json.dumps(chosen.RULES),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pytest", "-q", "--no-header", "--tb=no"),
            *("-p", "baton_server", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *("-c", os.devnull, "--rootdir", str(root), "-o", "asyncio_mode=auto"),
            *("-W", "ignore", "--timeout", "120", "-k", names),
            *[f"tests/{file}" for file in files],
        ],
        cwd=root,
        env=environment,
        check=False,
    )


def _rows(results: Path) -> list[dict[str, str]]:
    """One a test: where it has parts, a part that failed speaks for it."""
    by_test: dict[str, dict[str, str]] = {}
    for row in map(json.loads, results.read_text().splitlines()):
        kept = by_test.get(row["test"])
        if kept is None or kept["outcome"] != "failed":
            by_test[row["test"]] = row
    return list(by_test.values())


def _show(rows: list[dict[str, str]], why: bool) -> None:
    outcomes = Counter(row["outcome"] for row in rows)
    by_file: dict[str, Counter[str]] = {}
    for row in rows:
        by_file.setdefault(row["test"].partition("::")[0], Counter())[row["outcome"]] += 1
        if why and row["outcome"] != "passed":
            print(f"{WORDS[row['outcome']]}: {row['test']}: {' '.join(row['why'].split())[:300]}")
    for file, found in by_file.items():
        figures = ", ".join(f"{found[it]} {WORDS[it]}" for it in WORDS if found[it])
        print(f"{file.removeprefix('tests/')}: {figures}")
    reasons = Counter(_reason(row["why"]) for row in rows if row["outcome"] == "skipped")
    for reason, count in reasons.most_common():
        print(f"{count} do not apply: {reason}")
    apply = outcomes["passed"] + outcomes["failed"]
    share = f"{outcomes['passed'] / apply:.0%}" if apply else "none"
    print(
        f"{outcomes['passed']} of {apply} that apply passed ({share}); "
        f"{outcomes['skipped']} do not apply"
    )


def _reason(why: str) -> str:
    """One reason for all of vLLM's classes."""
    return "calls vLLM's own classes, no server" if why.startswith("uses vllm") else why


if __name__ == "__main__":
    sys.exit(main())
