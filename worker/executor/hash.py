"""A fake model for tests: each next token is a hash of all KV bytes that the cache returns.

The KV of a token is a function of its id, position, layer, k or v, and head.  A byte that is lost,
stale, swapped or from another request therefore changes the text; `tests.oracle` computes the right
text.  With `create_mixed`, the second layer has a sliding window and there is a recurrent state as
well, and both are hashed.

One hash in `EOS_PERIOD` gives an EOS token, unless the request ignores EOS or has not reached its
min_tokens; the others are uniform over the rest of the vocabulary.  With a temperature, (seed,
choice, position) are hashed too.  Filters, penalties and logit_bias have no effect.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import structs
from xxhash import xxh3_64_intdigest

from wire.layout import KVGroup, KVLayout, StateGroup
from wire.logprobs import pack_logprobs
from wire.options import Options
from wire.payloads import Logprobs
from wire.process.model import read_json
from wire.transfer import Rectangle
from worker.executor.batch import Batch, Row, Scoring, rows_of
from worker.executor.contract import Capabilities, MemoryRequirements, ModelInfo, SampledToken
from worker.executor.host_kv_cache import HostKVCache

VOCAB_SIZE: Final = 32_000
MAX_MODEL_LEN: Final = 32_768
EOS_TOKEN_IDS: Final = frozenset({2})
EOS_PERIOD: Final = 64
# The 8 bytes of a head are one u64, the type of all arithmetic; a token has 64 bytes of KV.
NUM_LAYERS: Final = 2
NUM_KV_HEADS: Final = 2
LAYOUT: Final = KVLayout.uniform(
    num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=8, dtype="uint8"
)
_LAYER: Final = KVGroup(
    num_layers=1, num_kv_heads=NUM_KV_HEADS, key_dim=8, value_dim=8, dtype="uint8"
)
WINDOW: Final = 13  # no block size divides it
MIXED: Final = KVLayout(
    groups=(
        _LAYER,
        structs.replace(_LAYER, window=WINDOW),
        StateGroup(num_layers=NUM_LAYERS, num_heads=2 * NUM_KV_HEADS, head_bytes=8),
    )
)

_U64 = npt.NDArray[np.uint64]
# A different word for each (layer, k|v, head), so that no two of them have the same KV bytes.
_HEAD_WORDS: Final[_U64] = (
    np.arange(1, 2 * NUM_LAYERS * NUM_KV_HEADS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
).reshape(NUM_LAYERS, 2, NUM_KV_HEADS)


def create(
    *,
    model_path: str | Path | None = None,
    model_name: str = "hash",
    fingerprint: str = "hash",
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    step_delay_s: float = 0.0,
) -> HashExecutor:
    """Create a hash executor, with the model directory's vocabulary and EOS tokens if given.

    `dtype`, `device` and the context length in the directory have no effect.

    Raises:
        ValueError: A file of the model directory is invalid.
    """
    vocab_size, eos_token_ids = VOCAB_SIZE, EOS_TOKEN_IDS
    if model_path is not None:
        vocab_size, eos_token_ids = _read_vocabulary(Path(model_path))
    info = ModelInfo(
        name=model_name,
        fingerprint=fingerprint,
        vocab_size=vocab_size,
        max_model_len=MAX_MODEL_LEN if max_model_len is None else max_model_len,
        eos_token_ids=eos_token_ids,
        layout=LAYOUT,
    )
    return HashExecutor(info, step_delay_s=step_delay_s)


def create_mixed(**settings: Any) -> HashExecutor:
    """Create a hash executor with several kinds of layers; see `create` for `settings`."""
    plain = create(**settings)
    return HashExecutor(replace(plain.info, layout=MIXED), step_delay_s=plain.step_delay_s)


def _read_vocabulary(path: Path) -> tuple[int, frozenset[int]]:
    config = _read_json(path / "config.json")
    eos = _read_json(path / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    vocab_size = config.get("vocab_size", VOCAB_SIZE)
    eos_token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(number, int) for number in (vocab_size, *eos_token_ids)):
        raise ValueError(f"{path}: vocab_size and eos_token_id must be whole numbers")
    return vocab_size, frozenset(eos_token_ids)


def _read_json(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.exists() else {}


class HashKVCache(HostKVCache):
    """The paged KV cache of the hash executor.

    Attributes:
        kv: uint8 [num_blocks, num_layers, k|v, kv_heads, block_size, head_dim].
        window_kv: The same for sliding-window layers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layout: KVLayout = LAYOUT,
        num_states: int = 0,
        num_window_blocks: int = 0,
    ) -> None:
        super().__init__(layout, num_blocks, block_size, num_states, num_window_blocks)
        self.kv: npt.NDArray[np.uint8] = self.items[..., None].view(np.uint8)
        self.window_kv: npt.NDArray[np.uint8] = self.window_items[..., None].view(np.uint8)

    def compute(self, token_ids: npt.NDArray[np.int32], batch: Batch) -> None:
        """Compute and store the KV and the recurrent states of a batch, with [T] `token_ids`."""
        words = kv_words(token_ids, batch.positions)
        num_whole, slots = self.items.shape[1], batch.slots
        blocks, offsets = np.divmod(slots, self.block_size)
        self.items[blocks, ..., offsets] = words[:, :num_whole]
        if self.layout.windows:
            slots, _ = self.window_blocks.of_step(slots, batch.block_tables)
            blocks, offsets = np.divmod(slots, self.block_size)
            self.window_items[blocks, ..., offsets] = words[:, num_whole:]
        arrays = batch.query_starts, batch.context_lens, batch.block_tables
        runs = self.state_slots.runs(*arrays) if self.states else []
        for states in self.states.values():
            of_slot = states.view("<u8")[..., 0]
            for run in runs:
                before = 0 if run.before is None else of_slot[run.before]
                of_slot[run.after] = state_after(words[run.start : run.stop], before)

    def digest(self, block_table: Sequence[int], num_tokens: int) -> int:
        """Hash all KV and states that the last of `num_tokens` tokens attends to."""
        digest = 0
        for index, group in enumerate(self.layout.groups):
            first = num_tokens
            if isinstance(group, KVGroup):
                first = max(0, num_tokens - (group.window or num_tokens))
            tokens = range(first, num_tokens)
            seen = Rectangle(index, range(group.num_layers), range(group.num_heads), tokens)
            is_windowed = isinstance(group, KVGroup) and group.window is not None
            table = self.window_blocks.table(block_table) if is_windowed else block_table
            digest = xxh3_64_intdigest(self.pack(table, seen), seed=digest)
        return digest


