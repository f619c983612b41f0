"""`bad_words`: words kept out of an answer, as sequences of token ids.

Where an answer is held to a structure, other tokens may spell the word if nothing else is left: a
request that asks for both is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.api.errors import invalid
from router.text.tokenizer import Tokenizer
from wire.options import MAX_BAD_SEQUENCE_LENGTH


def bad_sequences(
    tokenizer: Tokenizer, words: Sequence[str], structure: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word: as it begins a text, and as it follows a space.

    The latter only where the space is a part of a token of the word.  Spellings of other tokens are
    not found; vLLM, from which clients know `bad_words`, does not find them either.

    `structure` is the field that the answer is held to, if there is one.
    """
    if words and structure:
        raise invalid(
            "bad_words",
            f"the answer is held to {structure}, which can be met with other tokens that spell the "
            "same words; leave them out there, and send no bad_words",
        )
    if words and not tokenizer.has_text:
        raise invalid("bad_words", "needs a tokenizer, and this model has none")
    found = []
    for index, word in enumerate(words):
        bare, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False))
            for text in (word.lstrip(), " " + word.lstrip())
        )
        if not 1 <= len(bare) <= MAX_BAD_SEQUENCE_LENGTH:
            expected = f"not 1 to {MAX_BAD_SEQUENCE_LENGTH}"
            raise invalid(f"bad_words[{index}]", f"has {len(bare)} tokens, {expected}")
        found.append(bare)
        if spaced[-len(bare) :] != bare:
            found.append(spaced)
    return tuple(found)
