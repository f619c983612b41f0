"""Samples the next token of each row, greedily or with a counter-based random number generator.

The random number of a row is a pure function of (seed, choice, position), so a sequence continues
identically on another worker, in another batch, or after a retry:

    mix(x): x ^= x >> 30; x *= 0xBF58476D1CE4E5B9
            x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
    key   = mix(mix(seed + G) + (choice + 1) * G)     G = 0x9E3779B97F4A7C15, all modulo 2^64
    u     = (mix(key + (position + 1) * G) >> 12) / 2^52

As the position grows, u follows the SplitMix64 stream that starts at `key`.  The sampled token is
the first one, by id, at which the cumulative weight exceeds u times the total weight.  A weight is
exp((logit - max) / temperature), rounded to a multiple of 2^-42 (`kernels.contract.SAMPLING`).
Only tokens that pass these filters count, applied in this order:

    top_k  tokens whose logits are not below the k-th largest
    top_p  the fewest most likely tokens whose share of the weight left by top_k reaches top_p
    min_p  tokens whose weights are not below min_p times the largest

Tokens tied at a filter's threshold all pass.  Penalties and logit_bias
(`worker.executor.penalties`) are applied first, then masks (`worker.executor.masks`).
Log-probabilities are computed from the logits before any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

import kernels
from kernels.cuda.pinned import Ints, upload
from wire.logprobs import LEAST_LOGPROB, Logprobs
from worker.executor.batch import Row, Sampling, Scoring, rows_of
from worker.executor.contract import SampledToken
from worker.executor.grammars import Masks
from worker.executor.masks import mask
from worker.executor.penalties import adjust

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
# The number of prompt rows scored at a time: with a large vocabulary, 128 rows take 80 MB.
_SCORED_ROWS: Final = 128

Uint64 = npt.NDArray[np.uint64]


class NoTokenLeft(Exception):
    """All tokens of `row` are masked, so none can be sampled."""

    def __init__(self, row: int) -> None:
        self.row = row
        super().__init__("the options together leave no token that may be drawn")


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    eos_token_ids: frozenset[int],
    structures: Masks | None = None,
) -> list[SampledToken]:
    """Sample a token for each row.

    Args:
        logits: [R, vocab] float32; not modified.
        samplings: Together they have R rows.
        eos_token_ids: Masked, with a request's own stop ids, until its min_tokens are reached.
        structures: The masks of structured output, if any.

    Raises:
        NoTokenLeft: The options of a request together mask every token.
    """
    if not samplings:
        return []
    over, bits = (structures.over, structures.bits) if structures is not None else ((), None)
    allowed = mask(adjust(logits, samplings), samplings, eos_token_ids, over)
    token_ids: list[int] = draw(allowed, samplings, bits).tolist()
    for row in rows_of(samplings, _may_lack_all):
        token_id = token_ids[row.index]
        if token_id < 0 or allowed[row.index, token_id] == -torch.inf:
            raise NoTokenLeft(row.index)
    tokens = [SampledToken(token_id) for token_id in token_ids]
    if scored := rows_of(samplings, lambda it: it.options.logprobs is not None):
        indexes = [row.index for row in scored]
        numbers = [row.options.logprobs or 0 for row in scored]
        chosen = [token_ids[index] for index in indexes]
        found = _logprobs(logits[indexes], chosen, numbers)
        for index, logprobs in zip(indexes, found, strict=True):
            tokens[index] = SampledToken(token_ids[index], logprobs)
    return tokens


def draw(
    logits: torch.Tensor, samplings: Sequence[Sampling], bits: npt.NDArray[np.int32] | None = None
) -> torch.Tensor:
    """Start to sample a token for each row; return [R] int64 on the device.

    Args:
        logits: [R, vocab] float32, after penalties and masks.
        bits: The masks of structured output, in the format of `kernels.draw`.
    """
    settings = None
    if bits is not None or any(it.options.temperature != 0 for it in samplings):
        settings = _on(logits.device, _settings(rows_of(samplings)))
    allowed = None if bits is None else _on(logits.device, bits)
    return kernels.draw(logits, settings, allowed)


@torch.inference_mode()
def score(logits: torch.Tensor, scorings: Sequence[Scoring]) -> list[bytes]:
    """Return the packed prompt logprobs of each scoring (`wire.logprobs`).

    Args:
        logits: [Q, vocab] float32; not modified.
        scorings: Together they have Q next tokens.
    """
    packed, start = [], 0
    for scoring in scorings:
        end = start + len(scoring.next_token_ids)
        packed.append(_scored(logits[start:end], scoring))
        start = end
    return packed


def uniforms(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Return a random number in [0, 1) for each (seed, choice, position)."""
    seed, choice, position = (np.array(words, np.uint64) for words in (seeds, choices, positions))
    one = np.uint64(1)
    key = _mix(_mix(seed + _GOLDEN) + (choice + one) * _GOLDEN)
    # With 53 bits, u * total could round up to the total, and no token would be selected.
    bits = _mix(key + (position + one) * _GOLDEN) >> np.uint64(12)
    return bits.astype(np.float64) * 2.0**-52


def _mix(x: Uint64) -> Uint64:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _may_lack_all(sampling: Sampling) -> bool:
    """Return whether the request's options together may mask all tokens."""
    options = sampling.options
    is_held = sampling.structured is not None and options.min_tokens > 0
    return is_held or bool(options.allowed_token_ids or options.bad_sequences)


def _on(device: torch.device, rows: Ints) -> torch.Tensor:
    return torch.from_numpy(rows) if device.type == "cpu" else upload([rows], device)[0]


def _settings(rows: list[Row]) -> npt.NDArray[np.int64]:
    """Return the sampling parameters of rows, [R, 5] int64, in the format of `kernels.draw`."""
    options = [row.options for row in rows]
    settings = np.empty(len(rows), kernels.SAMPLING)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        settings[name] = [getattr(it, name) for it in options]
    settings["uniform"] = uniforms(
        [option.seed for option in options],
        [option.choice for option in options],
        [row.position for row in rows],
    )
    return settings.view(np.int64).reshape(len(rows), -1)


def _log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of every token, clamped to finite values for the wire."""
    return logits.log_softmax(dim=-1).clamp_(LEAST_LOGPROB, 0.0)


def _logprobs(logits: torch.Tensor, token_ids: list[int], numbers: list[int]) -> list[Logprobs]:
    """Return for each row the log-probabilities of its token and of its `numbers` top tokens."""
    scores = _log_probabilities(logits)
    chosen: list[float] = scores[range(len(token_ids)), token_ids].tolist()
    best = scores.topk(min(max(numbers), scores.shape[1]))
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Logprobs(logprob=logprob, top=tuple(zip(ids[:number], values[:number], strict=True)))
        for logprob, number, (ids, values) in zip(chosen, numbers, tops, strict=True)
    ]


def _scored(logits: torch.Tensor, scoring: Scoring) -> bytes:
    num_top = min(scoring.num_top, logits.shape[1])
    words = np.empty((len(logits), 1 + 2 * num_top), "<u4")
    floats = words.view("<f4")
    for start in range(0, len(logits), _SCORED_ROWS):
        part = slice(start, min(start + _SCORED_ROWS, len(logits)))
        scores = _log_probabilities(logits[part])
        token_ids = torch.tensor(scoring.next_token_ids[part], device=scores.device)
        best = scores.topk(num_top)
        floats[part, 0] = scores.gather(1, token_ids[:, None])[:, 0].cpu().numpy()
        words[part, 1::2] = best.indices.cpu().numpy()
        floats[part, 2::2] = best.values.cpu().numpy()
    return words.tobytes()
