"""Converts text to token ids and back, with the model's own tokenizer.json.

A stream is decoded token by token: `Detokenizer.feed` returns only complete characters.  Byte-level
vocabularies (Llama 3, Qwen, our demo) are decoded with a table of bytes, and all others by decoding
a short window of tokens twice (prefix and read offset).  Special tokens have no text.

A model directory without tokenizer.json works too: prompts must then be token ids, stop strings are
refused, and the text of every answer is empty (use `return_token_ids`).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import tokenizers
from tokenizers import decoders, models

from wire.errors import ErrorCode, WireError
from wire.process.model import ModelError

REPLACEMENT: Final = "\ufffd"
# How many prompt tokens the window decoder gets as context, to keep an answer's leading space.
CONTEXT_TOKENS: Final = 6
# A character has at most 4 bytes, hence 4 byte tokens: with more tokens, the bytes are invalid.
MAX_HELD_TOKENS: Final = 8
# Unicode composition merges at most four characters into one (for example into U+1F82).
MAX_COMPOSED: Final = 4
_encode: Final = msgspec.json.Encoder().encode
_utf8_decoder: Final = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes the tokens of one stream; this base class, for models without a tokenizer, to ""."""

    __slots__ = ()

    def feed(self, token_id: int) -> str:
        """Decode a token, and return the text that is complete now; it may be empty."""
        return ""

    def feed_all(self, token_ids: Sequence[int]) -> list[str]:
        """Decode several tokens, and return the text of each."""
        return list(map(self.feed, token_ids))

    def feed_json(self, token_id: int) -> bytes:
        """Decode a token, and return its text as a JSON string."""
        return _encode(self.feed(token_id))

    def flush(self) -> str:
        """Return the remaining text at the end; an incomplete character becomes U+FFFD."""
        return ""


class TooManyTokens(Exception):
    """A text has too many tokens; the only argument is their number, in words."""


