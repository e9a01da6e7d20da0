"""Weights of models whose fresh numbers are all alike are matched by what they compute once they are not."""

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import jaxbench

RANDOM = np.random.default_rng(0)


class Tied(torch.nn.Module):
    """Tokens to features and back, two matrices of one shape."""

    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(7, 4)
        self.norm, self.lm_head = torch.nn.LayerNorm(4), torch.nn.Linear(4, 7, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.norm(self.wte(tokens)))


class Zeros(nnx.Module):
    """The same, with weights that are all zeros until they are loaded."""

    def __init__(self):
        zeros = {"rngs": nnx.Rngs(0), "param_dtype": jnp.float32, "dtype": jnp.float64}
        self.a = nnx.Embed(7, 4, embedding_init=nnx.initializers.zeros_init(), **zeros)
        self.b = nnx.LayerNorm(4, epsilon=1e-5, scale_init=nnx.initializers.zeros_init(), **zeros)
        self.c = nnx.Linear(4, 7, use_bias=False, kernel_init=nnx.initializers.zeros_init(), **zeros)

    def __call__(self, tokens):
        return self.c(self.b(self.a(tokens)))


def test_modules_whose_fresh_outputs_are_all_zeros_are_told_apart_by_what_reads_them():
    result = jaxbench.compare(Zeros(), Tied(), RANDOM.integers(0, 7, (2, 3)), dtypes=())
    assert result.passed, str(result)
    assert {guess.name: guess.rule.sources[0] for guess in result.weights.guesses} == {
        "a.embedding": "wte.weight", "b.scale": "norm.weight", "b.bias": "norm.bias", "c.kernel": "lm_head.weight",
    }  # fmt: skip
