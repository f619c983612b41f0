"""Calls of tools that end early or do not parse: every API says so, and takes them back."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from router.api.model import ServedModel
from tests.router.api.messages.stream import message_of, read_events
from tests.router.api.responses.asking import events_of
from tests.router.site import TEMPLATE, Answer, Site, events, ids, write_model
from tests.router.text.texts import answers
from wire.frames import Role

LONG = 60_000
CHAT_TEMPLATE = TEMPLATE.replace(
    "\n{% endfor %}",
    "{% for c in m.tool_calls or () %}{{ c.function.arguments | tojson(indent=1) }}{% endfor %}"
    "\n{% endfor %}{% if tools %}{{ tools | length }}{% endif %}",
    1,
)
PARAMETERS = {"type": "object", "properties": {"unit": {"type": "string"}}}
FUNCTION = {"name": "get", "parameters": PARAMETERS}
TOOLS: dict[str, Any] = {
    "chat": {"type": "function", "function": FUNCTION},
    "responses": {"type": "function", **FUNCTION},
    "messages": {"name": "get", "input_schema": PARAMETERS},
}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
LIMITS = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
STOPS = {"chat": "stop", "responses": "stop", "messages": "stop_sequences"}

# Of each syntax: the family, what stands before the arguments and behind them, and arguments.
OBJECT = ('{"unit": "', "celsius", '"}')
SYNTAXES = {
    "hermes": ("hermes", '<tool_call>\n{"name": "get", "arguments": ', "}\n</tool_call>", OBJECT),
    "llama": ("llama3_json", '{"name": "get", "parameters": ', "}", OBJECT),
    "mistral": ("mistral", '[TOOL_CALLS][{"name": "get", "arguments": ', "}]", OBJECT),
    "mistral_named": ("mistral", "[TOOL_CALLS]get[ARGS]", "", OBJECT),
    "pythonic": ("pythonic", "[get(", ")]", ('unit="', "celsius", '"')),
}
# What is wrong in the arguments: their text in JSON, and in Python.
WRONG = {
    "newline": ('{"unit": "cel\nsius"}', 'unit="cel\nsius"'),
    "comma": ('{"unit": "celsius",}', 'unit=["celsius",,]'),
    "escape": (r'{"unit": "cel\sius"}', r'unit="cel\x"'),
    "nan": ('{"unit": NaN}', "unit=nan"),
    "number": ('{"unit": 1e999}', "unit=1e999"),
    "surrogate": (r'{"unit": "\ud800"}', r'unit="\ud800"'),
    "depth": ('{"unit": ' + "[" * 300 + "]" * 300 + "}", "unit=" + "[" * 300 + "]" * 300),
    "unquoted": ("{unit: 'celsius'}", "unit=celsius + 1"),
    "brace": ('{"unit": ["celsius"}', 'unit=("celsius"'),
}


class Asked(NamedTuple):
    """A request, and the text that the model writes."""

    text: str
    api: str
    fields: dict[str, Any] = {}  # noqa: RUF012
    stop_token: int | None = None


class Heard(NamedTuple):
    """A client's view of an answer: its calls, the finished ones, and the finish reason."""

    arguments: list[Any]
    is_finished: list[bool]
    reason: str
    # What it sends back in the next request, in front of the next message.
    turn: list[dict[str, Any]]
    response_id: str = ""


class Talk:
    """A client of one model that calls tools."""

    def __init__(self, site: Site, client: httpx.AsyncClient) -> None:
        self._site = site
        self._client = client

    async def hear(
        self, asked: Asked, before: Sequence[Any] = (), *, is_streamed: bool = False
    ) -> Heard:
        usage = {} if asked.stop_token is None else {"stop_token_id": asked.stop_token}
        self._site.answer = lambda prompt: Answer(asked.text, usage=usage)
        key = "input" if asked.api == "responses" else "messages"
        body = {
            "model": "letters",
            key: [{"role": "user", "content": "how warm?"}, *before],
            "tools": [TOOLS[asked.api]],
            "stream": is_streamed,
            LIMITS[asked.api]: LONG // 2,
            **asked.fields,
        }
        sent = await self._client.post(PATHS[asked.api], json=body)
        assert sent.status_code == 200, sent.text
        return HEARD[asked.api](sent, is_streamed)

    async def say_back(self, heard: Heard, api: str) -> None:
        """Go on after what was heard, in every way that there is."""
        following = [*heard.turn, {"role": "user", "content": "thanks"}]
        plain = Asked("You are welcome.", api)
        await self.hear(plain, following)
        if heard.response_id:
            fields = {"previous_response_id": heard.response_id}
            await self.hear(plain._replace(fields=fields))