class HashExecutor:
    """An executor whose steps take microseconds, plus `step_delay_s`."""

    def __init__(self, info: ModelInfo, *, step_delay_s: float = 0.0) -> None:
        self.info = info
        memory = MemoryRequirements.of(info.layout, info.max_model_len)
        self.capabilities = Capabilities(
            memory=memory, speculative=not info.layout.has_state, arithmetic="hash"
        )
        self.step_delay_s = step_delay_s
        self._cache: HashKVCache | None = None

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> HashKVCache:
        sizes = num_states, num_window_blocks
        self._cache = HashKVCache(num_blocks, block_size, self.info.layout, *sizes)
        return self._cache

    def forward(self, batch: Batch) -> list[int]:
        """Write the batch's KV; return a digest of the whole context for each sampled row."""
        assert self._cache is not None, "allocate comes first"
        if self.step_delay_s:
            time.sleep(self.step_delay_s)
        self._cache.compute(batch.token_ids, batch)
        sequences = np.searchsorted(batch.query_starts, batch.sample_rows, side="right") - 1
        context_lens = batch.positions[batch.sample_rows] + 1
        return [
            self._cache.digest(batch.block_tables[index], num_tokens)
            for index, num_tokens in zip(sequences, context_lens.tolist(), strict=True)
        ]

    def sample(self, logits: list[int], batch: Batch) -> list[SampledToken]:
        vocabulary = Vocabulary(self.info.vocab_size, self.info.eos_token_ids)
        return [
            vocabulary.draw(digest, row)
            for digest, row in zip(logits, rows_of(batch.samplings), strict=True)
        ]

    def score(self, logits: list[int], batch: Batch) -> list[bytes]:
        vocabulary = Vocabulary(self.info.vocab_size, self.info.eos_token_ids)
        return [vocabulary.score(scoring) for scoring in batch.scorings]

    def shutdown(self) -> None:
        self._cache = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Maps hashes to tokens of a vocabulary of `size` tokens, which include `eos_token_ids`."""

    size: int
    eos_token_ids: frozenset[int]

    def draw(self, digest: int, row: Row) -> SampledToken:
        """Map a digest of the context to a token."""
        options = row.options
        if options.temperature > 0.0:
            key = np.array([options.seed, options.choice, row.position], "<u8").tobytes()
            digest = xxh3_64_intdigest(key, seed=digest)
        may_stop = row.position - row.sampling.prompt_len >= options.min_tokens
        may_end = may_stop and not options.ignore_eos and bool(self.eos_token_ids)
        choice, rest = digest % EOS_PERIOD, digest // EOS_PERIOD
        if may_end and choice == 0:
            eos = sorted(self.eos_token_ids)
            return self._report(eos[rest % len(eos)], 1 / EOS_PERIOD, options)
        banned = self.eos_token_ids
        if not may_stop:
            banned = banned.union(options.stop_token_ids)
        token_id = rest % self.size
        for _ in range(len(banned)):  # find the next allowed token, if there is one
            if token_id not in banned:
                break
            token_id = (token_id + 1) % self.size
        return self._report(token_id, (1 - may_end / EOS_PERIOD) / self.size, options)

    def _report(self, token_id: int, probability: float, options: Options) -> SampledToken:
        if options.logprobs is None:
            return SampledToken(token_id)
        return SampledToken(token_id, self._logprobs(token_id, probability, options.logprobs))

    def score(self, scoring: Scoring) -> bytes:
        """Return the packed logprobs of a prompt's tokens, which are all equal."""
        num_top = min(scoring.num_top, self.size)
        return b"".join(
            pack_logprobs(self._logprobs(token_id, 1 / self.size, num_top))
            for token_id in scoring.next_token_ids
        )

    def _logprobs(self, token_id: int, probability: float, num_top: int) -> Logprobs:
        logprob = math.log(probability)
        top = [((token_id + step) % self.size, logprob) for step in range(num_top)]
        return Logprobs(logprob=logprob, top=tuple(top))


def kv_words(
    token_ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint64]:
    """Return the KV of each token, u64 [T, num_layers, k|v, kv_heads], by the splitmix64 mixer."""
    names = (positions.astype(np.uint64) << np.uint64(32)) | token_ids.astype(np.uint64)
    words = names[:, None, None, None] + _HEAD_WORDS
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)), dtype="<u8")


def state_after(words: _U64, before: _U64 | int = 0) -> _U64:
    """Return the state after T more tokens, u64 [num_layers, heads].

    It depends on all tokens and their order; `words` is u64 [T, num_layers, k|v, kv_heads].
    """
    state = np.zeros((NUM_LAYERS, 2 * NUM_KV_HEADS), np.uint64) + np.uint64(before)
    for word in words.reshape(len(words), *state.shape):
        state = (state ^ word) * np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(29)
    return state
