"""A demo that takes one minute: a real cluster, a story over HTTP, questions over raw TCP.

Starts one router, two prefill and two decode workers on free loopback ports.  Streams a story from
the demo model over the OpenAI API, sends questions about another story over raw TCP, prints the
cost of each request, and stops all processes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.bench.tables import Table  # noqa: E402
from scripts.models.stories import make_story, pick_questions  # noqa: E402
from wire.errors import ErrorCode  # noqa: E402
from wire.frames import ANY_RANK, DecodeRequest, PrefillRequest, Tag  # noqa: E402
from wire.options import Options  # noqa: E402
from wire.payloads import (  # noqa: E402
    Usage,
    decode_map,
    decode_prefill_result,
    encode_continuation,
    encode_prompt,
)
from wire.stream import StreamDecoder, encode  # noqa: E402

START_S = 120.0


@dataclass
class Row:
    """The cost of one request: a row of the printed table."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    kv_bytes: int
    kv_seconds: float
    ttft_s: float
    tokens_per_s: float

    def cells(self) -> list[str | float]:
        rate = self.kv_bytes / self.kv_seconds / 1e9 if self.kv_seconds else "-"
        counts = [self.prompt_tokens, self.cached_tokens, self.kv_bytes]
        return [self.name, *counts, rate, 1000 * self.ttft_s, self.tokens_per_s]


COLUMNS = (
    *("request:<25", "prompt:>7", "cached:>7", "KV bytes:>9"),
    *("transfer GB/s:>14.2f", "TTFT ms:>8.1f", "tokens/s:>9.0f"),
)


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Start the router and its workers, yield the endpoints, and stop all; print if any is left."""
    with tempfile.TemporaryDirectory() as directory:
        ready, log = Path(directory, "ready.json"), Path(directory, "log")
        command = [sys.executable, "-m", "router", "--model", "demo", "--local", "2,2"]
        command += ["--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--bus", "tcp://127.0.0.1:0"]
        with log.open("wb") as output:
            router = subprocess.Popen(
                [*command, "--ready-file", str(ready)], cwd=ROOT, stderr=output, stdout=output
            )
        try:
            yield wait_until_ready(router, ready)
        except BaseException:
            sys.stderr.write(log.read_text()[-4000:])
            raise
        finally:
            workers = children(router.pid)
            router.send_signal(signal.SIGTERM)
            status = router.wait(60)
            left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
            print(f"\nStopped: router exit status {status}, {len(left)} processes left.")


def children(pid: int) -> list[int]:
    """Return the ids of the child processes of `pid`; an empty list on systems without /proc."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def wait_until_ready(router: subprocess.Popen[bytes], ready: Path) -> dict[str, str]:
    """Return the endpoints once every worker has joined."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if router.poll() is not None:
            raise RuntimeError(f"the router exited with status {router.returncode}")
        if ready.exists() and (text := ready.read_text()):
            endpoints: dict[str, str] = json.loads(text)
            workers = call(endpoints["http"], "/v1/cluster")["workers"]
            if sum(worker["state"] == "ready" for worker in workers) == 4:
                return endpoints
        time.sleep(0.05)
    raise TimeoutError(f"the cluster was not ready within {START_S:.0f} s")


def call(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a JSON request to the router and return the JSON response."""
    request = Request(url + path, headers={"content-type": "application/json"})
    if body is not None:
        request.data = json.dumps(body).encode()
    with urlopen(request, timeout=30) as response:
        return json.load(response)


def story_over_http(url: str, user: str) -> Row:
    """Stream a chat completion, printing tokens as they arrive."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": user}],
        "temperature": 0.7,
        "seed": 7,
        "max_tokens": 200,
        "stream": True,
        "stream_options": {"include_usage": True},
        "baton_usage": True,
    }
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    start = time.perf_counter()
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    times: list[float] = []
    usage: dict[str, Any] = {}
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            times.append(time.perf_counter())
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()
    connection.close()
    return Row(
        "story (HTTP)",
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["baton"]["kv_transfer"]["bytes"],
        usage["baton"]["kv_transfer"]["transfer_seconds"],
        times[0] - start,
        rate(usage["completion_tokens"], times),
    )


def question_over_tcp(endpoints: dict[str, str], user: str, name: str) -> tuple[str, Row]:
    """Send a question over raw TCP, as frames of SPEC 4 with token ids, and return the text."""
    url = endpoints["http"]
    message = {"role": "user", "content": user}
    ids = call(url, "/tokenize", {"messages": [message]})["tokens"]
    host, _, port = endpoints["tcp"].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        start = time.perf_counter()
        prefill = PrefillRequest(1, len(ids), ANY_RANK)
        connection.sendall(b"".join(encode(prefill, encode_prompt(ids, Options()))))
        # Pipelined: there is no need to wait for PREFILL_DONE before sending DECODE_REQUEST.
        decode = encode(DecodeRequest(1, 24), encode_continuation([], Options()))
        connection.sendall(b"".join(decode))
        tokens, times, cached, usage = answer(connection)
    text = call(url, "/detokenize", {"tokens": tokens})["prompt"]
    row = Row(
        name,
        len(ids),
        cached,
        usage.kv_bytes,
        usage.kv_transfer_seconds,
        times[0] - start,
        rate(len(tokens), times),
    )
    return text, row


def answer(connection: socket.socket) -> tuple[list[int], list[float], int, Usage]:
    """Read frames until the request ends; return tokens, times, cached tokens and usage."""
    decoder = StreamDecoder()
    tokens: list[int] = []
    times: list[float] = []
    cached = 0
    while True:
        decoder.receive(connection.recv(1 << 16))
        while (message := decoder.next_message()) is not None:
            times.append(time.perf_counter())
            match message.tag:
                case Tag.PREFILL_DONE:
                    result = decode_prefill_result(message.body())
                    cached = result.cached_tokens
                    if result.finish_reason != "stop":
                        tokens.append(result.token_id)
                case Tag.DECODE_TOKEN:
                    tokens.append(message.frame.token_id)  # type: ignore[attr-defined]
                case Tag.DECODE_DONE:
                    return tokens, times, cached, decode_map(Usage, message.body())
                case Tag.ERROR:
                    code = ErrorCode(message.frame.code)  # type: ignore[attr-defined]
                    raise RuntimeError(f"the router answered {code.label}")


def rate(num_tokens: int, times: list[float]) -> float:
    """Return the rate of the tokens after the first, in tokens per second."""
    seconds = times[-1] - times[0]
    return (num_tokens - 1) / seconds if seconds > 0 else 0.0


def main() -> int:
    argparse.ArgumentParser(
        prog="scripts/demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    print("Starting 1 router, 2 prefill and 2 decode workers ...", flush=True)
    random = Random(1)
    story = make_story(random, "held_out")  # no similar story was in the training data
    questions = pick_questions(random, [story], 2)
    with cluster() as endpoints:
        wish = "Tell me a story about Mia and a lantern."
        print(f"\n[HTTP, streaming] {wish}\n")
        rows = [story_over_http(endpoints["http"], wish)]
        print(f"\n[raw TCP] {story.text}")
        for number, question in enumerate(questions, 1):
            user = f"{story.text}\n{question.text}"
            answer, row = question_over_tcp(endpoints, user, f"question {number} (raw TCP)")
            rows.append(row)
            print(f"\n    {question.text}\n    {answer}   (right: {question.word})")
        print()
        table = Table(*COLUMNS)
        for row in rows:
            table.row(*row.cells())
    return 0


if __name__ == "__main__":
    sys.exit(main())