class Tokenizer:
    """The tokenizer of one model; without tokenizer.json, `has_text` is False."""

    def __init__(self, backend: tokenizers.Tokenizer | None) -> None:
        self._backend = backend
        self._is_byte_level = backend is not None and isinstance(
            backend.decoder, decoders.ByteLevel
        )
        added = backend.get_added_tokens_decoder() if backend else {}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token.content: token_id for token_id, token in added.items()}
        # The bytes of tokens, for each set of special tokens without text; there are few such sets.
        self._tables: dict[frozenset[int], _TokenBytes] = {}
        if backend is not None:
            # Some tokenizer.json files still have the training script's settings.
            backend.no_truncation()
            backend.no_padding()
        self._max_token_chars = None if backend is None else _max_token_chars(backend)

    @classmethod
    def load(cls, model_path: Path) -> Tokenizer:
        """Read ``model_path/tokenizer.json`` if it is there.

        Raises:
            ModelError: The file is not a valid tokenizer.
        """
        path = model_path / "tokenizer.json"
        if not path.is_file():
            return cls(None)
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"{path}: {error}") from error

    @property
    def has_text(self) -> bool:
        return self._backend is not None

    @property
    def vocab_size(self) -> int | None:
        """The largest token id plus one, including added tokens; None without a tokenizer."""
        if self._backend is None:
            return None
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Tokenize `text` to at most `max_tokens` ids.

        Raises:
            TooManyTokens: The text has more tokens.
            WireError: INVALID_REQUEST; the model has no tokenizer.
        """
        if self._backend is None:
            raise WireError(
                ErrorCode.INVALID_REQUEST,
                "this model has no tokenizer.json: send the prompt as token ids",
            )
        if max_tokens is not None and (least := self.least_tokens(text)) > max_tokens:
            raise TooManyTokens(f"at least {least}")
        # Unlike `encode`, this method releases the GIL; it does not return offsets.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokens(str(len(encoding)))
        return encoding.ids

    def least_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens of `text`, without tokenizing it."""
        if self._max_token_chars is None:
            return 0
        return -(-len(text) // self._max_token_chars)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids; unknown ids are skipped.  Return "" without a tokenizer."""
        if self._backend is None:
            return ""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token, special or not, as log-probabilities show it."""
        if self._backend is None:
            return f"token_id:{token_id}"
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be an incomplete character."""
        if self._is_byte_level and token_id not in self.special_ids:
            return self._table_without(self.special_ids)[token_id]
        return self.token_text(token_id).encode()

    def vocabulary_entry(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; empty if the id is unknown."""
        return self._backend.id_to_token(token_id) or "" if self._backend is not None else ""

    def added_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of those `texts` that are added tokens."""
        return {text: self._added[text] for text in texts if text in self._added}

    def detokenizer(
        self, prompt: Sequence[int] = (), shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Return a decoder for the tokens after `prompt`; `shown` are special tokens with text."""
        if self._backend is None:
            return Detokenizer()
        hidden = self.special_ids - shown
        if self._is_byte_level:
            return _ByteDetokenizer(self._table_without(hidden))
        return _WindowDetokenizer(self._backend, hidden, prompt[-CONTEXT_TOKENS:])

    def _table_without(self, hidden: frozenset[int]) -> _TokenBytes:
        assert self._backend is not None
        table = self._tables.get(hidden)
        if table is None:
            table = self._tables[hidden] = _TokenBytes(self._backend, hidden)
        return table


class _TokenBytes(dict[int, bytes]):
    """Maps a token id to the bytes of the token, computed on first use.

    `texts` and `jsons` cache the decoded and JSON-encoded text of tokens that are complete
    characters.  They are lists, because dict lookups cause more cache misses.
    """

    def __init__(self, backend: tokenizers.Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self.texts: list[str | None] = [None] * backend.get_vocab_size()
        self.jsons: list[bytes | None] = [None] * len(self.texts)
        self._backend = backend
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._backend.id_to_token(token_id)
        token_bytes = self[token_id] = _byte_level(token or "")
        return token_bytes


class _ByteDetokenizer(Detokenizer):
    """Decodes by table: between characters, the text of a token depends on that token alone."""

    __slots__ = ("_is_between", "_jsons", "_table", "_texts", "_utf8")

    def __init__(self, table: _TokenBytes) -> None:
        self._table, self._texts, self._jsons = table, table.texts, table.jsons
        self._utf8 = _utf8_decoder("replace")
        self._is_between = True

    def feed(self, token_id: int) -> str:
        texts, was_between = self._texts, self._is_between
        if was_between and token_id < len(texts) and (known := texts[token_id]) is not None:
            return known
        text = self._utf8.decode(self._table[token_id])
        self._is_between = not self._utf8.getstate()[0]
        if was_between and self._is_between and token_id < len(texts):
            texts[token_id] = text
        return text

    def feed_all(self, token_ids: Sequence[int]) -> list[str]:
        if self._is_between:
            try:
                known = list(map(self._texts.__getitem__, token_ids))
            except IndexError:
                known = [None]
            if None not in known:
                return cast(list[str], known)
        return super().feed_all(token_ids)

    def feed_json(self, token_id: int) -> bytes:
        jsons, was_between = self._jsons, self._is_between
        if was_between and token_id < len(jsons) and (known := jsons[token_id]) is not None:
            return known
        json_text = _encode(self.feed(token_id))
        if was_between and self._is_between and token_id < len(jsons):
            jsons[token_id] = json_text
        return json_text

    def flush(self) -> str:
        self._is_between = True
        return self._utf8.decode(b"", True)


class _WindowDetokenizer(Detokenizer):
    """Decodes a window of tokens: `_read` tokens of context, then tokens without certain text."""

    __slots__ = ("_backend", "_hidden", "_read", "_shown", "_window")

    def __init__(
        self, backend: tokenizers.Tokenizer, hidden: frozenset[int], context: Sequence[int]
    ) -> None:
        self._backend = backend
        self._hidden = hidden
        self._window = [token_id for token_id in context if token_id not in hidden]
        self._read = len(self._window)
        self._shown = self._decode(self._window)

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = len(self._window) - self._read
        is_uncertain = len(text) <= len(self._shown) or text.endswith(REPLACEMENT)
        if is_uncertain and num_held <= MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._window))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _advance(self, text: str) -> str:
        certain = text[len(self._shown) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._shown = self._decode(self._window)
        return certain


def _max_token_chars(backend: tokenizers.Tokenizer) -> int | None:
    """Return the maximum number of characters of text per token; None if unknown.

    It is known for byte-pair encodings with a token for every byte.  Other tokenizers may drop
    unknown text or convert any length of it to one token.
    """
    model, vocab = backend.model, backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder().values()
    if not isinstance(model, models.BPE) or any(token.lstrip or token.rstrip for token in added):
        return None  # Such an added token absorbs any number of spaces.
    splits, normalizers = _parts(backend.pre_tokenizer), _parts(backend.normalizer)
    is_byte_level = any(part["type"] == "ByteLevel" for part in splits)
    alphabet = _bytes_of_chars() if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    knows_all = (is_byte_level or model.byte_fallback) and all(char in vocab for char in alphabet)
    if not knows_all or not all(map(_keeps_text, splits)):
        return None
    longest = max(map(len, vocab))
    if backend.normalizer is not None:  # Added tokens are matched in normalized form.
        normal = [backend.normalizer.normalize_str(token.content) for token in added]
        longest = max([longest, *map(len, normal)])
    for part in normalizers:
        if part["type"] in ("NFC", "NFKC"):
            longest *= MAX_COMPOSED
        elif not _keeps_text(part):
            return None
    return longest


def _parts(component: Any) -> list[dict[str, Any]]:
    """Return the JSON of a normalizer or pre-tokenizer and of all its nested components."""
    if component is None:
        return []
    found, stack = [], [json.loads(component.__getstate__())]
    while stack:
        part = stack.pop()
        stack += part.get("normalizers", []) + part.get("pretokenizers", [])
        found.append(part)
    return found


def _keeps_text(part: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer never shortens a text."""
    match part:
        case {
            "type": "Sequence" | "ByteLevel" | "Metaspace" | "Digits" | "Prepend" | "NFD" | "NFKD"
        }:
            return True
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return len(content) >= len(pattern)
    return False


@cache
def _bytes_of_chars() -> dict[str, int]:
    """Map the printable characters of byte-level vocabularies to bytes, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def _byte_level(token: str) -> bytes:
    table = _bytes_of_chars()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # An added token, which is plain text.
        return token.encode()
