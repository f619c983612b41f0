"""Changes the code at random places, one at a time, and says which changes no test notices.

    scripts/mutants --seed 7 --count 40         40 changes, evenly over the wings
    scripts/mutants --seed 7 --count 40 --list  which they are; runs nothing
    scripts/mutants --place wire/aio            of a wing, a file or a line (wire/aio/tls.py:154)

Each change is made in a copy of the tree.  The module's own test file runs, and if it passes, those
beside it that reach the module, too (tests/mutants/trial.py).  Where a change survives, a test is
missing, or the change makes no difference: whoever reads the list decides.  While the code is the
same, a seed gives the same changes.  The exit status is 1 if fewer than --at-least percent were
noticed, or if a test that noticed fails without the change too.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.mutants.mutant import Mutant, drawn
from tests.mutants.trial import Tree, Verdict

ROOT: Final = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    mutants = list(itertools.islice(drawn(ROOT, args.seed, args.place), args.count))
    if args.list:
        print(*mutants, sep="\n")
        return 0
    verdicts = []
    for mutant, verdict in zip(mutants, _judged(mutants, args.jobs), strict=True):
        verdicts.append(verdict)
        print(_line(mutant, verdict), flush=True)
    _print_rates(mutants, verdicts)
    noticed = sum(bool(verdict.noticed_by) for verdict in verdicts)
    is_sound = all(verdict.is_sound for verdict in verdicts)
    return 0 if is_sound and 100 * noticed >= args.at_least * len(verdicts) else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="another one gives other changes")
    parser.add_argument("--count", type=int, default=40, help="how many (40)")
    parser.add_argument("--place", action="append", default=[], help="only there; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--list", action="store_true", help="print the changes and run nothing")
    parser.add_argument("--at-least", type=float, default=90.0, metavar="PERCENT", help="(90)")
    return parser.parse_args(argv)


def _judged(mutants: Sequence[Mutant], jobs: int) -> Iterator[Verdict]:
    """Yield the verdicts in the order of the mutants; each job has a copy of the tree."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        trees = queue.SimpleQueue[Tree]()
        for number in range(jobs):
            trees.put(Tree(ROOT, Path(folder) / str(number)))

        def judge(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                return tree.judge(mutant)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(judge, mutants)


def _line(mutant: Mutant, verdict: Verdict) -> str:
    if not verdict.noticed_by:
        return f"SURVIVED {mutant}"
    if not verdict.is_sound:
        return f"UNSOUND  {mutant}\n         {verdict.noticed_by} fails without the change too"
    return f"noticed  {mutant}\n         by {verdict.noticed_by}"


def _print_rates(mutants: Sequence[Mutant], verdicts: Sequence[Verdict]) -> None:
    wings = defaultdict[str, list[Verdict]](list)
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        wings[mutant.wing].append(verdict)
    for wing, those in sorted(wings.items()):
        print(f"{wing:24} {_rate(those)}")
    print(f"{'all':24} {_rate(verdicts)}")


def _rate(verdicts: Sequence[Verdict]) -> str:
    stages = [verdict.stage for verdict in verdicts if verdict.noticed_by]
    share = f" ({len(stages) / len(verdicts):.0%})" if verdicts else ""
    return (
        f"{len(stages)} of {len(verdicts)}{share}, {stages.count('wing')} by the wing's other tests"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
