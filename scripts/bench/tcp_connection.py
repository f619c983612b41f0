"""A raw TCP connection for load generators."""

from __future__ import annotations

import asyncio

from router.command.bench.connection import Connection
from wire.frames import (
    ANY_RANK,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    PrefillDone,
    PrefillRequest,
    Tag,
)
from wire.options import Options
from wire.payloads import decode_prefill_result, encode_prompt
from wire.stream import PREFIX, StreamDecoder, encode


class TcpConnection(Connection):
    """A raw TCP connection."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = StreamDecoder()

    def complete(self, prompt: list[int], num_tokens: int, seed: int) -> asyncio.Future[None]:
        payload = encode_prompt(prompt, Options(seed=seed, ignore_eos=True))
        parts = encode(PrefillRequest(1, len(prompt), ANY_RANK), payload)
        return self.send(b"".join([*parts, *encode(DecodeRequest(1, num_tokens - 1))]))

    def token_ids(self) -> list[int]:
        """Return the tokens of a response.

        Raises:
            ConnectionError: The response contains an error.
        """
        for chunk in self.chunks:
            self._decoder.receive(chunk)
        token_ids = list[int]()
        while (message := self._decoder.next_message()) is not None:
            match message.frame:
                case PrefillDone():
                    token_ids.append(decode_prefill_result(message.body()).token_id)
                case DecodeToken(token_id=token_id):
                    token_ids.append(token_id)
                case DecodeDone():
                    pass
                case other:
                    raise ConnectionError(f"{other}: {bytes(message.body())!r}")
        return token_ids

    def has_token(self, data: bytes) -> bool:
        return True

    def is_end(self, data: bytes) -> bool:
        return PREFIX.pack(Tag.DECODE_DONE, 0)[:4] in data[-200:] and b"length" in data[-200:]

    def num_tokens(self) -> int:
        return sum(map(len, self.chunks)) // 24


async def open_tcp(host: str, port: int) -> TcpConnection:
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(TcpConnection, host, port))[1]
