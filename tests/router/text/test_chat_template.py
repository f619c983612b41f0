"""Chat templates: found where models keep them, rendered as transformers renders them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from router.text.chat_template import ChatTemplate
from wire.errors import ErrorCode, WireError

CHATML = """{{ bos_token }}{% for message in messages %}
    {% if message.role == 'system' and not loop.first %}
        {{ raise_exception('system comes first') }}
    {% endif %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
<|{{ message['role'] }}|>{{ message.content | trim }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
CHAT = [{"role": "user", "content": " <Hi> & é\n"}, {"role": "skip", "content": "-"}]


def test_rendered_as_transformers_does() -> None:
    ours = ChatTemplate(CHATML, {"bos_token": "<s>"}).render(CHAT)
    theirs = render_jinja_template(
        [CHAT], chat_template=CHATML, add_generation_prompt=True, bos_token="<s>"
    )
    assert ours == theirs[0][0]
    assert "<Hi> & é" in ours


def test_json_in_a_template_is_not_html() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}")
    assert template.render([{"role": "user", "content": "<é>"}]) == (
        '{"role": "user", "content": "<é>"}'
    )


def test_from_tokenizer_config(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}!", "bos_token": "<s>", "other": 1}
    config["eos_token"] = {"content": "</s>", "lstrip": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render([]) == "<s></s>!"


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert ChatTemplate.load(tmp_path).render([]) == "D"


def test_the_file_of_its_own_comes_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "A"}))
    (tmp_path / "chat_template.jinja").write_text("B{{ thinking }}")
    assert ChatTemplate.load(tmp_path).render([], variables={"thinking": 1}) == "B1"


def test_a_model_without_a_template(tmp_path: Path) -> None:
    template = ChatTemplate.load(tmp_path)
    assert not template.exists
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
