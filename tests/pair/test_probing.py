"""What models compute says which weights and outputs belong together, also where fresh numbers are all alike."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.pytorch_utils import Conv1D

import jaxbench
from jaxbench.pair import alignment

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((3, 4))


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


def test_positions_of_one_row_are_those_of_every_row():
    rows = np.arange(6.0).reshape(1, 2, 3)
    every = np.repeat(rows, 4, axis=0)
    for x, wanted in ((rows, every), (every, rows), (every, rows[0]), (rows[0], every)):
        np.testing.assert_array_equal(alignment.in_layout(x, wanted), wanted)
    every[0, 0, 0] = 9.0  # another row
    for x, shape in (
        (every, (1, 2, 3)),
        (every, (2, 3)),
        (rows, (4, 2, 5)),
        (np.ones(3), (2,)),
        (np.ones((3, 2)), (2, 2)),
    ):
        assert alignment.in_layout(x, np.zeros(shape)) is None


class Fused(torch.nn.Module):
    """Query, key and value of one matrix [in, out], as GPT-2's."""

    def __init__(self, layer):
        super().__init__()
        self.c_attn, self.c_proj = layer(12, 4), layer(4, 4)

    def forward(self, x):
        q, k, v = self.c_attn(x).split(4, dim=-1)
        return self.c_proj(torch.softmax(q @ k.mT, dim=-1) @ v)


class Apart(nnx.Module):
    """The same with three matrices."""

    def __init__(self):
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(4))

    def __call__(self, x):
        scores = self.q_proj(x) @ jnp.swapaxes(self.k_proj(x), -1, -2)
        return self.o_proj(jnp.exp(scores) / jnp.exp(scores).sum(-1, keepdims=True) @ self.v_proj(x))


@pytest.mark.parametrize("layer", [Conv1D, lambda outputs, inputs: torch.nn.Linear(inputs, outputs)])
@pytest.mark.parametrize("weights", ["torch", "jax"])
def test_a_fused_matrix_is_split_along_its_outputs_whichever_axis_they_are(layer, weights):
    result = jaxbench.compare(Apart(), Fused(layer), RANDOM.standard_normal((2, 3, 4)), weights=weights, quick=True)
    assert result.passed, str(result)
    rule = result.weights.rules["k_proj.kernel"]
    assert rule.part == (1, 3) and rule.axis == (1 if layer is Conv1D else 0)


@pytest.mark.parametrize("by_jax, words", [(1.0, "JAX multiplies by 1 more"), (-1.0, "PyTorch multiplies by 1 more")])
def test_a_norm_that_counts_its_weight_from_one_is_named(by_jax, words):
    def norm(weight, x):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * (weight + by_jax)[None]

    twin = torch.nn.RMSNorm(4, eps=1e-5)
    result = jaxbench.compare((norm, np.ones(4)), twin, RANDOM.standard_normal((2, 4)), quick=True)
    assert result.causes == {"model": f"weight: {words}"}


QUICK = "quick: gradients, optimiser steps and narrower types were not compared"


class Offset(torch.nn.Module):
    """A root of a parameter that starts at 0, as of generalised divisive norms."""

    def __init__(self):
        super().__init__()
        self.offset = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.offset.sqrt()


def test_constants_stay_where_others_give_no_number_or_where_the_caller_says_so():
    port = (lambda offset, x: x * jnp.sqrt(offset)[None], np.zeros(4))
    result = jaxbench.compare(port, Offset(), X, quick=True)
    assert result.passed and result.notes == (
        "constant tensors, which hide slips, keep their values, as others give no number: offset",
        QUICK,
    )
    norm, fresh = torch.nn.LayerNorm(4), nnx.LayerNorm(4, epsilon=1e-5, use_scale=False, rngs=nnx.Rngs(0))
    result = jaxbench.compare(fresh, norm, X, {"weight": None}, quick=True, disturb=False)
    assert result.passed and result.notes == (QUICK,)


class Repeated(torch.nn.Module):
    """A constant that counts: 1.0 is one time, another value none."""

    def __init__(self):
        super().__init__()
        self.register_buffer("times", torch.ones(1))

    def forward(self, x):
        if self.times.item() != 1.0:
            raise RuntimeError(f"{self.times.item()} times")
        return 2.0 * x


def test_a_constant_that_must_not_change_is_left_alone_where_the_caller_says_so():
    port = (lambda params, x: (params["times"][None] + 1.0) * x, {"times": np.ones(1)})
    with pytest.raises(ValueError, match=r"other constants \(disturb=False leaves them\): RuntimeError: .* times"):
        jaxbench.compare(port, Repeated(), X, quick=True)
    assert jaxbench.compare(port, Repeated(), X, quick=True, disturb=False).passed
