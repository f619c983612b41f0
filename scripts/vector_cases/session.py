"""Sessions of a client and the router, and how each ends."""

from __future__ import annotations

from typing import Any

from wire.session import Direction


def sessions() -> list[dict[str, Any]]:
    ask, answer = Direction.REQUEST.value, Direction.RESPONSE.value
    prefill, done = [ask, "PREFILL_REQUEST"], [answer, "PREFILL_DONE"]
    decode, token = [ask, "DECODE_REQUEST"], [answer, "DECODE_TOKEN"]
    end, error, cancel = [answer, "DECODE_DONE"], [answer, "ERROR"], [ask, "CANCEL"]
    cases: list[tuple[str, list[list[str]], str]] = [
        ("one by one", [prefill, done, decode, token, token, end], "done"),
        ("pipelined", [prefill, decode, done, token, end], "done"),
        ("the first token is the last", [prefill, done, end], "done"),
        ("the first token is the last, pipelined", [prefill, decode, done, end], "done"),
        ("no token after the first", [prefill, done, decode, end], "done"),
        ("refused", [prefill, error], "failed"),
        ("refused, pipelined", [prefill, error, decode], "failed"),
        ("broken while decoding", [prefill, done, decode, token, error], "failed"),
        ("cancelled while prefilling", [prefill, cancel, done], "cancelled"),
        ("cancelled, tokens cross", [prefill, decode, done, cancel, token, end], "cancelled"),
        ("a cancel crosses the end", [prefill, done, decode, end, cancel], "done"),
        ("still going", [prefill, decode, done, token], "decoding"),
        ("nothing was asked", [token], "error"),
        ("tokens before the prompt is read", [prefill, decode, token], "error"),
        ("decode asked twice", [prefill, decode, decode], "error"),
        ("prompt sent twice", [prefill, prefill], "error"),
        ("a token after the end", [prefill, done, decode, end, token], "error"),
        ("two ends", [prefill, done, decode, end, end], "error"),
        ("an error after the end", [prefill, done, decode, end, error], "error"),
        ("a token after an error", [prefill, decode, done, error, token], "error"),
    ]
    return [{"name": name, "events": events, "ends": ends} for name, events, ends in cases]
