"""Tokenizer and detokenizers: incremental text equals whole text, for every kind of vocabulary."""

from __future__ import annotations

import codecs
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from router.text.tokenizer import Tokenizer, TooManyTokens
from wire.errors import ErrorCode, WireError

CORPUS = ["the cat sat on the mat and asked for more", "ünïcödé, 日本語 and 🎉 too"] * 8


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<plain added>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """A vocabulary as of Llama 2 and Mistral: a leading-space sign, bytes for rare characters."""
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for piece in ("▁", "▁the", "▁cat", "t", "h", "e", "c", "a", "é"):
        vocab[piece] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("ca", "t"), ("▁", "cat")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


BYTE_BACKEND = byte_level()
BYTE_LEVEL = Tokenizer(BYTE_BACKEND)
BYTE_FALLBACK = Tokenizer(byte_fallback())
TEXTS = st.text(alphabet="the cat é日🎉\n", max_size=20)


def streamed(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None) -> str:
    detokenizer = tokenizer.detokenizer(prompt or [])
    text = "".join([*map(detokenizer.feed, token_ids), detokenizer.flush()])
    in_json = map(tokenizer.detokenizer(prompt or []).feed_json, token_ids)
    assert text.startswith("".join(map(json.loads, in_json)))
    together = tokenizer.detokenizer(prompt or [])
    half = len(token_ids) // 2
    texts = [*together.feed_all(token_ids[:half]), *together.feed_all(token_ids[half:])]
    assert len(texts) == len(token_ids)
    assert "".join([*texts, together.flush()]) == text
    return text


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
@given(text=TEXTS)
def test_the_stream_of_a_text_is_that_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer, token_ids) == tokenizer.decode(token_ids)


@given(st.lists(st.integers(0, 301), max_size=20))
def test_the_stream_of_any_tokens_is_what_the_tokenizer_says(token_ids: list[int]) -> None:
    assert streamed(BYTE_LEVEL, token_ids) == BYTE_LEVEL.decode(token_ids)


# Often parts of characters, and whole ones between them.
OFTEN = BYTE_BACKEND.encode("🎉ht", add_special_tokens=False).ids
TOKENS = st.lists(st.sampled_from(OFTEN) | st.integers(0, 301), max_size=5)


@given(st.lists(TOKENS, max_size=8), st.booleans(), st.booleans())
@example([[OFTEN[2], OFTEN[0]], [OFTEN[2]]], False, False)  # one met, after half a character
@example([[OFTEN[2], OFTEN[0]], [], [OFTEN[2]]], False, True)
def test_the_text_of_each_token_is_what_its_bytes_make_certain(
    runs: list[list[int]], is_met: bool, is_in_json: bool
) -> None:
    """Though it is looked up where that can be done: after a flush too, and whatever was met."""
    tokenizer = BYTE_LEVEL if is_met else Tokenizer(BYTE_BACKEND)
    detokenizer = tokenizer.detokenizer()
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    for turn, run in enumerate(runs):
        hidden = tokenizer.special_ids
        parts = [b"" if each in hidden else tokenizer.token_bytes(each) for each in run]
        if turn % 2:
            texts = detokenizer.feed_all(run)
        elif is_in_json:
            texts = [json.loads(detokenizer.feed_json(each)) for each in run]
        else:
            texts = [detokenizer.feed(each) for each in run]
        assert list(texts) == [utf8.decode(part) for part in parts]
        if turn % 3 == 2:
            assert detokenizer.flush() == utf8.decode(b"", True)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
