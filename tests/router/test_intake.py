"""From bodies to requests of the core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.http import HttpError
from router.intake import Asker, Intake, Order
from tests.router.site import ids, write_model
from wire.errors import ErrorCode, WireError

ASKER = Asker("10.0.0.1", 77, 100)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def intake(tmp_path: Path) -> Intake:
    return Intake("letters", write_model(tmp_path))


@pytest.fixture
def wordless(tmp_path: Path) -> Intake:
    return Intake("letters", write_model(tmp_path, text=False))


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def complete(intake: Intake, **fields: Any) -> Order:
    return intake.completion(raw(**fields), ASKER)


def test_a_text_prompt_gets_the_models_special_tokens(intake: Intake) -> None:
    [(request, echo)] = complete(intake, prompt="ab").requests
    assert request.token_ids == (0, *ids("ab"))
    assert (request.max_new_tokens, request.options.max_tokens) == (15, 16)
    assert (request.options.seed, request.client, echo) == (77, "10.0.0.1", "")


def test_or_none(intake: Intake) -> None:
    [(request, _)] = complete(intake, prompt="ab", add_special_tokens=False).requests
    assert request.token_ids == tuple(ids("ab"))


def test_choices_of_several_prompts_are_in_order(intake: Intake) -> None:
    requests = complete(intake, prompt=["a", [5, 6]], n=2).requests
    assert [(r.token_ids, r.options.choice) for r, _ in requests] == [
        ((0, *ids("a")), 0),
        ((0, *ids("a")), 1),
        ((5, 6), 0),
        ((5, 6), 1),
    ]


def test_echo_is_the_text_of_the_prompt(intake: Intake) -> None:
    requests = complete(intake, prompt=["a<s>", ids("xy")], echo=True).requests
    assert [echo for _, echo in requests] == ["a<s>", "xy"]


def test_a_chat_is_rendered_and_runs_to_the_end_of_the_context(intake: Intake) -> None:
    order = intake.chat(raw(messages=CHAT), ASKER)
    [(request, _)] = order.requests
    assert order.is_chat
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
def test_a_prompt_that_leaves_no_room(intake: Intake, prompt: Any, count: str | None) -> None:
    """100 tokens of context; the longest token, ``</s>``, has 4 letters."""
    if count is None:
        assert complete(intake, prompt=prompt, max_tokens=1).requests
        return
    with pytest.raises(WireError, match=f"length is 100 tokens; the prompt has {count},") as caught:
        complete(intake, prompt=prompt)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_hopeless_text_is_refused_without_tokenizing_it(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake._tokenizer, "_backend", object())
    with pytest.raises(WireError, match="at least"):
        intake.chat(raw(messages=[CHAT[0] | {"content": "x" * 2000}]), ASKER)


def test_a_body_of_too_many_values_is_not_decoded(intake: Intake) -> None:
    body = b'{"prompt": 7, "tools": [' + b",".join([b"[]"] * 200_000) + b"]}"
    for read in (intake.completion, intake.chat):
        with pytest.raises(HttpError, match="strings, arrays and objects"):
            read(body, ASKER)
    with pytest.raises(HttpError, match="strings, arrays and objects"):
        intake.tokenize(body, 100)
    with pytest.raises(HttpError, match="over 262144 values"):
        intake.detokenize(b'{"tokens": [' + b",".join([b"1"] * 300_000) + b"]}")


def test_errors_repeat_little_of_what_was_sent(intake: Intake) -> None:
    long = "x" * 100_000
    for fields in (
        {"prompt": "a", "model": long},
        {"prompt": "a", "logit_bias": {long: 1}},
        {"prompt": "a", "logit_bias": {long: "b"}},
        {"prompt": "a", "temperature": long},
    ):
        with pytest.raises(HttpError) as caught:
            complete(intake, **fields)
        assert len(caught.value.body) < 1000
    for message in ({"role": long, "content": "a"}, {"role": "user", "content": [{long: 1}]}):
        with pytest.raises(HttpError) as caught:
            intake.chat(raw(messages=[message]), ASKER)
        assert len(caught.value.body) < 1000
    with pytest.raises(HttpError) as caught:
        intake.chat(raw(messages=CHAT, chat_template_kwargs={"messages": long}), ASKER)
    assert len(caught.value.body) < 1000


def test_token_ids_outside_the_vocabulary(intake: Intake) -> None:
    complete(intake, prompt=[257])
    with pytest.raises(HttpError, match="below 258"):
        complete(intake, prompt=[258])


def test_another_model_is_not_found(intake: Intake) -> None:
    complete(intake, prompt="a", model="letters")
    with pytest.raises(HttpError) as caught:
        complete(intake, prompt="a", model="gpt-4")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_template_variables_of_the_client(intake: Intake) -> None:
    fields: dict[str, Any] = {"messages": CHAT, "chat_template_kwargs": {"messages": []}}
    with pytest.raises(HttpError, match="must not set messages"):
        intake.chat(raw(**fields), ASKER)
    intake.chat(raw(messages=CHAT, chat_template_kwargs={"enable_thinking": False}), ASKER)


def test_who_needs_to_be_woken_for_every_token(intake: Intake) -> None:
    assert not complete(intake, prompt="a").terms.is_eager
    assert complete(intake, prompt="a", stop="b").terms.is_eager
    assert complete(intake, prompt="a", stream=True).terms.is_eager


def test_tokenize_and_back(intake: Intake) -> None:
    answer = json.loads(intake.tokenize(raw(prompt="hé"), 100))
    assert answer == {"tokens": [0, *ids("hé")], "count": 4, "max_model_len": 100}
    assert json.loads(intake.detokenize(raw(tokens=answer["tokens"]))) == {"prompt": "<s>hé"}
    chat = json.loads(intake.tokenize(raw(messages=CHAT, add_generation_prompt=False), None))
    assert chat["tokens"] == [0, *ids("user:hi\n")]


def test_a_model_without_words(wordless: Intake) -> None:
    [(request, echo)] = complete(wordless, prompt=[1, 2], echo=True).requests
    assert (request.token_ids, echo) == ((1, 2), "")
    with pytest.raises(WireError, match="token ids"):
        complete(wordless, prompt="a")
    with pytest.raises(HttpError, match="stop_token_ids"):
        complete(wordless, prompt=[1], stop="a")
    with pytest.raises(WireError, match="chat template"):
        wordless.chat(raw(messages=CHAT), ASKER)


def test_a_broken_config_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": "many"}')
    with pytest.raises(ValueError, match=r"config\.json.*vocab_size"):
        Intake("m", tmp_path)


def test_an_echo_without_answer_still_reads_the_prompt(intake: Intake) -> None:
    order = complete(intake, prompt="ab", echo=True, max_tokens=0, logprobs=1)
    [(request, echo)] = order.requests
    assert (request.options.max_tokens, request.max_new_tokens, echo) == (1, 0, "ab")
    assert request.options.prompt_logprobs == 1
    assert order.terms.is_echo_only


def test_a_bias_outside_the_vocabulary_is_refused(intake: Intake) -> None:
    [(request, _)] = complete(intake, prompt="ab", logit_bias={"5": 1}).requests
    assert request.options.logit_bias == ((5, 1.0),)
    with pytest.raises(HttpError) as caught:
        complete(intake, prompt="ab", logit_bias={"100000": 1})
    assert caught.value.param == "logit_bias"
