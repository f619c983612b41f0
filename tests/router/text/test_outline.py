"""The parts of rendered chats, by templates of several families."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.chat_template import ChatTemplate
from router.text.outline import Outline, outline
from router.text.tokenizer import Tokenizer
from tests.router.site import LETTERS

# System and tools in one block before the messages, as Qwen; nothing is added without a system.
CHATML = (
    "{% if messages[0].role == 'system' or tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}\n\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A default system prompt, and tools in front of the last message, as Mistral.
INST = (
    "<s>You are a helpful assistant of the house.\n{% for m in messages %}"
    "{% if m.role == 'user' %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]"
    "{% endif %}[INST] {{ m.content | trim }} [/INST]{% else %}{{ m.content | trim }}</s>"
    "{% endif %}{% endfor %}"
)
TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": name, "description": "Look it up."}}
    for name in ("get_weather", "get_time")
]
CALL = {"function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}
WORDS = Tokenizer(LETTERS)


def parts(
    source: str, messages: list[dict[str, object]], tools: list[dict[str, object]] | None = None
) -> tuple[str, Outline]:
    text = ChatTemplate(source).render(messages, tools=tools)
    return text, outline(WORDS, text, messages, ["get_weather", "get_time"] if tools else [])


def message(role: str, content: str | None, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def test_each_part_of_a_chat_with_tools() -> None:
    chat = [
        message("system", "Be brief."),
        message("user", "Weather in Ulm?"),
        message("assistant", None, tool_calls=[CALL]),
        message("tool", "sunny", tool_call_id="1"),
        message("assistant", "It is sunny."),
        message("user", "  And now?  "),
    ]
    text, it = parts(CHATML, chat, TOOLS)
    for needle, part in (
        ("Be brief", "system"),
        ("Tools", "tools"),
        ("Look it up", "tools"),
        ("get_time", "tools"),
        ("Weather in Ulm", "messages[1]"),
        ("Ulm?", "messages[1]"),
        ('city": "Ulm', "messages[2..3]"),
        ("sunny<", "messages[2..3]"),
        ("It is sunny", "messages[4]"),
        ("And now", "messages[5]"),
    ):
        assert it.part_at(text.index(needle) + 1) == part, needle
    assert it.part_at(len(text)) == it.part_at(len(text) - 3) == "generation_prompt"
    assert it.part_at(text.index("And now?") + len("And now?")) == "messages[5]", "it may go on"


def test_the_template_s_own_text_and_tools_before_the_last_message() -> None:
    chat = [message("user", "Hi"), message("assistant", "Hello!"), message("user", "What time?")]
    text, it = parts(INST, chat, TOOLS)
    for needle, part in (
        ("You are", "template"),
        ("of the house", "template"),
        ("Hi [", "messages[0]"),
        ("Hello", "messages[1]"),
        ("Look it up", "tools"),
        ("What time", "messages[2]"),
    ):
        assert it.part_at(text.index(needle) + 1) == part, needle


def test_a_message_that_the_template_leaves_out_shares_a_part() -> None:
    chat = [message("user", "One."), message("assistant", "gone"), message("user", "Three.")]
    source = (
        "{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}"
        "{% if add_generation_prompt %}<{% endif %}"
    )
    text, it = parts(source, chat)
    assert it.part_at(text.index("One") + 1) == "messages[0]"
    assert it.part_at(text.index("Three") + 1) == "messages[1..2]"
    assert parts(source, [message("assistant", "gone")])[1].part_at(1) == "messages[0]"


CONTENT = st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1, max_size=30)


@given(st.lists(CONTENT, min_size=1, max_size=6), st.integers(0, 5), CONTENT)
@pytest.mark.parametrize("source", [CHATML, INST])
def test_where_two_chats_differ_is_in_the_message_that_was_changed(
    source: str, contents: list[str], index: int, other: str
) -> None:
    """Each content has its number around it, so that no content is part of the template."""

    def chat(texts: list[str]) -> list[dict[str, object]]:
        roles = ("user", "assistant")
        return [message(roles[i % 2], f"{i}§{text.strip()}§{i}") for i, text in enumerate(texts)]

    index %= len(contents)
    changed = [*contents[:index], other, *contents[index + 1 :]]
    text, it = parts(source, chat(changed))
    earlier, _ = parts(source, chat(contents))
    if text == earlier:
        return
    pairs = zip(text, earlier, strict=False)
    offset = next(i for i, (new, old) in enumerate(pairs) if new != old)
    assert it.part_at(offset) == f"messages[{index}]"


def test_a_token_is_found_by_those_before_it() -> None:
    chat = [message("user", "Grüße"), message("assistant", "x")]
    text, it = parts(INST, chat)
    token_ids = WORDS.encode(text)  # one token a byte, and <s> in front
    before = WORDS.encode(text[: text.index("Grüße") + 3])
    assert token_ids[: len(before)] == before
    assert it.part_after(before[1:]) == "messages[0]"


class Counted(str):
    """A text that counts the characters which are searched."""

    num_searched = 0

    def rfind(self, wanted: str, start: int = 0, end: int = 0) -> int:  # type: ignore[override]
        self.num_searched += end - start
        return super().rfind(wanted, start, end)


def test_text_made_to_be_searched_in_vain_is_searched_a_few_times_only() -> None:
    chat = [message("user", "a" * 31 + "b") for _ in range(2000)]
    text = Counted("a" * 100_000)
    it = outline(WORDS, text, chat, [])
    assert len(it.ends) == 0 and it.num_bytes == 0
    assert text.num_searched <= 3 * len(text)
