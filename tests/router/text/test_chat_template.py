"""Chat templates: found where models keep them, rendered as transformers renders them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from router.text.chat_template import MAX_SOURCE, ChatTemplate, for_template
from router.text.tools.families import FAMILIES, detect
from wire.errors import ErrorCode, WireError
from wire.process.model import DEMO

CHATML = """{{ bos_token }}{% for message in messages %}
    {% if message.role == 'system' and not loop.first %}
        {{ raise_exception('system comes first') }}
    {% endif %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
<|{{ message['role'] }}|>{{ message.content | trim }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
CHAT = [{"role": "user", "content": " <Hi> & é\n"}, {"role": "skip", "content": "-"}]


def rendered_by_transformers(chat: list[dict[str, Any]], template: str, **settings: Any) -> str:
    # here, for importing it takes longer than all of these tests
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([chat], chat_template=template, **settings)
    return str(text)


def test_rendered_as_transformers_does() -> None:
    ours = ChatTemplate(CHATML, {"bos_token": "<s>"}).render(CHAT)
    theirs = rendered_by_transformers(CHAT, CHATML, add_generation_prompt=True, bos_token="<s>")
    assert ours == theirs
    assert "<Hi> & é" in ours


def test_from_tokenizer_config(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}!", "bos_token": "<s>", "other": 1}
    config["eos_token"] = {"content": "</s>", "lstrip": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render([]) == "<s></s>!"


def test_the_file_of_its_own_comes_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "A"}))
    (tmp_path / "chat_template.jinja").write_text("B{{ thinking }}")
    assert ChatTemplate.load(tmp_path).render([], variables={"thinking": 1}) == "B1"


def test_a_model_without_a_template(tmp_path: Path) -> None:
    template = ChatTemplate.load(tmp_path)
    with pytest.raises(WireError, match="no chat template") as caught:
        template.render(CHAT)
    assert caught.value.code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only users speak') }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[9].content.x }}",
        "{{ 1 // 0 }}",
    ],
)
def test_what_a_template_refuses_is_the_clients_error(source: str) -> None:
    with pytest.raises(WireError) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert caught.value.code == ErrorCode.INVALID_REQUEST


def test_a_broken_file_says_which(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json.*chat_template"):
        ChatTemplate.load(tmp_path)


def test_the_date_is_there() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}").render([])
    assert int(year) in (datetime.now().year, datetime.now().year - 1)


def test_a_template_that_repeats_what_was_sent_is_cut_short() -> None:
    template = ChatTemplate("{{ raise_exception(messages[0].content) }}")
    with pytest.raises(WireError) as caught:
        template.render([{"role": "user", "content": "x" * 100_000}])
    assert len(caught.value.message) < 300


TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
WITH_TOOLS = (
    "{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% if documents %}{{ documents[0].text }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}<|end|>"
    "{% endfor %}"
)
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "Where?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "get", "arguments": {"é": ["<"]}}}],
    },
    {"role": "tool", "content": "here"},
]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("documents", [None, [{"title": "t", "text": "d"}]])
def test_tools_and_documents_as_transformers_has_them(
    tools: list[dict[str, Any]] | None, documents: list[dict[str, str]] | None
) -> None:
    ours = ChatTemplate(WITH_TOOLS).render(CALLING, tools=tools, documents=documents)
    theirs = rendered_by_transformers(
        CALLING, WITH_TOOLS, tools=tools, documents=documents, add_generation_prompt=True
    )
    assert ours == theirs


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS])
@pytest.mark.parametrize("content", ["I am", " I am\n", "<|end|>"])
def test_a_message_is_continued_as_transformers_does(template: str, content: str) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    ours = ChatTemplate(template, {"bos_token": ""}).render(chat, continue_final_message=True)
    theirs = rendered_by_transformers(chat, template, continue_final_message=True, bos_token="")
    assert ours == theirs
    assert ours.endswith(content) or ours.endswith(content.strip())


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ messages[0].role }}", {"role": "user", "content": "x"}), (CHATML, {"role": "user"})],
)
def test_a_message_that_cannot_be_continued(template: str, message: dict[str, str]) -> None:
    asks = template + "{# content is none #}"
    with pytest.raises(WireError, match="continue_final_message"):
        ChatTemplate(asks).render([message], continue_final_message=True)


@pytest.mark.parametrize("field", ["tools", "documents"])
def test_what_the_template_has_no_place_for_is_refused(field: str) -> None:
    template = ChatTemplate("{{ messages }} {{ mytools }} {{ documents_of }}")
    with pytest.raises(WireError, match=f"^{field}: .*no place"):
        template.render(CHAT, **{field: [{"a": "b"}]})  # type: ignore[arg-type]
    assert template.render(CHAT, **{field: []})  # type: ignore[arg-type]


