"""A block of transformers' GPT-2 and a port of it to Flax with two common porting errors.

Command: jaxbench pair experiments/pairs/gpt2_block.py
Expected: 10 seconds, exit code 1; blames ln_1 (eps) and mlp (the other GELU), and names both causes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import jaxbench

CONFIG = GPT2Config(n_embd=48, n_head=4, n_layer=1, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager")


class Attention(nnx.Module):
    """Causal attention with one fused projection."""

    def __init__(self, rngs: nnx.Rngs):
        self.c_attn, self.c_proj = nnx.Linear(48, 144, rngs=rngs), nnx.Linear(48, 48, rngs=rngs)

    def __call__(self, x):
        q, k, v = (y.reshape(*x.shape[:2], 4, 12).swapaxes(1, 2) for y in jnp.split(self.c_attn(x), 3, axis=-1))
        scores = q @ k.mT / 12**0.5
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool)[None, None], scores, jnp.finfo(x.dtype).min)
        return self.c_proj((jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape))


class Mlp(nnx.Module):
    """GPT-2 has the tanh form of GELU; this port has the other one."""

    def __init__(self, rngs: nnx.Rngs):
        self.c_fc, self.c_proj = nnx.Linear(48, 192, rngs=rngs), nnx.Linear(192, 48, rngs=rngs)

    def __call__(self, x):
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=False))


class Block(nnx.Module):
    """GPT-2 has eps 1e-5 in both norms; this port leaves Flax's 1e-6 in the first."""

    def __init__(self, rngs: nnx.Rngs):
        self.ln_1, self.attn = nnx.LayerNorm(48, rngs=rngs), Attention(rngs)
        self.ln_2, self.mlp = nnx.LayerNorm(48, epsilon=1e-5, rngs=rngs), Mlp(rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Causal(torch.nn.Module):
    """transformers' block with the causal mask that its model hands to it."""

    def __init__(self):
        super().__init__()
        self.block = GPT2Block(CONFIG, layer_idx=0)

    def forward(self, x):
        """Hidden states [B T D]."""
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        return self.block(x, attention_mask=mask)


def pair() -> jaxbench.Pair:
    """Pair both blocks on one batch [2 7 48]."""
    x = np.random.default_rng(0).standard_normal((2, 7, 48))
    return jaxbench.Pair(Block(nnx.Rngs(0)), Causal(), x)
