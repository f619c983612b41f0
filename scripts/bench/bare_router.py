#!/usr/bin/env python3
"""A router that only forwards, as a lower bound for the time to first token.

    scripts/bench_router.py --rows ttft      # measures it alternately with the real router

It forwards the same requests (streamed completions of token ids) to the same two workers and writes
chunks of the same format.  It does not check, count, limit, retry, cancel or log anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any, cast

import tokenizers
import uvloop
import zmq

from wire.frames import (
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    PrefillDone,
    PrefillRequest,
    Role,
    Tag,
)
from wire.options import Options
from wire.parts import Buffer, encode
from wire.payloads import decode_prefill_result, encode_continuation, encode_prompt
from wire.process.model import locate

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BEFORE = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"demo","choices":[{"index":0,"text":"'
)
AFTER = b'","logprobs":null,"finish_reason":null}]}\n\n'
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Bus:
    """The connection to both workers, over one ZeroMQ socket."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        ids = range(tokenizer.get_vocab_size())
        self.texts = [json.dumps(tokenizer.decode([index]))[1:-1].encode() for index in ids]
        self.workers: dict[Role, bytes] = {}
        self._clients: dict[int, tuple[asyncio.Transport, dict[str, Any]]] = {}
        self._num_requests = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.url = f"tcp://127.0.0.1:{port}"
        asyncio.get_running_loop().add_reader(self._socket.getsockopt(zmq.FD), self.read)

    def submit(self, client: asyncio.Transport, body: dict[str, Any]) -> None:
        self._num_requests += 1
        self._clients[self._num_requests] = client, body
        options = Options(seed=body["seed"], ignore_eos=True, max_tokens=body["max_tokens"])
        frame = PrefillRequest(self._num_requests, len(body["prompt"]), 0)
        self._send(Role.PREFILL, encode(frame, encode_prompt(body["prompt"], options)))

    def read(self) -> None:
        """Forward all messages that the workers have sent."""
        while True:
            try:
                worker, tag, header, *payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            match int.from_bytes(tag, "little"):
                case Tag.DECODE_TOKEN:
                    for request_id, token_id in DecodeToken.layout.iter_unpack(header):
                        self._clients[request_id][0].write(self._chunk(token_id))
                case Tag.PREFILL_DONE:
                    request_id, _ = PrefillDone.layout.unpack(header)
                    self._go_on(request_id, b"".join(payload))
                case Tag.DECODE_DONE:
                    self._clients.pop(*DecodeDone.layout.unpack(header)[:1])[0].write(END)
                case _:
                    self.workers[Role.PREFILL if worker[:1] == b"p" else Role.DECODE] = worker

    def _go_on(self, request_id: int, payload: bytes) -> None:
        client, body = self._clients[request_id]
        first = decode_prefill_result(payload).token_id
        client.write(HEAD + self._chunk(first))
        frame = DecodeRequest(request_id, body["max_tokens"] - 1)
        options = Options(seed=body["seed"], ignore_eos=True)
        told = encode_continuation([*body["prompt"], first], options)
        self._send(Role.DECODE, encode(frame, told))

    def _chunk(self, token_id: int) -> bytes:
        event = BEFORE + self.texts[token_id] + AFTER
        return b"%x\r\n%b\r\n" % (len(event), event)

    def _send(self, role: Role, parts: list[Buffer]) -> None:
        self._socket.send_multipart([self.workers[role], *parts])
        self.read()  # sending may consume the notification of messages received meanwhile


class Client(asyncio.Protocol):
    """One client connection, on which each read returns one whole request."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        if head.startswith(b"POST"):
            self._bus.submit(self._transport, json.loads(body))
            return
        status = b"200 OK" if len(self._bus.workers) == 2 else b"503 Not yet"
        self._transport.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ready-file", type=Path, required=True)
    given = parser.parse_args()
    bus = Bus(tokenizers.Tokenizer.from_file(str(locate("demo") / "tokenizer.json")))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(bus), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    given.ready_file.write_text(json.dumps({"http": f"http://{host}:{port}", "bus": bus.url}))
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
