"""The output of a response: items made of the parts of an answer, and their events.

An item is open until a part of another one comes.  It is completed, except for an unfinished call
and for the last item of an answer that was cut.  The items depend on the parts alone, so the last
event of a stream has the response that is answered whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgspec

from router.api.completions.response import event
from router.api.requests.conversation import new_call_id
from router.api.responses.items import item_name, said
from router.text.output_parts import CallArguments, CallEnd, CallStart, Content, Part, Reasoning

_encode: Final = msgspec.json.Encoder().encode


class OpenItem:
    """An item that parts still come for; `stem` begins the names of its events."""

    kind: ClassVar[str]
    stem: ClassVar[str]
    # Where in the item its text is.
    place: ClassVar[dict[str, int]] = {"content_index": 0}

    def __init__(self, key: str, index: int) -> None:
        self.where = {"item_id": item_name(self.kind, key, index), "output_index": index}
        self.texts: list[str] = []
        self.logprobs: list[Any] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def fields(self, content: list[Any]) -> dict[str, Any]:
        """The fields of the item beside its type, id and status."""
        raise NotImplementedError

    def part(self) -> dict[str, Any] | None:
        """The text as a part of a content; None where the item has no such parts."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The fields of the event that ends the text."""
        return {"text": self.text}

    def document(self, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        """Return the item, or how it looked before its first text."""
        part = None if is_empty else self.part()
        head = {"id": self.where["item_id"], "type": self.kind, "status": status}
        return head | self.fields([] if part is None else [part])


class OpenMessage(OpenItem):
    kind, stem = "message", "response.output_text"

    def fields(self, content: list[Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        return said(self.text, self.logprobs)

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
    """The items so far, and the events since `take_events` was last called.

    Where nobody wants events (`is_streamed` is False) there are none.
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

    def say(self, kind: str, **fields: Any) -> None:
        """Add an event."""
        if not self._is_streamed:
            return
        body = _encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._events.append(event(body, kind))
        self._num_events += 1

    def items(self, status: str) -> list[dict[str, Any]]:
        """All items; `status` is that of an open one."""
        return [*self._done, *([self._open.document(status)] if self._open else ())]

    def add(self, parts: Sequence[Part], logprobs: Sequence[Any] = ()) -> None:
        """Append parts; `logprobs` are those of their tokens.

        A message has the log-probabilities of all tokens that came before its end, also of those
        without text, or whose text is reasoning; they wait for text of the message.
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
        """End the last item; an empty output gets one empty message."""
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
        self.say("response.output_item.added", output_index=index, item=document)
        if (part := item.part()) is not None:
            self.say("response.content_part.added", **item.where, **item.place, part=part)
        # The usual event, of one token, is rendered once, but for its number and its text.
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
        self.say(f"{item.stem}.done", **item.where, **item.place, **item.whole())
        if (part := item.part()) is not None:
            self.say("response.content_part.done", **item.where, **item.place, part=part)
        self._done.append(item.document(status))
        index = item.where["output_index"]
        self.say("response.output_item.done", output_index=index, item=self._done[-1])


def content_of(text: str) -> list[Part]:
    """Return the parts of a text in which everything is content."""
    return [Content(text)] if text else []
