"""The output of a response: converts the parts of an answer to items and their events.

An item is open until a part of another item arrives.  Then its status is completed, except for an
unfinished call and the last item of a truncated answer.  The items depend only on the parts, so the
last event of a stream has the same response as a request without streaming.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgspec

from router.api.completions.response import event
from router.api.requests.conversation import new_call_id
from router.api.responses.items import item_name, text_part
from router.text.output_parts import CallArguments, CallEnd, CallStart, Content, Part, Reasoning

_encode: Final = msgspec.json.Encoder().encode


class OpenItem(ABC):
    """An item that is still growing; `stem` is the prefix of its event names."""

    kind: ClassVar[str]
    stem: ClassVar[str]
    # The event fields that locate the text within the item.
    place: ClassVar[dict[str, int]] = {"content_index": 0}

    def __init__(self, key: str, index: int) -> None:
        self.where = {"item_id": item_name(self.kind, key, index), "output_index": index}
        self.texts: list[str] = []
        self.logprobs: list[Any] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @abstractmethod
    def fields(self, content: list[Any]) -> dict[str, Any]:
        """Return the fields of the item except its type, id and status."""

    @abstractmethod
    def part(self) -> dict[str, Any] | None:
        """Return the text as a content part; None if the item has no content."""

    def whole(self) -> dict[str, Any]:
        """Return the fields of the event that ends the text."""
        return {"text": self.text}

    def document(self, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        """Return the item as a JSON object; `is_empty` omits its content."""
        part = None if is_empty else self.part()
        head = {"id": self.where["item_id"], "type": self.kind, "status": status}
        return head | self.fields([] if part is None else [part])


class OpenMessage(OpenItem):
    kind, stem = "message", "response.output_text"

    def fields(self, content: list[Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        return text_part(self.text, self.logprobs)

    def whole(self) -> dict[str, Any]:
        return {"text": self.text, "logprobs": self.logprobs}


class OpenReasoning(OpenItem):
    kind, stem = "reasoning", "response.reasoning_text"

    def fields(self, content: list[Any]) -> dict[str, Any]:
        return {"summary": [], "content": content}

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class OpenCall(OpenItem):
    kind, stem = "function_call", "response.function_call_arguments"
    place: ClassVar[dict[str, int]] = {}

    def __init__(self, key: str, index: int, name: str) -> None:
        super().__init__(key, index)
        self._call = {"call_id": new_call_id(), "name": name}
        self.is_finished = False

    def fields(self, content: list[Any]) -> dict[str, Any]:
        return {**self._call, "arguments": self.text}

    def part(self) -> None:
        return None

    def whole(self) -> dict[str, Any]:
        return {"name": self._call["name"], "arguments": self.text}


class Output:
    """The items so far, and the events since the last call of `take_events`.

    There are no events if `is_streamed` is False.
    """

    def __init__(self, key: str, *, is_streamed: bool) -> None:
        self._key = key
        self._is_streamed = is_streamed
        self._done: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        # Whether an item is incomplete.
        self.is_cut = False
        self._delta = b""
        self._waiting: list[Any] = []
        self._events: list[bytes] = []
        self._num_events = 0

    def take_events(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    def add_event(self, kind: str, **fields: Any) -> None:
        if not self._is_streamed:
            return
        body = _encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._events.append(event(body, kind))
        self._num_events += 1

    def items(self, status: str) -> list[dict[str, Any]]:
        """Return all items as JSON objects; `status` is the status of the open one."""
        return [*self._done, *([self._open.document(status)] if self._open else ())]

    def add(self, parts: Sequence[Part], logprobs: Sequence[Any] = ()) -> None:
        """Append parts, and the log-probabilities of their tokens.

        A message has the log-probabilities of all tokens before its end, including tokens without
        text and tokens of reasoning.  They are buffered until the message has text.
        """
        self._waiting += logprobs
        for part in parts:
            if isinstance(part, CallStart):
                self._begin(OpenCall(self._key, self._next, part.name))
            elif isinstance(part, CallArguments):
                self._extend(part.text)
            elif isinstance(part, CallEnd):
                assert isinstance(self._open, OpenCall)
                self._open.is_finished = True
            elif part.text:
                kind = OpenReasoning if isinstance(part, Reasoning) else OpenMessage
                if not isinstance(self._open, kind):
                    self._begin(kind(self._key, self._next))
                self._extend(part.text)

    def end(self, status: str) -> None:
        """Close the last item; an output without items gets an empty message."""
        if self._open is None:
            self._begin(OpenMessage(self._key, 0))
        if self._waiting and isinstance(self._open, OpenMessage):
            self._extend("")
        self._close(status)

    @property
    def _next(self) -> int:
        return len(self._done) + (self._open is not None)

    def _begin(self, item: OpenItem) -> None:
        self._close("completed")
        self._open = item
        index = item.where["output_index"]
        document = item.document("in_progress", is_empty=True)
        self.add_event("response.output_item.added", output_index=index, item=document)
        if (part := item.part()) is not None:
            self.add_event("response.content_part.added", **item.where, **item.place, part=part)
        # The event for one token is rendered once, except for its number and text.
        fields = {"type": f"{item.stem}.delta", **item.where, **item.place}
        frame = event(_encode(fields)[:-1] + b',"sequence_number":', f"{item.stem}.delta")
        self._delta = frame.removesuffix(b"\n\n")

    def _extend(self, text: str) -> None:
        item, scores = self._open, b""
        assert item is not None
        item.texts.append(text)
        if isinstance(item, OpenMessage):
            logprobs, self._waiting = self._waiting, []
            item.logprobs += logprobs
            scores = b',"logprobs":' + _encode(logprobs)
        if not self._is_streamed:
            return
        number = b'%d,"delta":' % self._num_events
        self._events += (self._delta, number, _encode(text), scores, b"}\n\n")
        self._num_events += 1

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, OpenCall):
            status = "completed" if item.is_finished else "incomplete"
        self.is_cut |= status == "incomplete"
        self.add_event(f"{item.stem}.done", **item.where, **item.place, **item.whole())
        if (part := item.part()) is not None:
            self.add_event("response.content_part.done", **item.where, **item.place, part=part)
        self._done.append(item.document(status))
        index = item.where["output_index"]
        self.add_event("response.output_item.done", output_index=index, item=self._done[-1])


def content_of(text: str) -> list[Part]:
    return [Content(text)] if text else []
