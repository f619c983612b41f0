"""The served model: prompts it has room for, ids it knows, its name, and models without words."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from router.api.completions.completion import CompletionRequest
from router.api.errors import HttpError
from router.api.model import ServedModel
from router.text.output_parts import CallStart, Content, Part, Reasoning, joined
from tests.router.api.asking import CHAT, complete, converse, letters
from tests.router.site import TEMPLATE, ids, write_model
from wire.errors import ErrorCode, WireError
from wire.options import Structure


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    return letters(tmp_path)


@pytest.fixture
def wordless(tmp_path: Path) -> ServedModel:
    return letters(tmp_path, has_text=False)


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
def test_a_prompt_that_leaves_no_room(model: ServedModel, prompt: Any, count: str | None) -> None:
    """100 tokens of context; the longest token, ``</s>``, has 4 letters."""
    if count is None:
        assert complete(model, prompt=prompt, max_tokens=1).requests
        return
    with pytest.raises(WireError, match=f"length is 100 tokens; the prompt has {count},") as caught:
        complete(model, prompt=prompt)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_an_echo_alone_may_fill_the_context(model: ServedModel) -> None:
    """Tokens after it are not shown, so they need no room."""
    full, longer = [7] * 100, [7] * 101
    [(request, _)] = complete(model, prompt=full, max_tokens=0, echo=True).requests
    assert (len(request.token_ids), request.max_new_tokens) == (100, 0)
    for prompt, fields in ((full, {"max_tokens": 1}), (longer, {"max_tokens": 0})):
        with pytest.raises(WireError) as caught:
            complete(model, prompt=prompt, echo=True, **fields)
        assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "at least one more" not in caught.value.message, "an echo needs no more"


def test_errors_repeat_little_of_what_was_sent(model: ServedModel) -> None:
    long = "x" * 100_000
    for fields in (
        {"prompt": "a", "model": long},
        {"prompt": "a", "logit_bias": {long: 1}},
        {"prompt": "a", "logit_bias": {long: "b"}},
        {"prompt": "a", "temperature": long},
    ):
        with pytest.raises(HttpError) as caught:
            complete(model, **fields)
        assert len(caught.value.body) < 1000
    for message in ({"role": long, "content": "a"}, {"role": "user", "content": [{long: 1}]}):
        with pytest.raises(HttpError) as caught:
            converse(model, messages=[message])
        assert len(caught.value.body) < 1000
    with pytest.raises(HttpError) as caught:
        converse(model, chat_template_kwargs={"messages": long})
    assert len(caught.value.body) < 1000


def test_token_ids_outside_the_vocabulary(model: ServedModel) -> None:
    complete(model, prompt=[257])
    with pytest.raises(HttpError, match="below 258"):
        complete(model, prompt=[258])


def test_who_needs_to_be_woken_for_every_token(model: ServedModel) -> None:
    assert not complete(model, prompt="a").is_eager
    assert complete(model, prompt="a", stop="b").is_eager
    assert complete(model, prompt="a", stream=True).is_eager


def test_a_model_without_words(wordless: ServedModel) -> None:
    [(request, echo)] = complete(wordless, prompt=[1, 2], echo=True).requests
    assert (request.token_ids, echo) == ((1, 2), "")
    with pytest.raises(WireError, match="token ids"):
        complete(wordless, prompt="a")
    with pytest.raises(HttpError, match="stop_token_ids"):
        complete(wordless, prompt=[1], stop="a")
    with pytest.raises(WireError, match="chat template"):
        converse(
            wordless,
        )


def test_a_field_with_tokens_outside_the_vocabulary_is_refused(model: ServedModel) -> None:
    [(request, _)] = complete(model, prompt="ab", logit_bias={"5": 1}).requests
    assert request.options.logit_bias == ((5, 1.0),)
    for field, value in (("logit_bias", {"258": 1}), ("allowed_token_ids", [5, 258])):
        with pytest.raises(HttpError) as caught:
            complete(model, prompt="ab", **{field: value})
        assert caught.value.message == f"{field}: token ids must be below 258, not 258"


def kept(model: ServedModel, prompt: Any, **fields: Any) -> tuple[int, ...]:
    request, _ = complete(model, prompt=prompt, add_special_tokens=False, **fields).requests[0]
    return request.token_ids


@pytest.mark.parametrize("prompt", ["abcd", ids("abcd")])
def test_a_prompt_may_be_cut(model: ServedModel, prompt: Any) -> None:
    assert kept(model, prompt, truncate_prompt_tokens=2) == tuple(ids("ab"))
    assert kept(model, prompt, truncate_prompt_tokens=2, truncation_side="left") == tuple(ids("cd"))
    assert kept(model, prompt, truncate_prompt_tokens=50) == tuple(ids("abcd"))


def test_to_what_the_context_has_room_for(model: ServedModel) -> None:
    cut = partial(kept, model, "x" * 500, truncate_prompt_tokens=-1)
    assert len(cut(max_tokens=1)) == 99
    assert len(cut(max_tokens=30)) == 70
    assert len(cut()) == 84, "16 tokens, unless a completion says how many"
    assert len(cut(max_tokens=0, echo=True)) == 100
    assert len(cut(max_tokens=2000)) == 1, "the core refuses as many tokens after any prompt"
    chat = converse(model, messages=[CHAT[0] | {"content": "x" * 500}], truncate_prompt_tokens=-1)
    assert len(chat.requests[0][0].token_ids) == 99, "where nobody says how many, one is enough"
    with pytest.raises(HttpError, match="truncate_prompt_tokens: the context has room for 99"):
        kept(model, "x", truncate_prompt_tokens=100)


def test_a_prompt_that_is_cut_has_a_limit_which_is_not_the_context(model: ServedModel) -> None:
    with pytest.raises(HttpError, match="to be cut may have 262144") as caught:
        kept(model, "x" * 300_000, truncate_prompt_tokens=-1)
    assert "context" not in caught.value.message
    assert caught.value.param == "truncate_prompt_tokens"


def test_an_echo_of_a_prompt_that_was_cut_is_what_is_left(model: ServedModel) -> None:
    [(_, echo)] = complete(model, prompt="abcd", truncate_prompt_tokens=3, echo=True).requests
    assert echo == "ab"


TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "get"}}]


def test_bad_words_are_refused_where_other_tokens_could_spell_them(tmp_path: Path) -> None:
    """A structure may leave nothing but the word, which is then written in other tokens."""
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools | length }}" + TEMPLATE)
    model = ServedModel("letters", tmp_path, tool_calls="hermes")
    held: list[tuple[str, dict[str, Any]]] = [
        ("guided_regex", {"guided_regex": "red|blue"}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "required"}),
    ]
    for param, fields in held:
        understand = converse if "tools" in fields else partial(complete, prompt="a")
        assert understand(model, bad_words=[], **fields).wanted is not None
        with pytest.raises(HttpError, match=f"held to {param}") as caught:
            understand(model, bad_words=["red"], **fields)
        assert (caught.value.status, caught.value.param) == (400, "bad_words")
    assert converse(model, bad_words=["red"], tools=TOOLS).requests[0][0].options.bad_sequences


def test_a_structure_is_looked_at_later_and_then_held_to(model: ServedModel) -> None:
    asked = complete(model, prompt="a", n=2, guided_regex="a+")
    assert asked.wanted is not None and asked.requests[0][0].options.structure is None
    held = asked.constrained_to(asked.wanted.to_structure())
    assert held.wanted is None
    structures = [request.options.structure for request, _ in held.requests]
    assert structures == [Structure("regex", "a+")] * 2
    assert [request.options.choice for request, _ in held.requests] == [0, 1]


def test_a_request_may_bring_a_template_where_it_is_trusted(tmp_path: Path) -> None:
    asked = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}?"}
    with pytest.raises(HttpError, match=r"chat_template: .* --trust-request-chat-template"):
        converse(letters(tmp_path), **asked)
    trusting = ServedModel("letters", write_model(tmp_path), trusts_templates=True)
    [(request, _)] = converse(trusting, **asked).requests
    assert request.token_ids == tuple(ids("hi?"))


def test_an_answer_may_go_on_with_the_last_message(model: ServedModel) -> None:
    said = [*CHAT, {"role": "assistant", "content": "well"}]
    [(request, echo)] = converse(model, messages=said, continue_final_message=True).requests
    assert request.token_ids == (0, *ids("user:hi\n"), 0, *ids("assistant:well"))
    assert echo == ""
    [(_, echo)] = converse(model, messages=said, continue_final_message=True, echo=True).requests
    assert echo == "well"
    with pytest.raises(HttpError, match="add_generation_prompt"):
        converse(model, messages=said, continue_final_message=True, add_generation_prompt=True)


def parts_of(asked: CompletionRequest, text: str) -> list[Part]:
    assert asked.reader is not None
    reader = asked.reader()
    return joined([*reader.feed(text), *reader.flush()])


@pytest.mark.parametrize("is_echoed", [False, True])
def test_an_answer_goes_on_with_reasoning_that_is_not_over(tmp_path: Path, is_echoed: bool) -> None:
    thinker = ServedModel("letters", write_model(tmp_path), reasoning="qwen3")
    for begun, part in (("<think>I am", Reasoning("so")), ("<think>I</think>", Content("so"))):
        said = [*CHAT, {"role": "assistant", "content": begun}]
        asked = converse(thinker, messages=said, continue_final_message=True, echo=is_echoed)
        assert parts_of(asked, "so") == [part]


# How a template is told how much to reason.
SWITCH = "{% if enable_thinking %}<think>{% endif %}</think>"
DIAL = "{{ reasoning_effort }}</think>"


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        ("", None, {}),
        ("", "none", {}),
        ("", "medium", {}),
        ("", "high", {}),
        (SWITCH, "none", {"enable_thinking": False}),
        (SWITCH, "medium", {}),
        (SWITCH, "low", None),
        (DIAL, "low", {"reasoning_effort": "low"}),
        (DIAL, "medium", {"reasoning_effort": "medium"}),
        ("</think>", "none", None),
        ("</think>", "medium", {}),
    ],
)
def test_effort_is_what_the_template_can_say(
    tmp_path: Path, template: str, effort: str | None, variables: dict[str, Any] | None
) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template + TEMPLATE)
    model = ServedModel("letters", tmp_path)
    if variables is not None:
        assert model.variables_of_effort("reasoning_effort", effort) == variables
        return
    with pytest.raises(HttpError) as caught:
        model.variables_of_effort("reasoning_effort", effort)
    assert caught.value.param == "reasoning_effort"


def test_one_call_where_there_is_to_be_one(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools | length }}" + TEMPLATE)
    caller = ServedModel("letters", tmp_path, tool_calls="hermes")
    tools = [{"type": "function", "function": {"name": "get"}}]
    call = '<tool_call>{"name": "get"}</tool_call>'
    for is_parallel, num_calls in ((None, 2), (True, 2), (False, 1)):
        asked = converse(caller, tools=tools, parallel_tool_calls=is_parallel)
        got = [part for part in parts_of(asked, call * 2) if isinstance(part, CallStart)]
        assert len(got) == num_calls


def test_special_tokens_are_shown_beside_tools_too(tmp_path: Path) -> None:
    thinker = ServedModel("letters", write_model(tmp_path), reasoning="qwen3")
    asked = converse(thinker, skip_special_tokens=False)
    assert asked.reader is not None and asked.shown == thinker.tokenizer.special_ids