def test_the_template_of_several_that_is_for_tools(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T{{ tools }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = ChatTemplate.load(tmp_path)
    assert template.render([]) == "D"
    assert template.render([], tools=TOOLS).startswith("T[")
    assert template.source == "T{{ tools }}"


def test_another_template_for_one_request() -> None:
    model = ChatTemplate("A{{ bos_token }}", {"bos_token": "<s>"})
    assert model.replaced("B{{ bos_token }}").render([]) == "B<s>"
    assert model.render([]) == "A<s>"


@pytest.mark.parametrize(
    "source", ["{% if", "x" * (MAX_SOURCE + 1), "{{ " + "(" * 9000, "{{ a" + "+a" * 9000]
)
def test_a_template_that_is_none(source: str) -> None:
    with pytest.raises(WireError) as caught:
        ChatTemplate("").replaced(source).render([])
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    assert len(caught.value.message) < 300


def test_the_demo_model_renders_plain_messages_as_it_was_trained() -> None:
    plain = ChatTemplate(
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    demo = ChatTemplate.load(DEMO)
    roles = ("system", "user", "assistant", "user")
    contents = ("Hé\n", " <hi>", "", "{{ x }}\n\n")
    chat = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    for messages in ([], chat, chat[1:], chat[:1]):
        for prompt in (False, True):
            ours = demo.render(messages, add_generation_prompt=prompt)
            assert ours == plain.render(messages, add_generation_prompt=prompt)


def test_the_demo_model_renders_tools_as_hermes() -> None:
    prompt = ChatTemplate.load(DEMO).render(
        [{"role": "developer", "content": "Be short."}, *CALLING], tools=TOOLS
    )
    system, user, call, result, last = prompt.split("<|end|>")
    assert system.startswith("<|system|>Be short.\n\n")
    assert json.dumps(TOOLS[0]) in system.splitlines()
    assert user == "<|user|>Where?"
    assert call == (
        '<|assistant|><tool_call>\n{"name": "get", "arguments": {"é": ["<"]}}\n</tool_call>'
    )
    assert result == "<|user|><tool_response>\nhere\n</tool_response>"
    assert last == "<|assistant|>"
    assert detect(ChatTemplate.load(DEMO).source) is FAMILIES["hermes"]


# Messages as templates want them.


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "get", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_are_an_object(arguments: Any) -> None:
    message = call(arguments)
    [wanted] = for_template([message], "")
    assert wanted["tool_calls"][0] == {
        "id": "1",
        "function": {"name": "get", "arguments": {"a": 1}},
    }
    assert message == call(arguments)


def test_no_arguments_are_an_empty_object() -> None:
    with capture_logs() as logs:
        [wanted] = for_template([call(" ")], "")
    assert logs == []
    assert wanted["tool_calls"][0]["function"]["arguments"] == {}


BROKEN = ("[1]", "{", '{"a": "x\ny"}', '{"a": 1,}', r'{"a": "\d"}', '{"a": NaN}')


@pytest.mark.parametrize("arguments", [*BROKEN, "[" * 100_000, r'{"\ud800": 1}', '{"a": 1e999}'])
def test_a_text_of_no_object_is_an_empty_one_and_the_log_says_so_once(arguments: str) -> None:
    message = call(arguments)
    with capture_logs() as logs:
        [_, *wanted] = for_template([{"role": "user", "content": "x"}, message, message], "")
    for each in wanted:
        assert each["tool_calls"][0]["function"]["arguments"] == {}
    assert message == call(arguments)
    [said] = logs
    first = "messages[1].tool_calls[0].function.arguments"
    assert (said["log_level"], said["calls"], said["first"]) == ("warning", 2, first)
    assert set(said) == {"event", "log_level", "calls", "first"}, "no text of a conversation"


@pytest.mark.parametrize("arguments", [None, 3, [1]])
def test_what_is_neither_text_nor_object_is_named(arguments: Any) -> None:
    with pytest.raises(WireError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arg") as caught:
        for_template([{"role": "user", "content": "x"}, call(arguments)], "")
    assert caught.value.code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("calls", [3, [3], [{}], [{"function": {}}], [{"function": {"name": 3}}]])
def test_what_is_no_call_is_named(calls: Any) -> None:
    with pytest.raises(WireError, match=r"messages\[0\]\.tool_calls"):
        for_template([{"role": "assistant", "tool_calls": calls}], "")


def test_no_calls_are_no_field() -> None:
    assert "tool_calls" not in for_template([{"role": "assistant", "tool_calls": []}], "")[0]


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ message.content }}", ""),
        ("{% if message['content'] is none %}", None),
        ("{% if message.content is not none %}", None),
    ],
)
def test_no_content(template: str, content: str | None) -> None:
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        assert for_template([message], template)[0].get("content") == content


def test_the_developer_is_the_system_where_the_template_has_no_place_for_them() -> None:
    message = {"role": "developer", "content": "x"}
    assert for_template([message], "{{ messages }}")[0]["role"] == "system"
    assert for_template([message], "{% if role == 'developer' %}")[0]["role"] == "developer"
