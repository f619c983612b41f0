"""`baton demo` takes one minute: a real cluster, a story over HTTP, questions over raw TCP.

Starts one router, two prefill and two decode workers on free loopback ports.  Streams a story from
the demo model over the OpenAI API, sends questions about another story over raw TCP, prints the
cost of each request, and stops all processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from router.command.client import Client
from router.command.operator import new_parser
from router.command.progress import Progress
from router.command.terminal import Failure, StatusLine, printable, say
from wire.errors import ErrorCode
from wire.frames import ANY_RANK, DecodeRequest, PrefillRequest, Tag
from wire.options import Options
from wire.payloads import (
    Usage,
    decode_map,
    decode_prefill_result,
    encode_continuation,
    encode_prompt,
)
from wire.process.children import same_release
from wire.stream import StreamDecoder, encode

WISH: Final = "Tell me a story about Mia and a lantern."
# Like the stories that the demo model was trained on, with names that were in none of them.
STORY: Final = (
    "There once was a quiet boy named Pete. One day, Pete lived by the gate. Later, Pete loved to "
    "eat melon. Pete had a pet mouse. Pete bought a bowl. On the road, Pete met a gentle boy named "
    "Eli. Eli lived in the cellar. Eli had a pet mouse. The birds sang in the trees. After lunch, "
    "Eli made a spoon. The spoon was pink. Eli gave Pete a big hug. Pete put the bowl in the "
    "attic. Eli left the spoon in the attic. Pete had never seen such a fine day. In the end, Pete "
    "and Eli went home together."
)
# Questions, and the word that a right answer has.
QUESTIONS: Final = (
    ("What pet did Eli have?", "mouse"),
    ("What did Pete love to eat?", "melon"),
)
# A first start compiles the kernels, in four workers at once.
START_S: Final = 300.0


ROW: Final = "{:<25} {:>7} {:>7} {:>9} {:>14} {:>8} {:>9}"
HEADING: Final = ROW.format(
    "request", "prompt", "cached", "KV bytes", "transfer GB/s", "TTFT ms", "tokens/s"
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
                [*command, "--ready-file", str(ready)],
                env=same_release(os.environ),
                stderr=output,
                stdout=output,
            )
        try:
            yield wait_until_ready(router, ready, log)
        except BaseException:
            sys.stderr.write(log.read_text()[-4000:])
            raise
        finally:
            workers = children(router.pid)
            router.send_signal(signal.SIGTERM)
            status = router.wait(60)
            left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
            say(f"\nStopped: router exit status {status}, {len(left)} processes left.")


def children(pid: int) -> list[int]:
    """Return the ids of the child processes of `pid`; an empty list on systems without /proc."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [*map(int, path.read_text().split())] if path.exists() else []


def wait_until_ready(router: subprocess.Popen[bytes], ready: Path, log: Path) -> dict[str, str]:
    """Return the endpoints once every worker has joined; on a terminal, show the progress."""
    start = time.monotonic()
    progress, status = Progress(start), StatusLine(sys.stderr)
    with log.open() as lines:
        while (now := time.monotonic()) < start + START_S:
            for line in lines:
                progress.on_line(line, now)
            if sys.stderr.isatty():
                status.show(progress.status(now))
            if router.poll() is not None:
                raise Failure(f"the router exited with status {router.returncode}")
            if ready.exists():
                endpoints: dict[str, str] = json.loads(ready.read_text())
                workers = Client(endpoints["http"]).call("/v1/cluster")["workers"]
                if sum(worker["state"] == "ready" for worker in workers) == 4:
                    status.show("")
                    return endpoints
            time.sleep(0.05)
    raise Failure(f"the cluster was not ready within {START_S:.0f} s")


def story_over_http(url: str, user: str) -> str:
    """Stream a chat completion, printing tokens as they arrive; return a row of the table."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": user}],
        "temperature": 0.7,
        "seed": 7,
        "max_tokens": 200,
        "stream_options": {"include_usage": True},
        "baton_usage": True,
    }
    start = time.perf_counter()
    times: list[float] = []
    usage: dict[str, Any] = {}
    for chunk in Client(url).stream("/v1/chat/completions", body):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            times.append(time.perf_counter())
            say(printable(choice["delta"].get("content") or ""), end="")
    say()
    kv = usage["baton"]["kv_transfer"]
    return ROW.format(
        "story (HTTP)",
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        kv["bytes"],
        gb_per_s(kv["bytes"], kv["transfer_seconds"]),
        *latencies(start, times, usage["completion_tokens"]),
    )


def question_over_tcp(endpoints: dict[str, str], user: str, name: str) -> tuple[str, str]:
    """Send a question over raw TCP, as frames of SPEC 4 with token ids; return text and row."""
    router = Client(endpoints["http"])
    message = {"role": "user", "content": user}
    ids = router.call("/tokenize", {"messages": [message]})["tokens"]
    host, _, port = endpoints["tcp"].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        start = time.perf_counter()
        prefill = PrefillRequest(1, len(ids), ANY_RANK)
        connection.sendall(b"".join(encode(prefill, encode_prompt(ids, Options()))))
        # Pipelined: there is no need to wait for PREFILL_DONE before sending DECODE_REQUEST.
        decode = encode(DecodeRequest(1, 24), encode_continuation([], Options()))
        connection.sendall(b"".join(decode))
        tokens, times, cached, usage = answer(connection)
    text = router.call("/detokenize", {"tokens": tokens})["prompt"]
    gb_s = gb_per_s(usage.kv_bytes, usage.kv_transfer_seconds)
    timed = latencies(start, times, len(tokens))
    return text, ROW.format(name, len(ids), cached, usage.kv_bytes, gb_s, *timed)


def answer(connection: socket.socket) -> tuple[list[int], list[float], int, Usage]:
    """Read frames until the request ends; return tokens, times, cached tokens and usage."""
    decoder = StreamDecoder()
    tokens: list[int] = []
    times: list[float] = []
    cached = 0
    while chunk := connection.recv(1 << 16):
        decoder.receive(chunk)
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
                    raise Failure(f"the router answered {code.label}")
    raise Failure("the router closed the connection before the end of the answer")


def gb_per_s(num_bytes: int, seconds: float) -> str:
    """Format the rate of a transfer, "-" if there was none."""
    return f"{num_bytes / seconds / 1e9:.2f}" if seconds else "-"


def latencies(start: float, times: list[float], num_tokens: int) -> tuple[str, str]:
    """Format the TTFT in ms, and the rate of the tokens after the first per second."""
    seconds = times[-1] - times[0]
    rate = (num_tokens - 1) / seconds if seconds > 0 else 0.0
    return f"{1000 * (times[0] - start):.1f}", f"{rate:.0f}"


def run(argv: Sequence[str]) -> int:
    """Run the demo and return 0.  Raises Failure if the cluster fails."""
    new_parser("demo", __doc__).parse_args(argv)
    say("Starting 1 router, 2 prefill and 2 decode workers ...")
    with cluster() as endpoints:
        say(f"\n[HTTP, streaming] {WISH}\n")
        rows = [story_over_http(endpoints["http"], WISH)]
        say(f"\n[raw TCP] {STORY}")
        for number, (question, word) in enumerate(QUESTIONS, 1):
            user = f"{STORY}\n{question}"
            answer, row = question_over_tcp(endpoints, user, f"question {number} (raw TCP)")
            rows.append(row)
            say(f"\n    {question}\n    {answer}   (right: {word})")
        say("\n".join(["", HEADING, *rows]))
    say("To try it in a browser: .venv/bin/baton serve, then open http://127.0.0.1:8000/")
    return 0
