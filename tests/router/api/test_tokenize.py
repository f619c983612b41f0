"""Text to ids and back over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.api.errors import HttpError
from router.api.model import ServedModel
from router.api.requests.body import parse
from router.api.requests.value_count import MAX_NUMBERS
from router.api.tokenize import TokenizeBody, detokenize, tokenize
from tests.router.api.asking import CHAT, letters, raw, refusal
from tests.router.site import ids


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    return letters(tmp_path)


def test_tokenize_and_back(model: ServedModel) -> None:
    answer = json.loads(tokenize(model, raw(prompt="hé"), 100))
    assert answer == {"tokens": [0, *ids("hé")], "count": 4, "max_model_len": 100}
    assert json.loads(detokenize(model, raw(tokens=answer["tokens"]))) == {"prompt": "<s>hé"}
    entries = json.loads(tokenize(model, raw(prompt="hé", return_token_strs=True), 100))
    assert entries == answer | {"token_strs": ["<s>", "h", "Ã", "©"]}
    chat = json.loads(tokenize(model, raw(messages=CHAT, add_generation_prompt=False), None))
    assert chat["tokens"] == [0, *ids("user:hi\n")]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    same = json.loads(tokenize(model, raw(messages=parts, add_generation_prompt=False), None))
    assert same == chat


@pytest.mark.parametrize("name", ["prompt", "messages"])
def test_a_text_that_is_too_long_is_named_as_it_was_sent(model: ServedModel, name: str) -> None:
    text = "x" * (MAX_NUMBERS + 1)
    sent = text if name == "prompt" else [{"role": "user", "content": text}]
    with pytest.raises(HttpError) as caught:
        tokenize(model, raw(**{name: sent}), 100)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_tokenize_wants_one_of_two() -> None:
    assert refusal(TokenizeBody, prompt="a").param == "prompt"
    with pytest.raises(HttpError):
        parse(TokenizeBody, b"{}")
    assert parse(TokenizeBody, b'{"prompt": ""}').prompt == ""
