"""Raw TCP: serves clients that send the frames of the protocol without HTTP.  SPEC 2.2, 7.

A client chooses the request ids on its connection; each open id maps to a handle of `Dispatcher`.
When a connection closes, its requests are cancelled.  If the router requires API keys, the first
frame must be a HELLO with a key, and once that key is revoked, the next request closes the
connection.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import structlog
from msgspec import structs

from router.core.dispatcher import Dispatcher
from router.core.request import Request, RequestEnd
from router.log import facts, new_traceparent
from wire.aio.tcp import Connection
from wire.errors import ErrorCode, RemoteProtocolError, WireError
from wire.frames import (
    ANY_RANK,
    CLIENT_VERSION,
    NO_RANK,
    Cancel,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Error,
    Hello,
    PrefillDone,
    PrefillRequest,
    Tag,
)
from wire.parts import Message
from wire.payloads import (
    ErrorDetail,
    Logprobs,
    PrefillResult,
    Usage,
    decode_prompt,
    encode_map,
    encode_prefill_result,
)
from wire.process.api_keys import ApiKeys, digest, name_of
from wire.session import Direction, Session, SessionState

log = structlog.get_logger("router")

# Ended requests to remember per connection: frames that the client sent earlier may still arrive.
MAX_ENDED: Final = 1024
# The most bytes that a client may send before its HELLO is accepted.
MAX_HELLO_BYTES: Final = 4096
# `retry_after_s` in errors that a retry may avoid once other requests have ended.
RETRY_AFTER_S: Final = 1.0
RETRYABLE: Final = frozenset(
    {ErrorCode.OVERLOADED, ErrorCode.NO_WORKER, ErrorCode.DRAINING, ErrorCode.OUT_OF_BLOCKS}
)


@dataclass(eq=False, repr=False)
class Client:
    """One client connection: at most `max_requests` open requests, and recently ended ones."""

    connection: Connection
    dispatcher: Dispatcher
    max_requests: int
    api_keys: ApiKeys | None = None
    # Begin a trace for each request whose client has not begun one.
    is_tracing: bool = False
    _has_started: bool = False
    _key_digest: bytes = b""
    _open: dict[int, ClientRequest] = field(default_factory=dict)
    _ended: OrderedDict[int, Session] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        # Replaced by the name of the API key after HELLO.
        self._client_id = self.connection.peer_name.rpartition(":")[0]
        if self.api_keys is not None:
            self.connection.limit_frames(MAX_HELLO_BYTES)

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    def on_message(self, message: Message) -> None:
        """Handle a frame.  The caller closes the connection on any error.

        Raises:
            RemoteProtocolError: The client violated the protocol.
            WireError: UNAUTHORIZED.
        """
        frame = message.frame
        is_first, self._has_started = not self._has_started, True
        if isinstance(frame, Hello):
            if not is_first:
                raise RemoteProtocolError("HELLO is the first frame of a connection, or none")
            self._on_hello(frame, message)
            return
        if not self._key_digest and self.api_keys is not None:
            raise WireError(ErrorCode.UNAUTHORIZED, "say HELLO with an API key first")
        if not isinstance(frame, PrefillRequest | DecodeRequest | Cancel):
            raise RemoteProtocolError(f"a client does not send {frame.tag.name}")
        if isinstance(frame, PrefillRequest):
            self._check_key()
            self._on_prefill_request(frame, message)
        elif isinstance(frame, DecodeRequest):
            self._on_decode_request(frame)
        else:
            self._on_cancel(frame)

    def _on_hello(self, frame: Hello, message: Message) -> None:
        if frame != Hello.of_client():
            raise RemoteProtocolError(
                f"HELLO of a client has epoch 0, rank 0, role 3 and version {CLIENT_VERSION}"
            )
        self._key_digest = digest(bytes(message.body()))
        self._check_key()
        if self.api_keys is not None:
            self._client_id = name_of(self._key_digest)
        self.connection.limit_frames(None)

    def _check_key(self) -> None:
        if self.api_keys is not None and not self.api_keys.allow(self._key_digest):
            raise WireError(ErrorCode.UNAUTHORIZED, "this API key is not valid")

    def on_closed(self, error: Exception | None) -> None:
        """Cancel every open request."""
        requests, self._open = self._open, {}
        for request in requests.values():
            self.dispatcher.cancel(request.handle)

    def end(self, request_id: int) -> None:
        """Remove a request whose last frame is about to be sent, or which the client cancelled."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._ended[request_id] = request.session
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def _on_prefill_request(self, frame: PrefillRequest, message: Message) -> None:
        request_id = frame.request_id
        if request_id in self._open:
            raise RemoteProtocolError(f"request_id {request_id} is under way already")
        self._ended.pop(request_id, None)
        request = ClientRequest(request_id, self.connection, self)
        request.session.on(Tag.PREFILL_REQUEST, Direction.REQUEST)
        self._open[request_id] = request
        try:
            self._submit(frame, message, request)
        except WireError as error:
            if error.code is ErrorCode.PROTOCOL:
                raise
            request.refuse(error)

    def _submit(self, frame: PrefillRequest, message: Message, request: ClientRequest) -> None:
        if len(self._open) > self.max_requests:
            raise WireError(
                ErrorCode.OVERLOADED, f"{self.max_requests} requests are open on this connection"
            )
        if frame.decode_rank not in (ANY_RANK, NO_RANK):
            raise WireError(
                ErrorCode.INVALID_REQUEST,
                f"decode_rank {frame.decode_rank}: the router chooses; send {ANY_RANK:#x} "
                f"(unassigned), or {NO_RANK:#x} (none) for one token only",
            )
        self.dispatcher.check_prompt(frame.seq_len)
        token_ids, options = decode_prompt(message.body(), frame.seq_len)
        max_new_tokens = 0 if frame.decode_rank == NO_RANK else None
        if self.api_keys is not None:
            salt = self.api_keys.cache_salt(self._key_digest, options.cache_salt)
            options = structs.replace(options, cache_salt=salt)
        begins_trace = self.is_tracing and options.traceparent is None
        if begins_trace:
            options = structs.replace(options, traceparent=new_traceparent())
        request.trace_id = options.trace_id
        name = f"tcp-{self.connection.peer_name}-{frame.request_id}"
        core_request = Request(
            *(token_ids, options, max_new_tokens, self._client_id, name), begins_trace=begins_trace
        )
        request.handle = self.dispatcher.submit(core_request, request)

    def _on_decode_request(self, frame: DecodeRequest) -> None:
        """Start decoding; ignore a request that has ended, reject an unknown one."""
        # SPEC 4.5: the prompt and options are from PREFILL_REQUEST; a payload here is ignored.
        request = self._open.get(frame.request_id)
        if request is not None:
            request.session.on(Tag.DECODE_REQUEST, Direction.REQUEST)
            self.dispatcher.decode(request.handle, frame.max_new_tokens)
        elif frame.request_id in self._ended:
            self._ended[frame.request_id].on(Tag.DECODE_REQUEST, Direction.REQUEST)
        else:
            detail = ErrorDetail(message="DECODE_REQUEST without PREFILL_REQUEST", stage="router")
            error = Error(frame.request_id, ErrorCode.UNKNOWN_REQUEST)
            self.connection.send(error, encode_map(detail))

    def _on_cancel(self, frame: Cancel) -> None:
        request = self._open.get(frame.request_id)
        if request is not None:
            request.session.on(Tag.CANCEL, Direction.REQUEST)
            self.end(frame.request_id)
            self.dispatcher.cancel(request.handle)