def test_half_a_character_never_leaves(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    token_ids = tokenizer.encode("🎉", add_special_tokens=False)
    pieces = [detokenizer.feed(token_id) for token_id in token_ids]
    assert len(token_ids) > 1
    assert "".join(pieces) == pieces[-1] == "🎉"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
def test_an_unfinished_character_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("🎉", add_special_tokens=False)[:-1]
    assert set(streamed(tokenizer, token_ids)) == {"\ufffd"}


def test_a_leading_space_survives_after_a_prompt() -> None:
    prompt = BYTE_FALLBACK.encode("the", add_special_tokens=False)
    assert streamed(BYTE_FALLBACK, BYTE_FALLBACK.encode("cat"), prompt) == " cat"


def test_a_special_token_does_not_take_the_space_of_the_next_one() -> None:
    prompt = BYTE_FALLBACK.encode("the", add_special_tokens=False)
    assert streamed(BYTE_FALLBACK, [1, *BYTE_FALLBACK.encode("cat")], prompt) == " cat"
    assert streamed(BYTE_FALLBACK, [0, 1, 1, *BYTE_FALLBACK.encode("cat")], prompt) == " cat"


def test_endless_invalid_bytes_are_not_held_forever() -> None:
    detokenizer = BYTE_FALLBACK.detokenizer()
    lead_byte = 2 + 0xF0
    assert any(detokenizer.feed(lead_byte) for _ in range(20))


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
def test_special_and_unknown_tokens_give_no_text(tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer, [0, 1, 999_999]) == ""


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["bytes", "fallback"])
def test_special_tokens_that_are_shown(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens(["[CALL]", "[ARGS]"])
    tokenizer = Tokenizer(backend)
    marks = tokenizer.added_tokens(["[CALL]", "the", "<none>"])
    assert list(marks) == ["[CALL]"]
    text = "the [CALL]cat[ARGS] the"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer((), frozenset(marks.values()))
    shown = "".join([*map(detokenizer.feed, token_ids), detokenizer.flush()])
    every = backend.decode(token_ids, skip_special_tokens=False)
    assert shown == every.replace("[ARGS]", "")
    assert "[CALL]" in shown
    assert streamed(tokenizer, token_ids) == tokenizer.decode(token_ids)
    again = tokenizer.detokenizer((), frozenset(marks.values()))
    in_json = [json.loads(again.feed_json(token_id)) for token_id in token_ids]
    assert "".join([*in_json, again.flush()]) == shown, "though it was hidden meanwhile"


def test_a_special_token_after_half_a_character() -> None:
    half = BYTE_LEVEL.encode("日", add_special_tokens=False)[:1]
    detokenizer = BYTE_LEVEL.detokenizer((), frozenset([1]))
    assert [detokenizer.feed(half[0]), detokenizer.feed(1)] == ["", "\ufffd</s>"]


def test_a_token_as_people_read_it() -> None:
    (token_id,) = BYTE_LEVEL.encode("t", add_special_tokens=False)
    assert BYTE_LEVEL.token_text(token_id) == "t"
    assert BYTE_LEVEL.token_bytes(token_id) == b"t"
    assert BYTE_LEVEL.token_text(0) == "<s>"
    assert BYTE_LEVEL.token_bytes(0) == b"<s>"
    first = BYTE_FALLBACK.token_bytes(BYTE_FALLBACK.encode("é")[-1])
    assert first == "é".encode()


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["bytes", "fallback"])
@given(text=st.text() | TEXTS)
def test_no_text_has_fewer_tokens_than_are_said_without_looking(
    backend: tokenizers.Tokenizer, text: str
) -> None:
    tokenizer = Tokenizer(backend)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.least_tokens(text) <= len(token_ids)
    assert token_ids == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("form", [normalizers.NFC(), normalizers.NFKC(), normalizers.NFKD()])
@pytest.mark.parametrize("text", ["\u03b1\u0313\u0300\u0345", "\u1112\u1161\u11ab", "e\u0301"])
def test_characters_that_become_one(form: Any, text: str) -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([form])
    backend.add_tokens([normalizers.NFC().normalize_str(text) * 16])
    tokenizer = Tokenizer(backend)
    assert tokenizer.least_tokens(text * 1000) > 0
    for count in (1, 16, 1000):
        found = tokenizer.encode(text * count, add_special_tokens=False)
        assert tokenizer.least_tokens(text * count) <= len(found)


def changed(**parts: Any) -> tokenizers.Tokenizer:
    """A tokenizer of bytes with other parts, or with an added token."""
    backend = byte_level()
    if "added" in parts:
        backend.add_special_tokens([parts.pop("added")])
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


REMOVES = pre_tokenizers.Split(" ", behavior="removed")


@pytest.mark.parametrize(
    "backend",
    [
        tokenizers.Tokenizer(models.BPE({"a": 0}, [])),
        tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        changed(pre_tokenizer=pre_tokenizers.Sequence([REMOVES, BYTE_BACKEND.pre_tokenizer])),
        changed(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        changed(normalizer=normalizers.Replace("  ", " ")),
        changed(added=tokenizers.AddedToken("<mask>", lstrip=True)),
        changed(added=tokenizers.AddedToken("<mask>", rstrip=True)),
    ],
)
def test_of_tokenizers_that_drop_text_no_least_is_known(backend: tokenizers.Tokenizer) -> None:
    assert Tokenizer(backend).least_tokens(" " * 100_000) == 0


def test_a_text_of_exactly_the_limit() -> None:
    assert BYTE_LEVEL.encode("b1b1", add_special_tokens=False, max_tokens=4)
    with pytest.raises(TooManyTokens) as caught:
        BYTE_LEVEL.encode("b1b1", add_special_tokens=False, max_tokens=3)
    assert str(caught.value) == "4"


def is_overtaken() -> bool:
    """Whether this thread goes on while another one encodes."""
    began, is_over = threading.Event(), []

    def encode() -> None:
        began.set()
        BYTE_LEVEL.encode("the cat sat on the mat " * 20_000)
        is_over.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        began.wait()
        is_first = not is_over
        thread.join()
        return is_first
    finally:
        sys.setswitchinterval(interval)


def test_encoding_lets_others_run() -> None:
    """With threads that never have to give way, only a call that releases the GIL lets them.

    The encoding may be over all the same before this thread gets a core.
    """
    assert any(is_overtaken() for _ in range(20))


def test_truncation_in_the_file_is_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("x y " * 50)) > 64
    assert len(Tokenizer.load(tmp_path).encode("x")) == 2


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tmp_path)
    assert not tokenizer.has_text
    assert tokenizer.vocab_size is None
    assert tokenizer.decode([1, 2]) == streamed(tokenizer, [1, 2]) == ""
    assert tokenizer.token_text(7) == "token_id:7"
    with pytest.raises(WireError, match="token ids") as caught:
        tokenizer.encode("a")
    assert caught.value.code == ErrorCode.INVALID_REQUEST


def test_vocab_size_counts_added_tokens() -> None:
    assert BYTE_LEVEL.vocab_size == BYTE_LEVEL.encode("<plain added>")[-1] + 1
