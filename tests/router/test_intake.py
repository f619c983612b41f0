"""From bodies to requests of the core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.http import HttpError
from router.intake import Asker, Intake, Order
from tests.router.site import ids, write_model
from wire.errors import WireError

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


def test_a_prompt_over_the_context_still_asks_for_one_token(intake: Intake) -> None:
    [(request, _)] = intake.chat(raw(messages=[CHAT[0] | {"content": "x" * 200}]), ASKER).requests
    assert request.max_new_tokens == 0  # The core refuses it, in its own words.


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
    answer = intake.tokenize(raw(prompt="hé"), 100)
    assert answer == {"tokens": [0, *ids("hé")], "count": 4, "max_model_len": 100}
    assert intake.detokenize(raw(tokens=answer["tokens"])) == {"prompt": "<s>hé"}
    chat = intake.tokenize(raw(messages=CHAT, add_generation_prompt=False), None)
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
