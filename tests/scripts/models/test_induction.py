"""A model that was never trained already continues a repeated text from its context."""

from __future__ import annotations

import pytest
import torch

from scripts.models.induction import begin_with_induction

VOCABULARY = 300


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations are not our subject
def test_an_untrained_model_copies_what_followed_before() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.03,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    begin_with_induction(model)
    text = torch.randperm(VOCABULARY)[:60]
    tokens = torch.cat([text, text])[None]
    with torch.inference_mode():
        predicted = model(tokens).logits[0].argmax(-1)
    # From the fifth token of the repetition on, four tokens of context are the same.
    right = (predicted[64:119] == tokens[0, 65:120]).float().mean()
    assert right > 0.2  # chance is 1 in 300; three in ten were measured
