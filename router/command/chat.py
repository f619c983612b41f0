"""`baton chat`: a conversation with the model of a running router, in the terminal.

Each line is a message; the answer is streamed.  A model without a chat template continues each line
instead, and remembers nothing.  Lines may also come from a pipe: echo hi | baton chat.

Ctrl-C ends an answer, which the router then cancels; at the prompt it ends the conversation, as
Ctrl-D does.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from router.command.client import TIMEOUT_S, Client, RequestError
from router.command.operator import client_parser, connect
from router.command.terminal import Failure, printable, say

PROMPT: Final = "> "
DIM: Final = "\x1b[2m"
PLAIN: Final = "\x1b[0m"


class Conversation:
    """The messages so far, or none for a model without a chat template.

    `options` are fields of all requests, such as `max_tokens`.  `is_cut` says whether the last
    answer ended at its limit of tokens.
    """

    def __init__(self, client: Client, options: dict[str, Any], *, system: str = "") -> None:
        self._client = client
        self._options = options
        self.is_chat = self._has_template()
        self.is_cut = False
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Generator[tuple[str, bool]]:
        """Yield the parts of the answer, each with whether it is reasoning.

        The answer becomes part of the conversation, even if the iterator is closed early or fails.

        Raises:
            RequestError: There is no answer, or no whole one.
        """
        if not self.is_chat:
            yield from self._parts("/v1/completions", {"prompt": text})
            return
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for part, is_reasoning in self._parts(
                "/v1/chat/completions", {"messages": self.messages}
            ):
                answer += "" if is_reasoning else part
                yield part, is_reasoning
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:  # two messages of the user in a row are refused by many templates
                self.messages.pop()

    def _parts(self, path: str, body: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        with closing(self._client.stream(path, {**body, **self._options})) as events:
            for choice in (each for event in events for each in event.get("choices", ())):
                delta = choice.get("delta", choice)
                if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                    yield reasoning, True
                if content := delta.get("content") or delta.get("text"):
                    yield content, False
                self.is_cut = choice.get("finish_reason") == "length"

    def _has_template(self) -> bool:
        """Whether the model can chat: its router can write a conversation as a prompt."""
        try:
            self._client.call("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
        except RequestError as error:
            if error.status != 400:
                raise
            return False
        return True


def run(argv: Sequence[str]) -> int:
    """Talk until the end of the input; return 1 if a request failed on the way, else 0.

    Raises:
        RequestError: The first request failed.
    """
    parser = client_parser("chat", __doc__)
    parser.add_argument("--model", help="a model's name, if the router is to check it")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, metavar="X", help="0: always the same answer")
    given = parser.parse_args(argv)
    options = {"max_tokens": given.max_tokens, "temperature": given.temperature}
    client = connect(given, TIMEOUT_S)
    models = [each["id"] for each in client.call("/v1/models")["data"]]
    model = given.model or models[0]
    if model not in models:
        raise Failure(f"--model: the router serves {' and '.join(models)}, not {model}")
    named = {name: value for name, value in options.items() if value is not None}
    conversation = Conversation(client, {"model": model, **named}, system=given.system)
    if given.system and not conversation.is_chat:
        raise Failure(f"--system: {model} has no chat template, so it only continues text")
    if sys.stdin.isatty():
        does = "Talk to" if conversation.is_chat else "Each line is continued by"
        say(f"{does} {model}.  Ctrl-C stops an answer, Ctrl-D ends.")
    return _converse(conversation)


def _converse(conversation: Conversation) -> int:
    status = 0
    with suppress(KeyboardInterrupt):
        for line in _lines():
            try:
                _print_answer(conversation, line)
            except RequestError as error:
                status = 1
                sys.stderr.write(f"baton chat: {printable(str(error))}\n")
    return status


def _lines() -> Iterator[str]:
    """Yield the lines of stdin that are not empty; on a terminal, they can be edited."""
    if not sys.stdin.isatty():
        lines = (line.decode(errors="replace").strip() for line in sys.stdin.buffer)
        yield from filter(None, lines)
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it for its keys and its history
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            say()
            return
        if line:
            yield line


def _print_answer(conversation: Conversation, line: str) -> None:
    """Print the answer as it comes.  Ctrl-C ends it; then it is not complete, but remembered."""
    was_reasoning = False
    is_terminal = sys.stdout.isatty()
    with closing(conversation.ask(line)) as parts:
        try:
            for text, is_reasoning in parts:
                if is_terminal and is_reasoning != was_reasoning:
                    say(DIM if is_reasoning else PLAIN + "\n", end="")
                was_reasoning = is_reasoning
                if is_terminal or not is_reasoning:
                    say(printable(text), end="")
        except KeyboardInterrupt:
            say(" ...", end="")
        finally:
            say(PLAIN if is_terminal and was_reasoning else "")
    if is_terminal and conversation.is_chat and conversation.is_cut:
        say(f"{DIM}(The answer ends at its limit of tokens.){PLAIN}")
