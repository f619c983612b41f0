"""A gateway over the real core: workers without sockets that answer what a script says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from router.api.model import ServedModel
from router.bus import Bus
from router.core.state import Limits, RequestIds
from router.http.administration import Administration
from router.http.application import Application
from tests.router.http.serving import serving
from tests.router.scripted import EPOCH, detail, fleet, load
from wire.errors import ErrorCode
from wire.frames import (
    Cancel,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Error,
    Frame,
    Heartbeat,
    Hello,
    PrefillDone,
    PrefillRequest,
    Role,
)
from wire.parts import Buffer, Message, decode, encode
from wire.payloads import (
    ErrorDetail,
    Logprobs,
    PrefillResult,
    Usage,
    decode_continuation,
    decode_prompt,
    encode_map,
    encode_prefill_result,
)

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' }}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def letters() -> tokenizers.Tokenizer:
    """One token a byte: borders between tokens are wherever a test wants them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return backend


def write_model(directory: Path, *, text: bool = True) -> Path:
    """A model directory as the router reads it; with `text` False it has no tokenizer."""
    (directory / "config.json").write_text(json.dumps({"vocab_size": 258, "hidden_size": 8}))
    if text:
        letters().save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


LETTERS = letters()


def ids(text: str) -> list[int]:
    return list(_encoded(text))


@lru_cache(maxsize=64)  # each token of an answer asks for all
def _encoded(text: str) -> tuple[int, ...]:
    return tuple(LETTERS.encode(text, add_special_tokens=False).ids)


@dataclass
class Answer:
    """The workers' answer to one request, cut at the requested number of tokens."""

    text: str | list[int] = "hello"
    finish_reason: str = "stop"
    # After this many tokens: an ERROR, or silence.
    fails_after: int | None = None
    hangs_after: int | None = None
    error: ErrorCode = ErrorCode.WORKER_LOST
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False

    @property
    def token_ids(self) -> list[int]:
        return ids(self.text) if isinstance(self.text, str) else self.text

    def scores(self, token_id: int, num_top: int) -> Logprobs | None:
        top = ((token_id, -0.5), (2, -3.0))[:num_top]
        return Logprobs(logprob=-0.5, top=top) if self.logprobs else None


