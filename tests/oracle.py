"""The expected tokens of the hash executor without faults, computed without blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from wire.layout import KVLayout, StateGroup
from wire.options import Options
from wire.process.model import locate
from worker.executor.batch import Row, Sampling
from worker.executor.hash import (
    EOS_TOKEN_IDS,
    LAYOUT,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Vocabulary,
    create,
    kv_words,
    state_after,
)


def oracle(
    prompt: Sequence[int],
    num_tokens: int,
    options: Options | None = None,
    vocab_size: int = VOCAB_SIZE,
    *,
    eos_token_ids: frozenset[int] = EOS_TOKEN_IDS,
    max_model_len: int = MAX_MODEL_LEN,
    layout: KVLayout = LAYOUT,
) -> list[int]:
    """Return the text of a fault-free run: at most `num_tokens`, without the token that ends it.

    Shorter than `num_tokens` exactly when the reason is "stop" or the context is full.
    """
    options = options or Options()
    vocabulary = Vocabulary(vocab_size, eos_token_ids)
    stop_ids = set(options.stop_token_ids) | (set() if options.ignore_eos else eos_token_ids)
    token_ids, prompt_len = list(prompt), len(prompt)
    while len(token_ids) < min(prompt_len + num_tokens, max_model_len):
        position = len(token_ids)
        digest = _digest(token_ids, layout)
        row = Row(0, Sampling(0, options, position, prompt_len, token_ids), 0)
        token_id = vocabulary.draw(digest, row).token_id
        if token_id in stop_ids and position - prompt_len >= options.min_tokens:
            break
        token_ids.append(token_id)
    return token_ids[prompt_len:]


def _digest(token_ids: Sequence[int], layout: KVLayout) -> int:
    """Hash what the last of these tokens sees, as a cache without blocks would have it."""
    words = kv_words(np.array(token_ids, np.int32), np.arange(len(token_ids), dtype=np.int32))
    digest, first_layer = 0, 0
    for group in layout.groups:
        if isinstance(group, StateGroup):
            seen = state_after(words)
        else:
            layers = words[:, first_layer : first_layer + group.num_layers]
            first_layer += group.num_layers
            seen = layers[-(group.window or 0) :].transpose(1, 2, 3, 0)
        digest = xxh3_64_intdigest(seen.tobytes(), seed=digest)
    return digest


def hash_oracle(prompt: list[int], num_tokens: int, options: Options) -> list[int]:
    """The expected tokens of the hash executor with the demo model's vocabulary."""
    info = create(model_path=locate("demo")).info
    return oracle(
        prompt,
        num_tokens,
        options,
        info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        max_model_len=info.max_model_len,
    )
