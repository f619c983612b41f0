"""Kept responses, for later ones to continue: a bounded number, private to each client.

Kept as bytes, which can be counted: the response, and the items before it, those of earlier
responses included, so that each can be continued when the earlier ones are long forgotten.  Where
there is no room, the client that keeps most loses its least recently used one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec

from router.api.errors import HttpError, invalid
from wire.errors import shown

# Of a dictionary's entry and the names in it, about.
BYTES_EACH: Final = 1024
MAX_RESPONSES: Final = 1000
MAX_BYTES: Final = 64 * 1024 * 1024
DEFAULT_ITEMS: Final = 20
MAX_ITEMS: Final = 100


class KeptResponse(NamedTuple):
    """`answer` is the response and `input` the list of items before it, both in JSON."""

    asker: str
    answer: bytes
    input: bytes

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.input) + BYTES_EACH


class _Previous(msgspec.Struct):
    previous_response_id: str | None = None


class KeptResponses:
    """At most `max_responses` of them, of `max_bytes` together.

    Bodies are read and answers made in threads too, so every method may be called from any.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = Lock()
        # By asker, the least recently used at the beginning.
        self._kept: dict[str, OrderedDict[str, KeptResponse]] = {}
        self._bytes_of_asker: Counter[str] = Counter()
        self._num_kept = self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_kept

    def keep(self, name: str, kept: KeptResponse) -> None:
        """Keep a response, unless it is larger than all may be; others make room for it."""
        if kept.size > self._max_bytes:
            return
        with self._lock:
            self._kept.setdefault(kept.asker, OrderedDict())[name] = kept
            self._count(kept.asker, 1, kept.size)
            while self._num_kept > self._max_responses or self.num_bytes > self._max_bytes:
                most = max(self._kept, key=self._part_of)
                _, oldest = self._kept[most].popitem(last=False)
                self._count(most, -1, -oldest.size)

    def get(self, asker: str, name: str) -> KeptResponse | None:
        """Return a response of this asker, which has been used now; None if there is none."""
        with self._lock:
            theirs = self._kept.get(asker)
            if theirs is None or name not in theirs:
                return None
            theirs.move_to_end(name)
            return theirs[name]

    def pop(self, asker: str, name: str) -> bool:
        """Forget a response of this asker; False if there is none."""
        with self._lock:
            theirs = self._kept.get(asker)
            if theirs is None or name not in theirs:
                return False
            self._count(asker, -1, -theirs.pop(name).size)
            return True

    def _count(self, asker: str, num: int, num_bytes: int) -> None:
        self._num_kept += num
        self.num_bytes += num_bytes
        self._bytes_of_asker[asker] += num_bytes
        if not self._kept[asker]:
            del self._kept[asker], self._bytes_of_asker[asker]

    def _part_of(self, asker: str) -> float:
        """How much of what may be kept an asker has, of their number or of their bytes."""
        num = len(self._kept[asker]) / max(self._max_responses, 1)
        return max(num, self._bytes_of_asker[asker] / self._max_bytes)

    def missing(self, name: str, param: str | None = None) -> HttpError:
        """Return the 404 for a response that is missing or another client's, alike."""
        return HttpError(
            404,
            f"Response with id {shown(name)} not found: it was made with store false, or by "
            "somebody else, was deleted, or gave way to later ones (--max-kept-responses, "
            "--max-kept-bytes); a router that starts again has none",
            code="response_not_found",
            param=param,
        )


def previous_id(raw: bytes) -> str | None:
    """Return which response a body goes on from."""
    try:
        return msgspec.json.decode(raw, type=_Previous).previous_response_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # whoever reads it will say what is wrong


def list_items(kept: KeptResponse, query: dict[str, str]) -> dict[str, Any]:
    """Return the items before a response, as GET …/input_items has them: the latest first."""
    order, after = query.get("order", "desc"), query.get("after")
    limit = query.get("limit", str(DEFAULT_ITEMS))
    if order not in ("asc", "desc"):
        raise invalid("order", "expected asc or desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_ITEMS):
        raise invalid("limit", f"expected a number from 1 to {MAX_ITEMS}")
    items: list[dict[str, Any]] = msgspec.json.decode(kept.input)
    if order == "desc":
        items.reverse()
    if after is not None:
        names = [item["id"] for item in items]
        if after not in names:
            raise invalid("after", f"there is no item {shown(after)} here")
        items = items[names.index(after) + 1 :]
    page = items[: int(limit[:9])]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(items) > len(page),
    }
