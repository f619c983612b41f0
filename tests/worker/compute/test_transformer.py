"""Greedy tokens and logits equal those of transformers, in float32, for every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import PagedBatch
from scripts.models.make_model import make_model
from tests.worker.paged import Text, advance, with_windows
from worker.compute.model import load_model
from worker.executor.torch import TorchExecutor
from worker.model import loader
from worker.model.config import read_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
WINDOW = {"use_sliding_window": True, "sliding_window": 9}
CASES: dict[str, dict[str, Any]] = {
    "llama-gqa-sharded": {"shards": 3, "rope_theta": 500_000.0},
    "llama-mqa-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama-biases-llama3": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": LLAMA3,
        "rope_theta": 500_000.0,
    },
    "llama-9-heads-linear": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    },
    "mistral-window": {"sliding_window": 12},
    "mistral-no-window": {"sliding_window": None, "num_key_value_heads": 4},
    "qwen2-biases": {"num_key_value_heads": 4},
    "qwen2-some-layers-windowed": {**WINDOW, "max_window_layers": 1},
    "qwen3-mha-bias": {"head_dim": 16, "num_key_value_heads": 4, "attention_bias": True},
    "qwen3-yarn": {"head_dim": 32, "rope_parameters": {**YARN, "rope_theta": 10_000.0}},
    "qwen2-yarn-scaling": {
        "rope_theta": 150_000.0,
        "rope_scaling": {**YARN, "truncate": False, "beta_fast": 4.0, "attention_factor": 1.5},
    },
    "qwen3_moe-one-dense-layer": {},
    "qwen3_moe-windowed": {**WINDOW, "mlp_only_layers": [], "tie_word_embeddings": True},
    "qwen3_moe-shares-of-all": {
        "norm_topk_prob": False,
        "num_experts": 21,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": None,
        "attention_bias": True,
    },
    "qwen3_moe-no-experts": {"num_experts": 0},
    "qwen3_next-one-dense-layer": {},
    "qwen3_next-types-tied-no-experts": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "num_experts": 0,
        "linear_conv_kernel_dim": 2,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
    },
    "qwen3_next-wide-heads-and-shares-of-all": {
        "head_dim": 32,
        "num_key_value_heads": 1,
        "full_attention_interval": 2,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 4.0,
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "gpt_oss-yarn": {},
    "gpt_oss-all-biased-and-clamped": {
        "swiglu_limit": 0.75,
        "swiglu_alpha": 1.2,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_local_experts": 21,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "gpt_oss-one-expert-unbiased": {
        "num_experts_per_tok": 1,
        "attention_bias": False,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    },
    "qwen3-layer-types": {
        **WINDOW,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "gemma3_text-untied": {"head_dim": 32, "attention_bias": True},
    "gemma3_text-pattern-tied": {
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 500.0,
        "rope_scaling": YARN,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "gemma3_text-layer-types-torch": {
        "intermediate_size": 24,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}
# A prompt over several blocks and windows, read in chunks that end inside a block, then 16 tokens.
PROMPT_LEN, CHUNKS, NUM_TOKENS, BLOCK_SIZE = 45, (17, 1, 27), 16, 8


def reference_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    """Return [tokens, vocab] logits of transformers' eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.mark.parametrize("name", list(CASES))
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, family=name.partition("-")[0], **CASES[name])
    executor = TorchExecutor.load(path, name="random", device="cpu")
    executor.allocate(16, BLOCK_SIZE, *([16] if executor.info.layout.has_state else []))
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, executor.info.vocab_size, (PROMPT_LEN,), generator=generator)
    text = Text(prompt.tolist(), [9, 2, 14, 3, 11, 5, 0, 7])
    ours = [advance(executor, [(text, count)], BLOCK_SIZE) for count in CHUNKS]
    ours += [advance(executor, [(text, 1)], BLOCK_SIZE) for _ in range(NUM_TOKENS - 1)]

    theirs = reference_logits(path, text.token_ids[:-1])[PROMPT_LEN - 1 :]
    assert text.token_ids[PROMPT_LEN:] == theirs.argmax(-1).tolist()
    # With states transformers differs as much from itself, reading at once or token by token.
    atol = 1e-3 if executor.info.layout.has_state else 1e-4
    torch.testing.assert_close(torch.cat(ours), theirs, rtol=1e-4, atol=atol)


def test_embeddings_are_scaled_by_a_number_of_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As models were trained: in bfloat16 the root of 48 is 6.9375."""
    path = make_model(tmp_path, family="gemma3_text", hidden_size=48)
    config = read_config(path)

    def logits(dtype: torch.dtype) -> torch.Tensor:
        model = load_model(path, dtype, torch.device("cpu"))
        pool = torch.zeros(1, 2, 2, 2, BLOCK_SIZE, config.head_dim, dtype=dtype)
        numbers = torch.arange(5, dtype=torch.int32)
        ends = torch.tensor([0, 5], dtype=torch.int32)
        batch = PagedBatch(numbers, ends, ends[1:], torch.zeros(1, 1, dtype=torch.int32))
        batch = with_windows(batch, torch.zeros_like(pool))
        return model.forward(numbers, numbers, pool, batch, torch.arange(5))

    exact, rounded = logits(torch.float32), logits(torch.bfloat16)
    config = replace(config, embedding_scale=6.9375)
    monkeypatch.setattr(loader, "read_config", lambda _: config)
    assert not torch.equal(logits(torch.float32), exact)
    assert torch.equal(logits(torch.bfloat16), rounded)
