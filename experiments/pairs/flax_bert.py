"""transformers' BERT in Flax and in PyTorch, both as published, with a padded row.

Command: python -m jaxbench pair experiments/pairs/flax_bert.py     (needs transformers 4: release 5 has no Flax models)
Expected: 30 seconds, the same function: 5e-16, gradients too; all 39 arrays are matched. Given by hand: the Flax
model's arguments, which outputs are compared, and that it computes in float64: with its default, float32, its modules
are blamed and a cast to float32 is named.
"""

import jax.numpy as jnp
import numpy as np
import torch
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_flax_bert import FlaxBertModule

import jaxbench

CONFIG = BertConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
)  # fmt: skip


class Bert(torch.nn.Module):
    """BertModel, called with token ids and mask as positional arguments."""

    def __init__(self):
        super().__init__()
        self.bert = BertModel(CONFIG)

    def forward(self, tokens, mask):
        """Hidden states [B T D] and the pooled first one [B D]."""
        result = self.bert(tokens, attention_mask=mask)
        return result.last_hidden_state, result.pooler_output


def flax_inputs(tokens, mask):
    """Tokens, mask, segments, positions, mask of heads."""
    return tokens, mask, np.zeros_like(tokens), np.arange(tokens.shape[1])[None], None


def pair() -> jaxbench.Pair:
    """Pair both models on two rows of nine tokens, the second with three of padding."""
    tokens = np.random.default_rng(0).integers(0, 99, (2, 9))
    mask = np.ones((2, 9), np.int64)
    mask[1, 6:] = 0
    return jaxbench.Pair(
        FlaxBertModule(CONFIG, dtype=jnp.float64), Bert(), (tokens, mask), dtypes=("float32",),
        jax_inputs=flax_inputs, jax_outputs=lambda result: (result.last_hidden_state, result.pooler_output),
    )  # fmt: skip
