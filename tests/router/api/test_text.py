"""Text completions: shapes of a prompt, echo, and what a choice looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.api.errors import HttpError
from router.api.model import ServedModel
from router.api.text import TextAnswer
from tests.router.api.asking import complete, completion, letters
from tests.router.api.scripted import Scene
from tests.router.site import ids
from wire.options import Options


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    return letters(tmp_path)


def test_a_text_prompt_gets_the_models_special_tokens(model: ServedModel) -> None:
    [(request, echo)] = complete(model, prompt="ab").requests
    assert request.token_ids == (0, *ids("ab"))
    assert (request.max_new_tokens, request.options.max_tokens) == (15, 16)
    assert (request.options.seed, request.client, echo) == (77, "10.0.0.1", "")


def test_choices_of_several_prompts_are_in_order(model: ServedModel) -> None:
    requests = complete(model, prompt=["a", [5, 6]], n=2).requests
    assert [(r.token_ids, r.options.choice) for r, _ in requests] == [
        ((0, *ids("a")), 0),
        ((0, *ids("a")), 1),
        ((5, 6), 0),
        ((5, 6), 1),
    ]


def test_echo_is_the_text_of_the_prompt(model: ServedModel) -> None:
    requests = complete(model, prompt=["a<s>", ids("xy"), [0, 0, *ids("z")]], echo=True).requests
    assert [echo for _, echo in requests] == ["a<s>", "xy", "<s><s>z"]


def test_an_echo_without_answer_still_reads_the_prompt(model: ServedModel) -> None:
    wanted = complete(model, prompt="ab", echo=True, max_tokens=0, logprobs=1)
    [(request, echo)] = wanted.requests
    assert (request.options.max_tokens, request.max_new_tokens, echo) == (1, 0, "ab")
    assert request.options.prompt_logprobs == 1
    assert wanted.is_echo_only


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


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[]], ["a", ""], [["a"]], [-1], [2**31]])
def test_prompts_that_are_none(model: ServedModel, prompt: Any) -> None:
    with pytest.raises(HttpError) as refused:
        complete(model, prompt=prompt)
    assert refused.value.status == 400
    assert (refused.value.param or "").startswith("prompt")


def test_too_many_choices_at_once(model: ServedModel) -> None:
    with pytest.raises(HttpError) as refused:
        complete(model, prompt=["a"] * 65, n=2)
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert len(complete(model, prompt=["a"] * 64, n=2).requests) == 128


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    def options(**fields: Any) -> Options:
        return completion(**fields).options(seed=0, max_tokens=5)

    assert options(echo=True, logprobs=3).prompt_logprobs == 3
    assert options(echo=True).prompt_logprobs is None
    assert options(logprobs=3).prompt_logprobs is None


def test_a_text_choice_echoes_and_names_tokens_when_asked() -> None:
    for has_ids in (True, False):
        scene = Scene(TextAnswer, prefix="<", has_ids=has_ids, is_streamed=False)
        scene.say("ab")
        scene.end("length")
        [said] = scene.body()["choices"]
        assert (said["text"], said.get("token_ids")) == ("<ab", ids("ab") if has_ids else None)
        assert said["prompt_token_ids"] == ([8, 9] if has_ids else None)
        assert said["prompt_logprobs"] is None
