"""Request bodies: what is accepted, what is refused, and that the refusal names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.asgi import HttpError
from router.http.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    flat_messages,
    invalid,
    parse,
)
from wire.options import Options

CHAT = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"prompt": "hi"} | fields).encode())


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": CHAT} | fields).encode())


def refusal(kind: Any, **fields: Any) -> HttpError:
    base = {"prompt": "hi"} if kind is CompletionBody else {"messages": CHAT}
    with pytest.raises(HttpError) as caught:
        parse(kind, json.dumps(base | fields).encode())
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_openais() -> None:
    options = completion().options(choice=0, seed=5, max_tokens=16)
    assert completion().token_limit == 16
    assert chat().token_limit is None
    assert (options.temperature, options.top_p, options.seed) == (1.0, 1.0, 5)
    assert completion(max_tokens=3).token_limit == 3
    assert chat(max_tokens=3).token_limit == 3
    assert chat(max_tokens=3, max_completion_tokens=4).token_limit == 4


def test_everything_reaches_the_options() -> None:
    body = completion(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5, 6],
        priority=-3,
        logprobs=2,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={"5": -100, "77": 1.5},
    )
    options = body.options(choice=3, seed=0, max_tokens=9)
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 7, 0.1)
    assert (options.seed, options.choice) == (2**63 - 1, 3)
    assert (options.max_tokens, options.min_tokens, options.ignore_eos) == (9, 2, True)
    assert (options.stop_token_ids, options.priority, options.logprobs) == ((5, 6), -3, 2)
    assert (options.repetition_penalty, options.presence_penalty) == (1.5, -1)
    assert (options.frequency_penalty, options.logit_bias) == (0.5, ((5, -100.0), (77, 1.5)))
    assert options.prompt_logprobs is None


def test_null_is_the_default_everywhere() -> None:
    fields = [*CompletionBody.__struct_fields__]
    body = completion(**{name: None for name in fields if name != "prompt"})
    assert body.options(choice=0, seed=1, max_tokens=1).temperature == 1.0
    assert (body.num_choices, body.stops, body.num_logprobs) == (1, [], None)


def test_unknown_fields_are_ignored() -> None:
    completion(user="u", service_tier="auto", store=True, no_such_thing=[1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("priority", 1000),
        ("stream_options", 3),
        ("stream_options", {"include_usage": True}),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("suffix", "s"),
        ("best_of", 2),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "much"}),
        ("logit_bias", {str(token_id): 1 for token_id in range(1025)}),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("max_tokens", -1),
        ("prompt_logprobs", 0),
        ("prompt", []),
        ("prompt", 5),
    ],
)
def test_a_refusal_names_the_field(field: str, value: object) -> None:
    error = refusal(CompletionBody, **{field: value})
    assert error.param is not None and error.param.startswith(field)
    assert error.message.startswith(f"{field}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("top_logprobs", 3),
        ("messages", []),
    ],
)
def test_chat_refuses_what_it_cannot_do(field: str, value: object) -> None:
    assert refusal(ChatBody, **{field: value}).param == field


@pytest.mark.parametrize("key", ["-1", "x", "", "1.0", "\u0663", "1" * 10])
def test_a_bias_is_for_a_token_id(key: str) -> None:
    body = completion(logit_bias={key: 1})
    with pytest.raises(HttpError) as caught:
        body.options(choice=0, seed=0, max_tokens=1)
    assert caught.value.param == "logit_bias"


def test_neutral_values_of_unsupported_fields_pass() -> None:
    chat(tools=[], response_format={"type": "text"}, modalities=["text"])


def test_the_range_is_in_the_message() -> None:
    assert "<= 2.0" in refusal(CompletionBody, temperature=3).message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(HttpError) as caught:
        parse(ChatBody, b"{}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000])
def test_what_is_not_json(raw: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        parse(CompletionBody, raw)
    assert caught.value.status == 400


@given(st.binary(max_size=64))
def test_any_bytes_are_a_body_or_a_400(raw: bytes) -> None:
    kinds: list[Any] = [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody]
    for kind in kinds:
        try:
            parse(kind, raw)
        except HttpError as error:
            assert error.status == 400


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        (["a", [2, 3]], ["a", (2, 3)]),
    ],
)
def test_the_shapes_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[1, "a"], [[]], ["a", ""], [["a"]], [-1], [2**31]])
def test_prompts_that_are_none(prompt: Any) -> None:
    assert (refusal(CompletionBody, prompt=prompt).param or "").startswith("prompt")


def test_too_many_choices_at_once() -> None:
    assert refusal(CompletionBody, prompt=["a"] * 65, n=2).param == "prompt"


def test_best_of_n_is_n() -> None:
    assert completion(best_of=2, n=2).num_choices == 2


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    def options(max_tokens: int, **fields: Any) -> Options:
        body = completion(max_tokens=max_tokens, stop_token_ids=[4], **fields)
        return body.options(choice=0, seed=0, max_tokens=max(max_tokens, 1))

    assert options(5, echo=True, logprobs=3).prompt_logprobs == 3
    assert options(5, echo=True).prompt_logprobs is None
    assert options(5, logprobs=3).prompt_logprobs is None
    # Its only token is always reported, whatever it is.
    assert options(1, echo=True, logprobs=1).ignore_eos
    assert options(1, echo=True, logprobs=1).stop_token_ids == ()
    assert not options(5, echo=True, logprobs=1).ignore_eos
    assert not options(1, echo=True).ignore_eos


def test_no_token_at_all_is_for_echo_only() -> None:
    assert completion(echo=True, max_tokens=0).token_limit == 0
    assert refusal(CompletionBody, max_tokens=0).param == "max_tokens"
    assert refusal(ChatBody, max_tokens=0).param == "max_tokens"


def test_stops() -> None:
    assert completion(stop="a").stops == ["a"]
    assert completion(stop=["a", "b"]).stops == ["a", "b"]
    assert refusal(CompletionBody, stop=["a"] * 17).param == "stop"


def test_stream_options() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    body = chat(stream=True, stream_options=options)
    assert body.wants_usage and body.wants_usage_always
    assert not chat(stream=True).wants_usage


def test_chat_logprobs() -> None:
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).num_logprobs == 3
    assert chat(logprobs=False).num_logprobs is None


def test_tokenize_wants_one_of_two() -> None:
    assert refusal(TokenizeBody, prompt="a").param == "prompt"
    with pytest.raises(HttpError):
        parse(TokenizeBody, b"{}")
    assert parse(TokenizeBody, b'{"prompt": ""}').prompt == ""


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert flat_messages([{"role": "user", "content": parts, "name": "x"}]) == [
        {"role": "user", "content": "a\nb", "name": "x"}
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "root", "content": "x"}, "messages[0].role"),
        ({"role": "User", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
    ],
)
def test_a_bad_message_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        flat_messages([message])
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_assistant_may_have_said_nothing() -> None:
    silent = {"role": "assistant", "content": None}
    assert flat_messages([silent]) == [silent]


def test_the_field_is_in_the_message() -> None:
    assert invalid("n", "is odd").message == "n: is odd"
    assert invalid(None, "is odd").message == "is odd"
