"""The invariants of every request, whatever happened: the client's half of DESIGN 8, 1 to 3.

`problem` says what is wrong with one record; a text of a fault-free run comes from the hash
executor's oracle, so any KV byte that was lost, stale or another request's shows as a wrong token.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Final

from tests.faults.clients import Record
from tests.oracle import hash_oracle

# Of a record, what the oracle wants to know.
ASKED: Final = ("prompt", "num_tokens", "options")


def problem(record: Record, tokens: list[int], *, may_fail: bool = False) -> str:
    """Return what is wrong, "" if nothing; `tokens` is the fault-free text.

    With `may_fail` an explicit error after a prefix of the text is right too.
    """
    if record.num_ends != 1 or record.late:
        return f"{record.num_ends} ends, after the first: {record.late}"
    if record.error:
        if record.tokens != tokens[: len(record.tokens)]:
            return f"not a prefix of the fault-free text, then: {record.error}"
        return "" if may_fail else record.error
    if record.tokens != tokens:
        return _difference(record.tokens, tokens)
    reason = "length" if len(tokens) == record.num_tokens else "stop"
    return "" if record.finish == reason else f"finish reason {record.finish}, not {reason}"


def problems(records: list[Record], *, may_fail: bool = False, processes: int = 0) -> list[str]:
    """Judge all; with `processes` the texts are computed by so many, else here."""
    asked = [[getattr(record, name) for record in records] for name in ASKED]
    if processes:
        with ProcessPoolExecutor(processes) as pool:
            texts = list(pool.map(hash_oracle, *asked, chunksize=16))
    else:
        texts = list(map(hash_oracle, *asked))
    found = [
        problem(record, tokens, may_fail=may_fail)
        for record, tokens in zip(records, texts, strict=True)
    ]
    return [each for each in found if each]


def _difference(got: list[int], wanted: list[int]) -> str:
    for index, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            doubled = index and one == wanted[index - 1]
            kind = "doubled" if doubled else "skipped" if one in wanted[index + 1 :] else "wrong"
            return f"token {index} of {len(wanted)} is {kind}: {one}, not {other}"
    return f"{len(got)} tokens, not {len(wanted)}"