@dataclass(eq=False, repr=False)
class ClientRequest:
    """One open request: a sink that sends the results as frames with the client's request id."""

    request_id: int
    connection: Connection
    client: Client
    session: Session = field(default_factory=lambda: Session(Direction.RESPONSE))
    handle: int = 0
    trace_id: str | None = None

    def refuse(self, error: WireError) -> None:
        """Log and reject a request that was not accepted; `on_end` logs accepted ones."""
        self._log(error.code.label)
        self.on_error(error)

    def on_prefill(self, result: PrefillResult, kv_bytes: int) -> None:
        self.session.on(Tag.PREFILL_DONE, Direction.RESPONSE)
        frame = PrefillDone(self.request_id, kv_bytes)
        # These two fields are for the bus only (versions 2 and 3).
        result = structs.replace(result, stop_token_id=None, timeline=None)
        self.connection.send(frame, encode_prefill_result(result))

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        if self.session.state is not SessionState.DECODING:  # else the state is already DECODING
            self.session.on(Tag.DECODE_TOKEN, Direction.RESPONSE)
        if logprobs is None:
            self.connection.send_token(self.request_id, token_id)
        else:
            frame = DecodeToken(self.request_id, token_id)
            self.connection.send(frame, encode_map([logprobs]))

    def on_done(self, usage: Usage) -> None:
        self.session.on(Tag.DECODE_DONE, Direction.RESPONSE)
        self.client.end(self.request_id)
        # These three fields are for the bus only (versions 2 and 3).
        usage = structs.replace(usage, stop_token_id=None, stop_logprobs=None, timeline=None)
        self.connection.send(DecodeDone(self.request_id), encode_map(usage))

    def on_error(self, error: WireError) -> None:
        self.session.on(Tag.ERROR, Direction.RESPONSE)
        self.client.end(self.request_id)
        detail = ErrorDetail(
            message=error.message[:4096],
            retry_after_s=RETRY_AFTER_S if error.code in RETRYABLE else None,
        )
        self.connection.send(Error(self.request_id, error.code), encode_map(detail))

    def on_end(self, end: RequestEnd) -> None:
        self._log(end.outcome, **facts([end]), total_s=round(end.total_s, 6))

    def _log(self, outcome: str, **fields: float) -> None:
        tags = {} if self.trace_id is None else {"trace_id": self.trace_id}
        log.info(
            "request",
            face="tcp",
            client=self.connection.peer_name,
            request_id=self.request_id,
            outcome=outcome,
            **fields,
            **tags,
        )
