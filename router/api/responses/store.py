"""Stored responses that later requests can continue: bounded, and private to each client.

A stored response has all items before it, including those of earlier responses, so it can be
continued after those have been evicted.  It is stored as bytes, so its size is known.  When the
store is full, the client that uses most of it loses its least recently used response.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec

from router.api.errors import HttpError, invalid
from wire.errors import shown

# Approximate overhead of a dictionary entry and its keys.
BYTES_EACH: Final = 1024
MAX_RESPONSES: Final = 1000
MAX_BYTES: Final = 64 * 1024 * 1024
DEFAULT_ITEMS: Final = 20
MAX_ITEMS: Final = 100


class KeptResponse(NamedTuple):
    """A stored response (`answer`) and the list of items before it (`input`), both in JSON."""

    client: str
    answer: bytes
    input: bytes

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.input) + BYTES_EACH


class _Previous(msgspec.Struct):
    previous_response_id: str | None = None


class KeptResponses:
    """Stores up to `max_responses` responses with a total size of up to `max_bytes`.

    All methods are thread-safe, because bodies are parsed and responses rendered in threads too.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = Lock()
        # The responses of each client by id, the least recently used first.
        self._kept: dict[str, OrderedDict[str, KeptResponse]] = {}
        self._bytes_of_client: Counter[str] = Counter()
        self._num_kept = self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_kept

    def keep(self, name: str, kept: KeptResponse) -> None:
        """Store a response and evict others if needed; ignore one larger than the whole store."""
        if kept.size > self._max_bytes:
            return
        with self._lock:
            self._kept.setdefault(kept.client, OrderedDict())[name] = kept
            self._count(kept.client, 1, kept.size)
            while self._num_kept > self._max_responses or self.num_bytes > self._max_bytes:
                most = max(self._kept, key=self._share)
                _, oldest = self._kept[most].popitem(last=False)
                self._count(most, -1, -oldest.size)

    def get(self, client: str, name: str) -> KeptResponse | None:
        """Return a response of this client, marking it as recently used, or None."""
        with self._lock:
            responses = self._kept.get(client)
            if responses is None or name not in responses:
                return None
            responses.move_to_end(name)
            return responses[name]

    def pop(self, client: str, name: str) -> bool:
        """Delete a response of this client; return False if there is none."""
        with self._lock:
            responses = self._kept.get(client)
            if responses is None or name not in responses:
                return False
            self._count(client, -1, -responses.pop(name).size)
            return True

    def _count(self, client: str, num: int, num_bytes: int) -> None:
        self._num_kept += num
        self.num_bytes += num_bytes
        self._bytes_of_client[client] += num_bytes
        if not self._kept[client]:
            del self._kept[client], self._bytes_of_client[client]

    def _share(self, client: str) -> float:
        """Return the fraction of the store that a client uses, by number or by size."""
        num = len(self._kept[client]) / max(self._max_responses, 1)
        return max(num, self._bytes_of_client[client] / self._max_bytes)

    def missing(self, name: str, param: str | None = None) -> HttpError:
        """Return the 404 for a response that does not exist or belongs to another client."""
        return HttpError(
            404,
            f"Response with id {shown(name)} not found: it was made with store false, or by "
            "somebody else, was deleted, or gave way to later ones (--max-kept-responses, "
            "--max-kept-bytes); a router that starts again has none",
            code="response_not_found",
            param=param,
        )


def previous_id(raw: bytes) -> str | None:
    try:
        return msgspec.json.decode(raw, type=_Previous).previous_response_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # the endpoint will report what is invalid


def list_items(kept: KeptResponse, query: dict[str, str]) -> bytes:
    """Return the JSON of a page of the items before a response, for GET …/input_items."""
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
    body = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(items) > len(page),
    }
    return msgspec.json.encode(body)
