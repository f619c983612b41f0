"""Fields of all bodies: what is accepted, what is refused, and that the refusal names the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.chat import ChatBody
from router.api.errors import HttpError
from router.api.requests.body import parse
from router.api.text import CompletionBody
from router.api.tokenize import DetokenizeBody, TokenizeBody
from tests.router.api.asking import chatting, completion, refusal


def test_defaults_are_openais() -> None:
    options = completion().options(seed=5, max_tokens=16)
    assert completion().token_limit == 16
    assert chatting().token_limit is None
    assert (options.temperature, options.top_p, options.seed) == (1.0, 1.0, 5)
    assert completion(seed=0).options(seed=5, max_tokens=16).seed == 0
    assert completion(max_tokens=3).token_limit == 3
    assert chatting(max_tokens=3).token_limit == 3
    assert chatting(max_tokens=3, max_completion_tokens=4).token_limit == 4


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
        allowed_token_ids=[7],
        prompt_logprobs=4,
        logprobs=2,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={"5": -100, "77": 1.5},
    )
    options = body.options(seed=0, max_tokens=9)
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 7, 0.1)
    assert options.seed == 2**63 - 1
    assert (options.max_tokens, options.min_tokens, options.ignore_eos) == (9, 2, True)
    assert (options.stop_token_ids, options.priority, options.logprobs) == ((5, 6), 3, 2)
    assert (options.repetition_penalty, options.presence_penalty) == (1.5, -1)
    assert (options.frequency_penalty, options.logit_bias) == (0.5, ((5, -100.0), (77, 1.5)))
    assert (options.allowed_token_ids, options.prompt_logprobs) == ((7,), 4)


def test_null_is_the_default_everywhere() -> None:
    fields = [*CompletionBody.__struct_fields__]
    body = completion(**{name: None for name in fields if name != "prompt"})
    assert body.options(seed=1, max_tokens=1).temperature == 1.0
    assert (body.num_choices, body.stops, body.num_logprobs) == (1, [], None)


def test_numbers_may_come_as_text() -> None:
    body = completion(max_tokens="5", temperature="0.5", n=2.0, ignore_eos=1, stream="false")
    assert (body.token_limit, body.temperature, body.num_choices) == (5, 0.5, 2)
    assert (body.ignore_eos, body.stream) == (True, False)
    assert completion(prompt=["5"], stop="5").prompts == ["5"], "text is text"


def test_prompt_logprobs_are_for_answers_that_come_whole() -> None:
    assert refusal(CompletionBody, prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    body = completion(prompt_logprobs=1, logprobs=1, echo=True)
    assert (body.num_prompt_logprobs, body.has_echo_logprobs) == (1, True)
    error = refusal(CompletionBody, prompt_logprobs=1, logprobs=2, echo=True)
    assert error.param == "prompt_logprobs"


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
        ("cache_salt", ""),
        ("cache_salt", "a" * 129),
        ("cache_salt", 5),
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
        ("prompt_logprobs", 21),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("bad_words", ["a"] * 129),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 0),
        ("truncation_side", "middle"),
        ("request_id", "a b"),
        ("temperature", "nan"),
        ("temperature", "2.5"),
        ("prompt", 5),
    ],
)
def test_a_refusal_names_the_field(field: str, value: object) -> None:
    error = refusal(CompletionBody, **{field: value})
    assert error.param is not None and error.param.startswith(field)
    assert error.message.startswith(f"{field}")


@pytest.mark.parametrize("key", ["-1", "x", "", "1.0", "\u0663", "1" * 10])
def test_a_bias_is_for_a_token_id(key: str) -> None:
    body = completion(logit_bias={key: 1})
    with pytest.raises(HttpError) as caught:
        body.options(seed=0, max_tokens=1)
    assert caught.value.param == "logit_bias"


def test_every_bad_key_of_the_biases_is_named() -> None:
    bad = {f"bad{number}": 1 for number in range(10)}
    with pytest.raises(HttpError) as caught:
        completion(logit_bias=bad | {"5": 1}).biases  # noqa: B018
    listed = ", ".join(map(repr, list(bad)[:8]))
    assert (
        caught.value.message == f"logit_bias: expected token ids as keys, not {listed} and 2 more"
    )


def test_the_range_is_in_the_message() -> None:
    assert "<= 2.0" in refusal(CompletionBody, temperature=3).message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"tools": [{"type": "custom", "function": {"name": "a"}}]},
            "tools[0].type: invalid enum value 'custom': expected function",
        ),
        (
            {"truncation_side": "middle"},
            "truncation_side: invalid enum value 'middle': expected left or right",
        ),
        ({"tools": [{}]}, "tools[0].function: object missing required field `function`"),
    ],
)
def test_the_few_words_that_are_allowed_are_in_the_message(
    fields: dict[str, Any], said: str
) -> None:
    assert refusal(ChatBody, **fields).message == said


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 30_000])
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


def test_stream_options() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    body = chatting(stream=True, stream_options=options)
    assert body.wants_usage and body.wants_usage_always
    assert not chatting(stream=True).wants_usage