def _of_chat(sent: httpx.Response, is_streamed: bool) -> Heard:
    if is_streamed:
        reason, message = "", {"role": "assistant", "content": ""}
        calls: list[dict[str, Any]] = []
        for chunk in events(sent.text):
            [choice] = chunk["choices"]
            reason = choice["finish_reason"] or reason
            message["content"] += choice["delta"].get("content") or ""
            for delta in choice["delta"].get("tool_calls", ()):
                if delta["index"] == len(calls):
                    calls.append({"id": delta["id"], "type": "function"})
                    calls[-1]["function"] = {"name": delta["function"]["name"], "arguments": ""}
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        said = message | ({"tool_calls": calls} if calls else {})
    else:
        [choice] = sent.json()["choices"]
        reason, said = choice["finish_reason"], choice["message"]
        calls = said.get("tool_calls", [])
    arguments = [call["function"]["arguments"] for call in calls]
    return Heard(arguments, [reason == "tool_calls"] * len(calls), reason, [said])


def _of_responses(sent: httpx.Response, is_streamed: bool) -> Heard:
    response = events_of(sent.content)[-1]["response"] if is_streamed else sent.json()
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    done = [item["status"] == "completed" for item in calls]
    details = response["incomplete_details"] or {}
    reason = " ".join(filter(None, (response["status"], details.get("reason"))))
    assert response["status"] == "incomplete" or all(done)
    if is_streamed:
        assert events_of(sent.content)[-1]["type"] == f"response.{response['status']}"
    arguments = [call["arguments"] for call in calls]
    return Heard(arguments, done, reason, response["output"], response["id"])


def _of_messages(sent: httpx.Response, is_streamed: bool) -> Heard:
    message = message_of(read_events(sent.content)) if is_streamed else sent.json()
    content = message["content"]
    calls = [block for block in content if block["type"] == "tool_use"]
    is_finished = message["stop_reason"] == "tool_use"
    reason = " ".join(filter(None, (message["stop_reason"], message["stop_sequence"])))
    turn = [{"role": "assistant", "content": content or "nothing"}]
    if is_finished:
        results = [{"type": "tool_result", "tool_use_id": call["id"]} for call in calls]
        turn.append({"role": "user", "content": results})
    arguments = [json.dumps(call["input"]) for call in calls]
    return Heard(arguments, [is_finished] * len(calls), reason, turn)


