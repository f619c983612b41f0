"""Bad words as tokens of the demo model, whose words begin with their space."""

from __future__ import annotations

import pytest

from router.api.errors import HttpError
from router.api.requests.bad_words import bad_sequences
from router.text.tokenizer import Tokenizer
from wire.process.model import DEMO

WORDS = Tokenizer.load(DEMO)


def texts(*words: str) -> list[str]:
    return [WORDS.decode(sequence) for sequence in bad_sequences(WORDS, words)]


def test_a_word_is_bad_at_the_beginning_and_after_a_space() -> None:
    assert texts("the") == ["the", " the"]
    assert texts(" the") == ["the", " the"]


def test_where_the_space_is_a_token_of_its_own_one_sequence_is_both() -> None:
    [first, *_] = [word for word in ("12", "é", "~") if len(texts(word)) == 1]
    assert texts(first) == [first]


def test_a_word_may_be_several_tokens() -> None:
    assert min(map(len, bad_sequences(WORDS, ["xylophonist"]))) > 1


@pytest.mark.parametrize("word", ["   ", "ab" * 500])
def test_a_word_has_tokens_but_not_too_many(word: str) -> None:
    with pytest.raises(HttpError) as caught:
        bad_sequences(WORDS, ["fine", word])
    assert caught.value.param == "bad_words[1]"


def test_words_need_a_tokenizer() -> None:
    assert bad_sequences(Tokenizer(None), []) == ()
    with pytest.raises(HttpError):
        bad_sequences(Tokenizer(None), ["a"])
