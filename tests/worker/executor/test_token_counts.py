"""Occurrences are what counting the tokens again gives, however they came."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from worker.executor.token_counts import Occurrences

TOKENS = st.lists(st.integers(0, 9) | st.integers(0, 500), max_size=80)


def counted(occurrences: Occurrences) -> dict[int, int]:
    token_ids = occurrences.token_ids.tolist()
    assert len(set(token_ids)) == len(token_ids)
    return dict(zip(token_ids, occurrences.counts.tolist(), strict=True))


def plain(prompt: list[int], answer: list[int]) -> dict[int, int]:
    return dict.fromkeys(prompt, 0) | Counter(answer)


@given(prompt=TOKENS, answer=TOKENS, cuts=st.lists(st.integers(0, 80), max_size=6))
def test_counts_are_those_of_the_answer(
    prompt: list[int], answer: list[int], cuts: list[int]
) -> None:
    token_ids = list(prompt)
    occurrences = Occurrences(token_ids, len(prompt))
    for cut in sorted(cuts):
        token_ids = prompt + answer[:cut]
        occurrences.update(token_ids)
        assert counted(occurrences) == plain(prompt, answer[:cut])
    occurrences.update(prompt + answer)
    assert counted(occurrences) == plain(prompt, answer)
    # Another worker begins with prompt and answer at once.
    assert counted(Occurrences(prompt + answer, len(prompt))) == plain(prompt, answer)


@given(prompt=TOKENS, answer=TOKENS, drafts=TOKENS)
def test_along_drafts_they_are_those_of_the_text_with_them(
    prompt: list[int], answer: list[int], drafts: list[int]
) -> None:
    kept = Occurrences(prompt + answer, len(prompt))
    found = kept.along(drafts)
    assert len(found) == len(drafts) + 1
    for number, (token_ids, counts) in enumerate(found):
        assert len(token_ids) == len(set(token_ids.tolist()))
        expected = plain(prompt, answer + drafts[:number])
        assert dict(zip(token_ids.tolist(), counts.tolist(), strict=True)) == expected
    assert counted(kept) == plain(prompt, answer), "drafts are not kept"


@given(prompt=TOKENS, answer=TOKENS, drafts=TOKENS, more=TOKENS, later=TOKENS)
def test_rewound_tokens_are_not_counted(
    prompt: list[int], answer: list[int], drafts: list[int], more: list[int], later: list[int]
) -> None:
    text = prompt + answer
    occurrences = Occurrences(text, len(prompt))
    occurrences.update(text + drafts)
    occurrences.rewind(text + drafts + more, len(text))
    assert counted(occurrences) == plain(prompt, answer)
    occurrences.rewind(text + more, len(text) + len(more))
    occurrences.update(text + later)
    assert counted(occurrences) == plain(prompt, answer + later)
