"""A decoder of transformers' and this project's in Flax: 21 arrays found, with only the calls given by hand.

Command: jaxbench pair experiments/pairs/transformers_llama.py
Expected: 1 minute, exit code 0: transformers' norms and softmax are float32 for any input type, so casts are treated as
casts to float64 (widen); without that the two agree to 1e-7.
"""

import numpy as np
import torch
import transformers

import jaxbench
from jaxbench import transformer
from jaxbench.config import Compute, TransformerConfig


def pair() -> jaxbench.Pair:
    """Pair two layers with grouped keys and values, on tokens [2 9]."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, tie_word_embeddings=False, initializer_range=0.5,
    )  # fmt: skip
    shape = TransformerConfig(
        vocab_size=64, d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_seq_len=32,
        norm_eps=config.rms_norm_eps, tie_embeddings=False,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 64, (2, 9))
    return jaxbench.Pair(
        transformer.Transformer(shape, Compute()), transformers.LlamaForCausalLM(config), tokens, widen=True,
        jax_call=lambda model, tokens: model(tokens, positions=None), torch_outputs=lambda outputs: outputs.logits,
    )  # fmt: skip
