"""`bad_words`: words that an answer must not contain, as sequences of token ids.

Only the sequences that the tokenizer produces for a word are forbidden, as in vLLM.  If a structure
allows nothing but the word, the model could still spell the word with other tokens, so a request
with both `bad_words` and a structure is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.api.errors import invalid
from router.text.tokenizer import Tokenizer
from wire.options import MAX_BAD_SEQUENCE_LENGTH


def bad_sequences(
    tokenizer: Tokenizer, words: Sequence[str], structure: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of each word at the start of a text and after a space.

    The second is omitted if it ends with the first.  `structure` is the name of the field
    that constrains the answer, or empty.
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
