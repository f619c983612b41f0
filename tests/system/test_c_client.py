"""The C client against a listening socket that answers from a script: the frames it sends, what it
prints, how it ends.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import ROOT, START_S, Cluster
from tests.oracle import hash_oracle
from wire.errors import ErrorCode
from wire.frames import (
    ANY_RANK,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Error,
    Frame,
    PrefillDone,
    PrefillRequest,
)
from wire.options import Options
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
from wire.stream import StreamDecoder, encode

SOURCE = ROOT / "scripts" / "examples" / "client.c"
CC = shutil.which("cc")
FLAGS = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-D_POSIX_C_SOURCE=200809L"]
pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler")
USAGE = encode_map(Usage(finish_reason="length", completion_tokens=3))
Answer = tuple[Frame, bytes]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("c") / "client"
    assert CC is not None
    subprocess.run([CC, *FLAGS, "-o", program, SOURCE], check=True)
    return program


def receive(connection: socket.socket, count: int) -> list[Message]:
    """The first `count` messages of the client."""
    decoder = StreamDecoder()
    messages: list[Message] = []
    while len(messages) < count and (chunk := connection.recv(65536)):
        decoder.receive(chunk)
        while (message := decoder.next_message()) is not None:
            messages.append(message)
    return messages


@contextmanager
def router(
    answers: list[Answer], *, chunk_bytes: int = 1 << 20
) -> Iterator[tuple[int, list[Message]]]:
    """Answer one connection after its two frames; give the port and, later, what came."""
    received: list[Message] = []
    octets = b"".join(b"".join(encode(frame, payload)) for frame, payload in answers)

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received.extend(receive(connection, 2))
            for start in range(0, len(octets), chunk_bytes):
                connection.sendall(octets[start : start + chunk_bytes])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield listener.getsockname()[1], received
        thread.join()


def run(client: Path, port: int, *args: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [client, "127.0.0.1", str(port), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def first(token_id: int, finish_reason: str | None = None, top: int = 0) -> Answer:
    logprobs = Logprobs(logprob=-1.0, top=((1, -1.0),) * top) if top else None
    result = PrefillResult(token_id=token_id, finish_reason=finish_reason, logprobs=logprobs)
    return PrefillDone(1, 96), encode_prefill_result(result)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_a_completion(client: Path, chunk_bytes: int) -> None:
    answers: list[Answer] = [
        first(17, top=40),
        (DecodeToken(1, 2**31), b""),
        (DecodeToken(1, 4), encode_map([Logprobs(logprob=-0.5)])),
        (DecodeDone(1), USAGE),
    ]
    with router(answers, chunk_bytes=chunk_bytes) as (port, received):
        done = run(client, port, 3, 11, 12, 4294967295)
    assert (done.returncode, done.stdout, done.stderr) == (0, "17\n2147483648\n4\n", "")
    prompt, decode = received
    assert prompt.frame == PrefillRequest(1, 3, ANY_RANK)
    token_ids, _ = decode_prompt(prompt.body(), 3)
    assert token_ids == (11, 12, 4294967295)
    assert decode.frame == DecodeRequest(1, 2) and decode.payload == ()


@pytest.mark.parametrize("tokens_before", [0, 1])
def test_an_error_exits_1_with_its_code(client: Path, tokens_before: int) -> None:
    detail = encode_map(ErrorDetail(message="too large", stage="router"))
    answers: list[Answer] = [(Error(1, ErrorCode.KV_TRANSFER_TOO_LARGE), detail)]
    with router([first(17)] * tokens_before + answers) as (port, _):
        done = run(client, port, 3, 11)
    assert (done.returncode, done.stdout, done.stderr) == (1, "17\n" * tokens_before, "error 6\n")


def test_a_stream_without_an_end_is_no_success(client: Path) -> None:
    with router([first(17), (DecodeToken(1, 4), b"")]) as (port, _):
        done = run(client, port, 3, 11)
    assert (done.returncode, done.stdout) == (2, "17\n4\n")
    assert "closed" in done.stderr


def test_nobody_there_and_nothing_asked(client: Path) -> None:
    with socket.socket() as taken:  # nobody else is to get the port and listen
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert run(client, port, 3, 11).returncode == 2
    assert "usage" in run(client, port, 3).stderr


def test_a_completion_of_a_real_cluster(client: Path, hash_cluster: Cluster) -> None:
    """The C client prints the tokens that the oracle gives."""
    host, port = hash_cluster.tcp
    prompt = [11, 22, 33, 44]
    command = [str(client), host, str(port), "12", *map(str, prompt)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert result.returncode == 0, result.stderr
    printed = [int(line) for line in result.stdout.split()]
    assert printed == hash_oracle(prompt, 12, Options())
