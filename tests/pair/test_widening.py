"""Models that cast to float32 whatever their inputs are, as published language models do, proven all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import jaxbench

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 6, 16))


class Norm(nnx.Module):
    """RMS norm in float32."""

    def __init__(self, eps=1e-6):
        self.weight, self.eps = nnx.Param(jnp.ones(16)), eps

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.weight[...][None, None] * wide.astype(x.dtype)


def worst(result):
    return max(entry.error for entry in result.comparisons["outputs, eval"].entries)


def test_two_norms_in_float32_are_the_same_function_and_a_smaller_slip_is_found():
    narrow = jaxbench.compare(Norm(), LlamaRMSNorm(16, 1e-6), X)
    assert not narrow.passed and worst(narrow) > 1e-9
    wide = jaxbench.compare(Norm(), LlamaRMSNorm(16, 1e-6), X, widen=True)
    assert wide.passed and worst(wide) < 1e-14, str(wide)
    assert wide.notes[0] == "casts inside both models were taken as casts to float64"
    assert {"outputs, float32", "outputs, bfloat16", "gradients, eval"} <= {gate.what for gate in wide.gates}
    slip = jaxbench.compare(Norm(1e-8), LlamaRMSNorm(16, 1e-7), X, widen=True)  # 5e-8: less than the casts
    assert not slip.passed
    assert slip.causes == {"model": "variance_epsilon: 1e-08 in JAX, 1e-07 in PyTorch"}


class Attention(torch.nn.Module):
    """Attention with complex rotations in float32, whose frequencies are an attribute, as published for Llama."""

    def __init__(self, heads=2, width=16, length=32):
        super().__init__()
        self.heads, size = heads, width // heads
        self.wq, self.wk, self.wv, self.wo = (torch.nn.Linear(width, width, bias=False) for _ in range(4))
        frequencies = 1.0 / 1e4 ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length), frequencies)
        self.rotations = torch.polar(torch.ones_like(angles), angles)

    def rotated(self, x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotations[: x.shape[1], None]).flatten(-2).type_as(x)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (y.transpose(1, 2) for y in (self.rotated(q), self.rotated(k), v))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).type_as(v)
        return self.wo((weights @ v).transpose(1, 2).flatten(-2))


class AttentionPort(nnx.Module):
    """The same with sines and cosines; JAX's own attention takes its softmax in float32."""

    def __init__(self, heads=2, width=16):
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (
            nnx.Linear(width, width, use_bias=False, rngs=nnx.Rngs(0)) for _ in "qkvo"
        )

    def rotated(self, x):
        size = x.shape[-1]
        angles = jnp.outer(jnp.arange(x.shape[1]), 1.0 / 1e4 ** (jnp.arange(0, size, 2, dtype=jnp.float32) / size))
        cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
        even, odd = x[..., ::2], x[..., 1::2]
        return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape).astype(x.dtype)

    def __call__(self, x):
        q, k, v = (w(x).reshape(*x.shape[:2], self.heads, -1) for w in (self.wq, self.wk, self.wv))
        mixed = jax.nn.dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        return self.wo(mixed.reshape(x.shape))


def test_attention_as_published_for_llama_equals_a_port_once_its_constants_are_wide_too():
    narrow = jaxbench.compare(AttentionPort(), Attention(), X, quick=True)
    assert not narrow.passed and worst(narrow) > 1e-9
    with jaxbench.widened():
        module = Attention()
        assert module.rotations.dtype == torch.complex128 and module.wq.weight.dtype == torch.float64
    wide = jaxbench.compare(AttentionPort(), module, X, widen=True)
    assert wide.passed and worst(wide) < 1e-14, str(wide)


def test_a_loop_that_carries_float32_is_widened_too():
    class Sums(torch.nn.Module):
        def forward(self, x):
            return x.float().cumsum(1).type_as(x)

    def sums(x):
        add = lambda total, row: 2 * (total + row.astype(jnp.float32),)
        return jnp.moveaxis(jax.lax.scan(add, jnp.zeros((2, 16), jnp.float32), jnp.moveaxis(x, 1, 0))[1], 0, 1)

    result = jaxbench.compare(sums, Sums(), X, widen=True)
    assert result.passed and worst(result) < 1e-14


def test_behind_the_context_casts_are_as_written_again_even_after_an_error():
    cast = jax.jit(lambda x: x.astype(jnp.float32))
    with pytest.raises(KeyError), jaxbench.widened():
        assert cast(X).dtype == jnp.float64 and jnp.ones(2, jnp.bfloat16).astype(jnp.complex64).dtype == jnp.complex128
        assert torch.ones(2).half().dtype == torch.ones(2).to("cpu", torch.bfloat16).dtype == torch.float64
        assert torch.ones(2).to(torch.int32).dtype == torch.int32 and jnp.ones(2).astype(jnp.int32).dtype == jnp.int32
        assert jax.random.truncated_normal(jax.random.key(0), -1.0, 1.0, (2,), jnp.float32).dtype == jnp.float32
        with jaxbench.widened():
            assert cast(X).dtype == jnp.float64
        assert cast(X).dtype == jnp.float64 and torch.ones(2).half().dtype == torch.float64
        raise KeyError("of the caller")
    assert cast(X).dtype == jnp.float32 and torch.ones(2).half().dtype == torch.float16
    assert torch.ones(2).dtype == torch.float32 and jax.dtypes.canonicalize_dtype(float) == jnp.float32


class Dense(linen.Module):
    """Layers with narrow types of their own."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, dtype=jnp.float32)(linen.LayerNorm(epsilon=1e-5, dtype=jnp.bfloat16)(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # that Inductor imports
def test_layers_with_types_of_their_own_are_widened_and_both_models_may_be_made_inside():
    with jaxbench.widened():
        port = nnx.Linear(16, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        twin = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    assert jaxbench.compare(Dense(), twin, X, widen=True, dtypes=()).passed
    assert jaxbench.compare(Dense(), torch.compile(twin), X, widen=True, dtypes=()).passed
    optimizers = (optax.adamw(1e-2, weight_decay=0.1), lambda params: torch.optim.AdamW(params, 1e-2, weight_decay=0.1))
    assert jaxbench.compare(port, twin[1], X, widen=True, dtypes=(), optimizers=optimizers).passed
