"""transformers' GPT-2 and this project's decoder in Flax: 36 arrays found, queries, keys and values in one matrix.

Command: jaxbench pair experiments/pairs/transformers_gpt2.py
Expected: 1 minute, exit code 0.
"""

import numpy as np
import torch
import transformers

import jaxbench
from jaxbench import transformer
from jaxbench.config import Compute, TransformerConfig


def pair() -> jaxbench.Pair:
    """Pair two layers with biases and learned positions, on tokens [2 9]; the head shares the embedding's weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_inner=128, n_layer=2, n_head=4, n_positions=32, initializer_range=0.5,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    shape = TransformerConfig(
        vocab_size=64, d_model=32, d_ff=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, max_seq_len=32,
        norm="layernorm", activation="gelu", position="learned", use_bias=True,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 64, (2, 9))
    return jaxbench.Pair(
        transformer.Transformer(shape, Compute()), transformers.GPT2LMHeadModel(config), tokens, widen=True,
        jax_call=lambda model, tokens: model(tokens, positions=None), torch_outputs=lambda outputs: outputs.logits,
    )  # fmt: skip
