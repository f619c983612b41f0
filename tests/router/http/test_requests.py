"""From bodies to requests of the core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.http.asgi import HttpError
from router.http.completion import CompletionRequest
from router.http.requests import RequestParser
from tests.router.site import ids, write_model
from wire.errors import ErrorCode, WireError

CONTEXT: dict[str, Any] = {"asker": "10.0.0.1", "seed": 77, "max_model_len": 100}
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def parser(tmp_path: Path) -> RequestParser:
    return RequestParser("letters", write_model(tmp_path))


@pytest.fixture
def wordless(tmp_path: Path) -> RequestParser:
    return RequestParser("letters", write_model(tmp_path, text=False))


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def complete(parser: RequestParser, **fields: Any) -> CompletionRequest:
    return parser.completion(raw(**fields), **CONTEXT)


def test_a_text_prompt_gets_the_models_special_tokens(parser: RequestParser) -> None:
    [(request, echo)] = complete(parser, prompt="ab").requests
    assert request.token_ids == (0, *ids("ab"))
    assert (request.max_new_tokens, request.options.max_tokens) == (15, 16)
    assert (request.options.seed, request.client, echo) == (77, "10.0.0.1", "")


def test_or_none(parser: RequestParser) -> None:
    [(request, _)] = complete(parser, prompt="ab", add_special_tokens=False).requests
    assert request.token_ids == tuple(ids("ab"))


def test_choices_of_several_prompts_are_in_order(parser: RequestParser) -> None:
    requests = complete(parser, prompt=["a", [5, 6]], n=2).requests
    assert [(r.token_ids, r.options.choice) for r, _ in requests] == [
        ((0, *ids("a")), 0),
        ((0, *ids("a")), 1),
        ((5, 6), 0),
        ((5, 6), 1),
    ]


def test_echo_is_the_text_of_the_prompt(parser: RequestParser) -> None:
    requests = complete(parser, prompt=["a<s>", ids("xy")], echo=True).requests
    assert [echo for _, echo in requests] == ["a<s>", "xy"]


def test_a_chat_is_rendered_and_runs_to_the_end_of_the_context(parser: RequestParser) -> None:
    wanted = parser.chat(raw(messages=CHAT), **CONTEXT)
    [(request, _)] = wanted.requests
    assert wanted.is_chat
    assert request.token_ids == (0, *ids("user:hi\nassistant:"))
    assert request.options.max_tokens == 100 - len(request.token_ids)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("x" * 98, None),
        ("x" * 99, "100"),
        ([7] * 99, None),
        ([7] * 100, "100"),
        ("x" * 4000, "at least 1000"),
        (["x", [7] * 100], "100"),
    ],
)
def test_a_prompt_that_leaves_no_room(
    parser: RequestParser, prompt: Any, count: str | None
) -> None:
    """100 tokens of context; the longest token, ``</s>``, has 4 letters."""
    if count is None:
        assert complete(parser, prompt=prompt, max_tokens=1).requests
        return
    with pytest.raises(WireError, match=f"length is 100 tokens; the prompt has {count},") as caught:
        complete(parser, prompt=prompt)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_hopeless_text_is_refused_without_tokenizing_it(parser: RequestParser) -> None:
    # Who had counted would say how many tokens there are.
    with pytest.raises(WireError, match=r"the prompt has at least \d+"):
        parser.chat(raw(messages=[CHAT[0] | {"content": "x" * 2000}]), **CONTEXT)


def test_a_body_of_too_many_values_is_not_decoded(parser: RequestParser) -> None:
    body = b'{"prompt": 7, "tools": [' + b",".join([b"[]"] * 200_000) + b"]}"
    for read in (parser.completion, parser.chat):
        with pytest.raises(HttpError, match="strings, arrays and objects"):
            read(body, **CONTEXT)
    with pytest.raises(HttpError, match="strings, arrays and objects"):
        parser.tokenize(body, 100)
    with pytest.raises(HttpError, match="over 262144 values"):
        parser.detokenize(b'{"tokens": [' + b",".join([b"1"] * 300_000) + b"]}")


def test_errors_repeat_little_of_what_was_sent(parser: RequestParser) -> None:
    long = "x" * 100_000
    for fields in (
        {"prompt": "a", "model": long},
        {"prompt": "a", "logit_bias": {long: 1}},
        {"prompt": "a", "logit_bias": {long: "b"}},
        {"prompt": "a", "temperature": long},
    ):
        with pytest.raises(HttpError) as caught:
            complete(parser, **fields)
        assert len(caught.value.body) < 1000
    for message in ({"role": long, "content": "a"}, {"role": "user", "content": [{long: 1}]}):
        with pytest.raises(HttpError) as caught:
            parser.chat(raw(messages=[message]), **CONTEXT)
        assert len(caught.value.body) < 1000
    with pytest.raises(HttpError) as caught:
        parser.chat(raw(messages=CHAT, chat_template_kwargs={"messages": long}), **CONTEXT)
    assert len(caught.value.body) < 1000


def test_token_ids_outside_the_vocabulary(parser: RequestParser) -> None:
    complete(parser, prompt=[257])
    with pytest.raises(HttpError, match="below 258"):
        complete(parser, prompt=[258])


def test_another_model_is_not_found(parser: RequestParser) -> None:
    complete(parser, prompt="a", model="letters")
    with pytest.raises(HttpError) as caught:
        complete(parser, prompt="a", model="gpt-4")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_template_variables_of_the_client(parser: RequestParser) -> None:
    fields: dict[str, Any] = {"messages": CHAT, "chat_template_kwargs": {"messages": []}}
    with pytest.raises(HttpError, match="must not set messages"):
        parser.chat(raw(**fields), **CONTEXT)
    parser.chat(raw(messages=CHAT, chat_template_kwargs={"enable_thinking": False}), **CONTEXT)


def test_who_needs_to_be_woken_for_every_token(parser: RequestParser) -> None:
    assert not complete(parser, prompt="a").is_eager
    assert complete(parser, prompt="a", stop="b").is_eager
    assert complete(parser, prompt="a", stream=True).is_eager


def test_tokenize_and_back(parser: RequestParser) -> None:
    answer = json.loads(parser.tokenize(raw(prompt="hé"), 100))
    assert answer == {"tokens": [0, *ids("hé")], "count": 4, "max_model_len": 100}
    assert json.loads(parser.detokenize(raw(tokens=answer["tokens"]))) == {"prompt": "<s>hé"}
    chat = json.loads(parser.tokenize(raw(messages=CHAT, add_generation_prompt=False), None))
    assert chat["tokens"] == [0, *ids("user:hi\n")]


def test_a_model_without_words(wordless: RequestParser) -> None:
    [(request, echo)] = complete(wordless, prompt=[1, 2], echo=True).requests
    assert (request.token_ids, echo) == ((1, 2), "")
    with pytest.raises(WireError, match="token ids"):
        complete(wordless, prompt="a")
    with pytest.raises(HttpError, match="stop_token_ids"):
        complete(wordless, prompt=[1], stop="a")
    with pytest.raises(WireError, match="chat template"):
        wordless.chat(raw(messages=CHAT), **CONTEXT)


def test_a_broken_config_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": "many"}')
    with pytest.raises(ValueError, match=r"config\.json.*vocab_size"):
        RequestParser("m", tmp_path)


def test_an_echo_without_answer_still_reads_the_prompt(parser: RequestParser) -> None:
    wanted = complete(parser, prompt="ab", echo=True, max_tokens=0, logprobs=1)
    [(request, echo)] = wanted.requests
    assert (request.options.max_tokens, request.max_new_tokens, echo) == (1, 0, "ab")
    assert request.options.prompt_logprobs == 1
    assert wanted.is_echo_only


def test_a_bias_outside_the_vocabulary_is_refused(parser: RequestParser) -> None:
    [(request, _)] = complete(parser, prompt="ab", logit_bias={"5": 1}).requests
    assert request.options.logit_bias == ((5, 1.0),)
    with pytest.raises(HttpError) as caught:
        complete(parser, prompt="ab", logit_bias={"100000": 1})
    assert caught.value.param == "logit_bias"