class Site:
    """Real bus, fleet, core and gateway; one prefill and one decode worker that follow `answer`."""

    def __init__(
        self,
        model_path: Path,
        *,
        limits: Limits | None = None,
        join: bool = True,
        **fleet_changes: object,
    ) -> None:
        self.answer: Callable[[tuple[int, ...]], Answer] = lambda prompt: Answer()
        self.seen: list[tuple[bytes, Message]] = []
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.num_top: dict[int, int] = {}
        self.salts: list[str] = []
        self.fleet = fleet(**fleet_changes)
        self.bus = Bus(
            self.fleet,
            transmit=self._transmit,
            forget=lambda peer: None,
            limits=limits or Limits(max_attempts=1),
            lease_ms=5000,
            request_ids=RequestIds(EPOCH),
            clock=time.monotonic,
        )
        self.restart_problem = ""
        self._settings: dict[str, Any] = {
            "model": ServedModel("letters", model_path),
            "administration": self.administration(is_open=True),
        }
        self.configure()
        if join:
            self.join(Role.PREFILL)
            self.join(Role.DECODE)

    def administration(self, **access: Any) -> Administration:
        """The handlers for operators; a restart fails with `restart_problem`, if that is set."""

        async def restart() -> str:
            return self.restart_problem

        return Administration(self.fleet, self.bus.ask_to_drain, restart, **access)

    def configure(self, **settings: Any) -> None:
        """Serve by an application with these settings, besides those of before."""
        self._settings |= settings
        self.application = Application(dispatcher=self.bus.dispatcher, **self._settings)

    def join(self, role: Role, rank: int = 0, **changes: object) -> bytes:
        peer = f"{role.name.lower()}-{rank}-1".encode()
        about = detail(model="letters", num_blocks=4096, **changes)
        self._say(peer, Hello(1, rank, role), encode_map(about))
        self._say(peer, Heartbeat(1, 0, 0), encode_map(load(4096)))
        return peer

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.application)
        # Unless told so it would read the system's certificates, 20 ms each time, for nothing.
        return httpx.AsyncClient(
            transport=transport, base_url="http://localhost", trust_env=False, verify=False
        )

    async def idle(self) -> None:
        """Wait until no request is open."""
        while self.bus.dispatcher.num_running + self.bus.dispatcher.num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def frames(self, kind: type[Frame]) -> list[Frame]:
        return [message.frame for _, message in self.seen if isinstance(message.frame, kind)]

    def _say(self, peer: bytes, frame: Frame, payload: Buffer = b"") -> None:
        self.bus.on_message(peer, encode(frame, payload))

    def _transmit(self, peer: bytes, parts: list[Buffer]) -> None:
        message = decode(parts)
        self.seen.append((peer, message))
        frame = message.frame
        if isinstance(frame, Cancel):
            self.cancelled.set()
        elif isinstance(frame, PrefillRequest):
            self.asked.set()
            token_ids, options = decode_prompt(message.body(), frame.seq_len)
            self.prompts[frame.request_id] = token_ids
            self.num_top[frame.request_id] = options.logprobs or 0
            self.salts.append(options.cache_salt)
            asyncio.get_running_loop().call_soon(self._prefill, peer, frame.request_id, token_ids)
        elif isinstance(frame, DecodeRequest):
            token_ids, _ = decode_continuation(message.body())
            prompt = self.prompts[frame.request_id]
            asyncio.get_running_loop().call_soon(self._decode, peer, frame, self.answer(prompt), 1)

    def _prefill(self, peer: bytes, request_id: int, prompt: tuple[int, ...]) -> None:
        answer = self.answer(prompt)
        if answer.hangs_after == 0:
            return
        if answer.fails_after == 0:
            self._fail(peer, request_id, answer)
            return
        token_id = answer.token_ids[0] if answer.token_ids else 1
        result = PrefillResult(
            token_id=token_id,
            cached_tokens=min(2, len(prompt)),
            finish_reason=None if answer.token_ids else "stop",
            logprobs=answer.scores(token_id, self.num_top[request_id]),
        )
        self._say(peer, PrefillDone(request_id, 64 * len(prompt)), encode_prefill_result(result))

    def _decode(self, peer: bytes, request: DecodeRequest, answer: Answer, index: int) -> None:
        """One token a turn of the loop, as an engine's steps come."""
        request_id, token_ids = request.request_id, answer.token_ids
        if answer.hangs_after == index:
            return
        if answer.fails_after == index:
            self._fail(peer, request_id, answer)
        elif index > request.max_new_tokens or index >= len(token_ids):
            reason = "length" if index > request.max_new_tokens else answer.finish_reason
            usage = Usage(finish_reason=reason, **answer.usage)
            self._say(peer, DecodeDone(request_id), encode_map(usage))
        else:
            scores = [answer.scores(token_ids[index], self.num_top[request_id])]
            payload = [encode_map(scores)] if answer.logprobs else []
            frame = DecodeToken(request_id, token_ids[index])
            self.bus.on_message(peer, encode(frame, *payload))
            asyncio.get_running_loop().call_soon(self._decode, peer, request, answer, index + 1)

    def _fail(self, peer: bytes, request_id: int, answer: Answer) -> None:
        detail = encode_map(ErrorDetail(message="as the script says"))
        self._say(peer, Error(request_id, answer.error), detail)


def events(body: str) -> list[Any]:
    """The JSON documents of a stream; the last line must be [DONE]."""
    lines = [line for line in body.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@asynccontextmanager
async def listening(app: Application) -> AsyncIterator[tuple[str, int]]:
    """The application on its server, as router.app runs it."""
    async with serving(app, on_slow_client=app.metrics.on_slow_client) as server:
        yield "127.0.0.1", server.port
