"""A model of your own: one attention layer that goes on as the text did after the same token.

python -m router --model demo --executor scripts.examples.own_model:create --local 1,1
"""

import numpy as np

from wire.layout import KVLayout
from worker.executor.contract import Executor
from worker.executor.functions import serve_functions

VOCAB, EOS, DIM = 1326, 0, 64  # vocab_size and eos_token_id of the demo model's config.json
EMBED = np.random.default_rng(0).standard_normal((VOCAB, DIM)).astype("<f4")
EMBED /= np.linalg.norm(EMBED, axis=1, keepdims=True)
LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=DIM, dtype="float32")


def prefill(token_ids: bytes, seq_len: int) -> tuple[bytes, bytes]:
    ids = np.frombuffer(token_ids, "<u4")
    kv = np.stack([EMBED[np.append(0, ids[:-1])], EMBED[ids]], axis=1)  # key: the one before
    return b"", kv.tobytes()


def decode_step(kv: bytes, last_token_id: int, position: int) -> tuple[int, bytes]:
    before = np.frombuffer(kv, "<f4").reshape(position, 2, DIM)
    key = before[-1, 1] if position else EMBED[0]
    now = np.append(before, [[key, EMBED[last_token_id]]], axis=0).astype("<f4")
    scores = now[:, 0] @ EMBED[last_token_id] + 1e-4 * np.arange(len(now))  # the latest wins
    return int(np.argmax(EMBED @ now[np.argmax(scores), 1])), now.tobytes()


def create(**settings: object) -> Executor:
    return serve_functions(
        prefill,
        decode_step,
        layout=LAYOUT,
        vocab_size=VOCAB,
        eos_token_ids=[EOS],
        max_model_len=2048,
        settings=settings,
    )