HEARD = {"chat": _of_chat, "responses": _of_responses, "messages": _of_messages}
APIS = pytest.mark.parametrize("api", HEARD)
EVERY_SYNTAX = pytest.mark.parametrize("syntax", SYNTAXES)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    write_model(tmp_path)
    config = {"chat_template": CHAT_TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    site = Site(tmp_path, join=False)
    for role in (Role.PREFILL, Role.DECODE):
        site.join(role, max_model_len=LONG)
    yield site


async def ask(site: Site, path: Path, family: str, asked: Asked) -> Heard:
    """Return what is heard, whole and streamed alike; the conversation goes on after either."""
    site.configure(model=ServedModel("letters", path, tool_calls=family))
    async with site.client() as client:
        talk = Talk(site, client)
        whole, streamed = [await talk.hear(asked, is_streamed=how) for how in (False, True)]
        await talk.say_back(whole, asked.api)
        await talk.say_back(streamed, asked.api)
    assert (streamed.is_finished, streamed.reason) == (whole.is_finished, whole.reason)
    assert streamed.arguments == whole.arguments
    return whole


def api_for(syntax: str, case: int) -> str:
    """An API for this pair, such that each meets every syntax and every case."""
    return [*HEARD][([*SYNTAXES].index(syntax) + case) % len(HEARD)]


ENDS = ["limit", "stop", "bracket", "token", "eos"]


@pytest.mark.parametrize("end", ENDS)
@EVERY_SYNTAX
async def test_a_call_that_is_cut_is_not_finished_and_the_reason_is_what_cut_it(
    site: Site, tmp_path: Path, syntax: str, end: str
) -> None:
    api = api_for(syntax, ENDS.index(end))
    family, before, after, (opening, value, closing) = SYNTAXES[syntax]
    begun = f"{before}{opening}{value[:2]}"
    whole = f"{before}{opening}{value}{closing}{after}"
    bracket = ")" if family == "pythonic" else "}"
    reason = {"chat": "stop", "responses": "incomplete", "messages": "end_turn"}[api]
    match end:
        case "limit":
            reasons = {"chat": "length", "messages": "max_tokens"}
            reason = reasons.get(api, "incomplete max_output_tokens")
            asked = Asked(whole, api, {LIMITS[api]: len(begun)})
        case "stop" | "bracket":
            stop = value[2:5] if end == "stop" else bracket
            reason = f"stop_sequence {stop}" if api == "messages" else reason
            asked = Asked(whole, api, {STOPS[api]: [stop]})
        case "token":
            if api == "messages":
                return  # It has no stop tokens.
            [token_id] = ids(value[2:3])
            asked = Asked(begun, api, {"stop_token_ids": [token_id]}, token_id)
        case "eos":
            asked = Asked(begun, api)
    heard = await ask(site, tmp_path, family, asked)
    assert (heard.is_finished, heard.reason) == ([False], reason)


@pytest.mark.parametrize("wrong", WRONG)
@EVERY_SYNTAX
async def test_a_call_that_does_not_parse_is_not_finished(
    site: Site, tmp_path: Path, syntax: str, wrong: str
) -> None:
    api = api_for(syntax, [*WRONG].index(wrong))
    family, before, after, _ = SYNTAXES[syntax]
    in_json, in_python = WRONG[wrong]
    arguments = in_python if family == "pythonic" else in_json
    heard = await ask(site, tmp_path, family, Asked(before + arguments + after, api))
    reason = {"chat": "stop", "responses": "incomplete", "messages": "end_turn"}[api]
    assert (heard.is_finished, heard.reason) == ([False], reason)


@APIS
@EVERY_SYNTAX
async def test_a_call_that_a_stop_leaves_whole_is_finished(
    site: Site, tmp_path: Path, syntax: str, api: str
) -> None:
    family, before, after, arguments = SYNTAXES[syntax]
    asked = Asked(before + "".join(arguments) + after + "\nso", api, {STOPS[api]: ["\nso"]})
    heard = await ask(site, tmp_path, family, asked)
    assert [json.loads(text) for text in heard.arguments] == [{"unit": "celsius"}]
    assert heard.is_finished == [True]


@APIS
async def test_a_finished_call_beside_one_that_does_not_parse(
    site: Site, tmp_path: Path, api: str
) -> None:
    """Where calls have no status of their own, none counts as finished."""
    _, before, after, arguments = SYNTAXES["hermes"]
    whole, broken = (before + it + after for it in ("".join(arguments), '{"unit": NaN}'))
    for text, statuses in ((whole + broken, [True, False]), (broken + whole, [False, True])):
        heard = await ask(site, tmp_path, "hermes", Asked(text, api))
        assert heard.is_finished == (statuses if api == "responses" else [False, False])


async def test_arguments_of_eager_tools_come_as_they_are_written(
    site: Site, tmp_path: Path
) -> None:
    site.configure(model=ServedModel("letters", tmp_path, tool_calls="hermes"))
    _, before, after, arguments = SYNTAXES["hermes"]
    site.answer = lambda prompt: Answer(before + "".join(arguments) + after)
    deltas = {}
    async with site.client() as client:
        for is_eager in (None, False, True):
            tool = TOOLS["messages"] | {"eager_input_streaming": is_eager}
            body = {"model": "letters", "messages": [{"role": "user", "content": "how warm?"}]}
            fields = {"tools": [tool], "stream": True, "max_tokens": LONG // 2}
            sent = await client.post(PATHS["messages"], json=body | fields)
            deltas[is_eager] = sent.text.count("input_json_delta")
    assert deltas == {None: 1, False: 1, True: len("".join(arguments))}


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral", "pythonic"])
async def test_whatever_is_said_a_finished_call_parses_and_the_conversation_goes_on(
    site: Site, tmp_path: Path, family: str
) -> None:
    chance, num_finished = random.Random(family), 0
    for text in answers(family, chance, 40):
        cut, api = text[: chance.randint(1, len(text) or 1)], chance.choice(list(HEARD))
        stops = {STOPS[api]: [cut[-3:]]} if cut[-3:].strip() and chance.random() < 0.5 else {}
        heard = await ask(site, tmp_path, family, Asked(text if stops else cut, api, stops))
        for arguments, is_finished in zip(heard.arguments, heard.is_finished, strict=True):
            num_finished += is_finished
            assert not is_finished or isinstance(json.loads(arguments), dict), text
    assert num_finished > 3
