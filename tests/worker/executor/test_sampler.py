"""Draws follow the distribution, depend on nothing but their own row, and equal plain NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.options import Options
from worker.executor import sampler
from worker.executor.batch import Sampling
from worker.executor.sampler import sample, uniforms
from worker.executor.token_counts import Occurrences

NO_EOS: frozenset[int] = frozenset()
VOCAB = 48


def asked(position: int = 7, prompt_len: int = 3, **options: Any) -> Sampling:
    return Sampling(1, Options(**options), position, prompt_len, [])


def logits_of(num_rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * scale


def ids(logits: torch.Tensor, samplings: list[Sampling], eos: frozenset[int] = NO_EOS) -> list[int]:
    return [token.token_id for token in sample(logits, samplings, eos)]


# SplitMix64, written again on Python's integers.
def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def plain_uniform(seed: int, choice: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) % 2**64) + (choice + 1) * golden) % 2**64)
    return (mix((key + (position + 1) * golden) % 2**64) >> 12) / 2**52


def plain_draw(row: npt.NDArray[np.float32], it: Sampling) -> int:
    """The documented algorithm for one row, token by token."""
    options = it.options
    largest = float(row.max())
    weights = [math.exp((float(value) - largest) / options.temperature) for value in row]
    ranked = sorted(weights, reverse=True)
    if 0 < options.top_k < len(weights):
        border = ranked[options.top_k - 1]
        weights = [weight if weight >= border else 0.0 for weight in weights]
    if options.top_p < 1:
        ranked = sorted(weights, reverse=True)
        total = math.fsum(weights)
        held, border = 0.0, ranked[-1]
        for weight in ranked:
            held += weight
            if held >= options.top_p * total:
                border = weight
                break
        weights = [weight if weight >= border else 0.0 for weight in weights]
    weights = [weight if weight >= options.min_p else 0.0 for weight in weights]
    target = plain_uniform(options.seed, options.choice, it.position) * math.fsum(weights)
    held = 0.0
    for token_id, weight in enumerate(weights):
        held += weight
        if held > target:
            return token_id
    raise AssertionError("u < 1, so some token is drawn")


@given(
    words=st.lists(
        st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**16 - 1), st.integers(0, 2**31 - 1)),
        min_size=1,
        max_size=8,
    )
)
def test_the_generator_is_the_documented_one(words: list[tuple[int, int, int]]) -> None:
    got = uniforms(*zip(*words, strict=True))
    assert got.tolist() == [plain_uniform(*word) for word in words]
    assert ((got >= 0) & (got < 1)).all()


options_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, VOCAB, VOCAB + 5]),
        "top_p": st.sampled_from([1.0, 0.99, 0.8, 0.3, 0.001]),
        "min_p": st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        "seed": st.integers(0, 2**63 - 1),
        "choice": st.integers(0, 2**16 - 1),
    }
)


@settings(max_examples=80)
@given(
    rows=st.lists(st.tuples(options_strategy, st.integers(3, 500)), min_size=1, max_size=6),
    seed=st.integers(0, 100),
)
def test_filters_and_draws_equal_plain_python(
    rows: list[tuple[dict[str, Any], int]], seed: int
) -> None:
    logits = logits_of(len(rows), seed=seed)
    samplings = [asked(position=position, **options) for options, position in rows]
    want = [plain_draw(row.numpy(), it) for row, it in zip(logits, samplings, strict=True)]
    assert ids(logits, samplings) == want


@settings(max_examples=40)
@given(
    rows=st.lists(options_strategy | st.just({"temperature": 0.0}), min_size=2, max_size=8),
    data=st.data(),
)
def test_a_row_does_not_depend_on_its_batch_mates(
    rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    logits = logits_of(len(rows), seed=4)
    samplings = [asked(position=5 + i, **options) for i, options in enumerate(rows)]
    together = ids(logits, samplings)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = ids(logits[order], [samplings[i] for i in order])
    assert shuffled == [together[i] for i in order]
    alone = [ids(logits[i : i + 1], [samplings[i]])[0] for i in range(len(rows))]
    assert alone == together


@settings(max_examples=40)
@given(
    options=options_strategy | st.just({"temperature": 0.0}),
    more=st.fixed_dictionaries(
        {
            "min_tokens": st.integers(0, 4),
            "repetition_penalty": st.sampled_from([1.0, 1.7]),
            "presence_penalty": st.sampled_from([0.0, 1.2]),
            "logprobs": st.none() | st.integers(0, 3),
        }
    ),
    drafts=st.lists(st.integers(0, VOCAB - 1), max_size=4).map(tuple),
)
def test_a_row_after_drafts_is_that_of_the_text_with_them(
    options: dict[str, Any], more: dict[str, Any], drafts: tuple[int, ...]
) -> None:
    asked_for = Options(**options, **more)
    text, prompt_len, eos = [5, 9, 5, 11], 3, frozenset({2})

    def sampling(tokens: list[int], drafted: tuple[int, ...] = ()) -> Sampling:
        kept = Occurrences(text, prompt_len) if drafted else None
        return Sampling(1, asked_for, len(tokens), prompt_len, tokens, kept, drafted)

    other = Sampling(2, Options(), 7, 3, [])
    logits = logits_of(len(drafts) + 3, seed=6)
    together = sample(logits, [other, sampling(text, drafts), other], eos)
    alone = [sampling([*text, *drafts[:d]]) for d in range(len(drafts) + 1)]
    assert together == sample(logits, [other, *alone, other], eos)


def test_a_draw_of_zero_takes_the_first_token_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda *words: np.zeros(len(words[0])))
    logits = torch.tensor([[0.0, 5.0, 4.0]])
    assert ids(logits, [asked(temperature=1.0, top_k=2)]) == [1]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_of(4)
    samplings = [
        asked(logprobs=3),
        asked(),
        asked(logprobs=0, temperature=1.5, top_k=5, seed=2),
        asked(logprobs=20, min_tokens=9),
    ]
    tokens = sample(logits, samplings, frozenset(range(40)))
    want = logits.double().log_softmax(-1)
    assert tokens[1].logprobs is None
    for row, number in ((0, 3), (2, 0), (3, 20)):
        logprobs = tokens[row].logprobs
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(float(want[row, tokens[row].token_id]), abs=1e-5)
        best = want[row].topk(number)
        assert [token_id for token_id, _ in logprobs.top] == best.indices.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, 8), [], NO_EOS) == []
