"""Three pairs of models, each with ten bugs that its JAX side may have, and the module that each bug is in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx

import jaxbench
from jaxbench.pair import proof, public_types


class Bug(NamedTuple):
    """One bug: what is wrong, where, and a word of the cause that should be named; empty where none is known."""

    name: str
    module: str  # JAX module that must be blamed, or "weights"
    cause: str = ""


# A transformer block in Flax NNX

BLOCK = (
    Bug("eps", "norm", "eps"), Bug("gelu", "mlp", "GELU"), Bug("transposed", "attention.out", "transposed"),
    Bug("bias", "mlp.down", "missing"), Bug("scale", "attention", "not scaled"), Bug("causal", "attention", "causal"),
    Bug("axis", "attention", "softmax over axis"), Bug("float32", "mlp.up", "cast to float32"),
    Bug("bfloat16", "attention", "bfloat16"), Bug("dropout", "model", "dropout left on"),
)  # fmt: skip


class Linear(nnx.Module):
    """Linear layer with a bug of its own."""

    def __init__(self, size: int, out: int, rngs: nnx.Rngs, bug: str = ""):
        self.kernel = nnx.Param(rngs.params.normal((size, out)))
        self.bias = nnx.Param(rngs.params.normal((out,)))
        self.bug = bug

    def __call__(self, x):
        kernel, bias = self.kernel[...], self.bias[...]
        if self.bug == "transposed":
            kernel = kernel.T
        if self.bug == "float32":
            return (x.astype(jnp.float32) @ kernel.astype(jnp.float32)).astype(x.dtype) + bias[None, None]
        return x @ kernel + bias[None, None] * (self.bug != "bias")


class Attention(nnx.Module):
    """Causal attention with two heads of eight."""

    def __init__(self, rngs: nnx.Rngs, bug: str):
        self.q, self.k, self.v = (Linear(16, 16, rngs) for _ in range(3))
        self.out = Linear(16, 16, rngs, bug * (bug == "transposed"))
        self.bug = bug

    def __call__(self, x):
        heads = lambda y: y.reshape(*y.shape[:2], 2, 8).transpose(0, 2, 1, 3)
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        scores = q @ k.mT / (1.0 if self.bug == "scale" else 8**0.5)
        if self.bug != "causal":
            scores = jnp.where(jnp.tri(x.shape[1], dtype=bool)[None, None], scores, -1e9)
        if self.bug == "bfloat16":
            scores, v = scores.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
        mixed = jax.nn.softmax(scores, axis=-2 if self.bug == "axis" else -1) @ v
        return self.out(mixed.astype(x.dtype).transpose(0, 2, 1, 3).reshape(x.shape))


class Mlp(nnx.Module):
    """Two layers with a GELU between."""

    def __init__(self, rngs: nnx.Rngs, bug: str):
        self.up, self.down = Linear(16, 32, rngs, bug * (bug == "float32")), Linear(32, 16, rngs, bug * (bug == "bias"))
        self.bug = bug

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x), approximate=self.bug == "gelu"))


class Block(nnx.Module):
    """Attention and MLP behind norms."""

    def __init__(self, bug: str = ""):
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(16, epsilon=1e-6 if bug == "eps" else 1e-5, rngs=rngs)
        self.attention, self.mlp_norm = Attention(rngs, bug), nnx.LayerNorm(16, epsilon=1e-5, rngs=rngs)
        self.mlp, self.drop = Mlp(rngs, bug), nnx.Dropout(0.1, rngs=rngs)
        self.bug = bug

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return self.drop(x, deterministic=False) if self.bug == "dropout" else x


class TorchAttention(torch.nn.Module):
    """Its twin."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        """Attention output [B T D]."""
        heads = lambda y: y.view(*y.shape[:2], 2, 8).transpose(1, 2)
        given = (heads(self.q(x)), heads(self.k(x)), heads(self.v(x)))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (given[0] @ given[1].mT / 8**0.5).masked_fill(~mask, -1e9)
        mixed = torch.nn.functional.softmax(scores, dim=-1) @ given[2]
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class SdpaAttention(TorchAttention):
    """The same with PyTorch's own attention function."""

    def forward(self, x):
        """Attention output [B T D]."""
        heads = lambda y: y.view(*y.shape[:2], 2, 8).transpose(1, 2)
        given = (heads(self.q(x)), heads(self.k(x)), heads(self.v(x)))
        mixed = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class TorchBlock(torch.nn.Module):
    """Its twin."""

    def __init__(self, attention: type):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = torch.nn.LayerNorm(16), attention(), torch.nn.LayerNorm(16)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))

    def forward(self, x):
        """Hidden states [B T D]."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def block(bug: str = "") -> jaxbench.Pair:
    """Pair of transformer blocks."""
    twin = TorchBlock(SdpaAttention if bug in ("scale", "causal") else TorchAttention)
    return jaxbench.Pair(Block(bug), scattered(twin), np.random.default_rng(0).standard_normal((2, 6, 16)))


# A convolutional network in Flax Linen, images the other way round

VISION = (
    Bug("same", "Conv_0", "padding"), Bug("valid", "Conv_1", "padding"), Bug("eps", "BatchNorm_0", "eps"),
    Bug("training", "BatchNorm_0", "training mode"), Bug("flipped", "Conv_1", "flipped"),
    Bug("swapped", "Conv_1", "swapped"), Bug("activation", "model", "activation"),
    Bug("bias", "Dense_0", "missing"), Bug("float32", "Conv_1", "cast to float32"), Bug("pool", "model", "pool"),
)  # fmt: skip


class FlippedConv(linen.Module):
    """Convolution whose kernel is flipped, or whose height and width are swapped."""

    bug: str

    @linen.compact
    def __call__(self, x):
        """Features [B H W F]."""
        kernel = self.param("kernel", linen.initializers.normal(), (3, 3, 8, 8))
        bias = self.param("bias", linen.initializers.normal(), (8,))
        kernel = {"flipped": kernel[::-1, ::-1], "swapped": kernel.transpose(1, 0, 2, 3)}.get(self.bug, kernel)
        dtype = jnp.float32 if self.bug == "float32" else x.dtype
        padding = "VALID" if self.bug == "valid" else ((1, 1), (1, 1))
        dimensions = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x.astype(dtype), kernel.astype(dtype), (1, 1), padding, dimension_numbers=dimensions
        )
        return y.astype(x.dtype) + bias[None, None, None]


class Dense(linen.Module):
    """Linear layer that may forget its bias."""

    bug: str

    @linen.compact
    def __call__(self, x):
        """Logits [B V]."""
        kernel = self.param("kernel", linen.initializers.normal(), (8, 5))
        bias = self.param("bias", linen.initializers.normal(), (5,))
        return x @ kernel if self.bug == "bias" else x @ kernel + bias[None]


class Network(linen.Module):
    """Two convolutions, a norm, a pool and a classifier."""

    bug: str = ""

    @linen.compact
    def __call__(self, x, train=False):
        """Logits [B V]."""
        padding = "SAME" if self.bug == "same" else 1
        x = linen.Conv(8, (3, 3), strides=2, padding=padding, use_bias=False, name="Conv_0")(x)
        running = not train and self.bug != "training"
        x = linen.BatchNorm(running, epsilon=1e-3 if self.bug == "eps" else 1e-5, momentum=0.9)(x)
        x = jax.nn.silu(x) if self.bug == "activation" else linen.relu(x)
        x = FlippedConv(self.bug, name="Conv_1")(x)
        x = jnp.max(x, (1, 2)) if self.bug == "pool" else jnp.mean(x, (1, 2))
        return Dense(self.bug, name="Dense_0")(x)


def vision(bug: str = "") -> jaxbench.Pair:
    """Pair of convolutional networks."""
    layers = (
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 5),
    )  # fmt: skip
    modes = {"eval": {"train": False}, "train": {"train": True}}
    image = np.random.default_rng(0).standard_normal((2, 3, 12, 12))
    to_jax = lambda x: (x.transpose(0, 2, 3, 1),)
    model = Network(bug)
    return jaxbench.Pair(model, scattered(torch.nn.Sequential(*layers)), image, jax_inputs=to_jax, jax_modes=modes)


# A recurrent cell and a readout in Equinox, one example at a time

CELL = (
    Bug("gates", "cell", "gates"), Bug("forget", "cell", "missing"), Bug("transposed", "cell", "transposed"),
    Bug("eps", "norm", "eps"), Bug("no_bias", "readout", "missing"), Bug("tanh", "model", "tanh is missing"),
    Bug("float32", "readout", "cast to float32"), Bug("state", "model", "another order"),
    Bug("bfloat16", "cell", "bfloat16"),
    Bug("read", "readout", "transposed"),
)  # fmt: skip


class Cell(eqx.Module):
    """LSTM cell with the gates i, f, g, o."""

    weight_ih: jax.Array
    weight_hh: jax.Array
    bias_ih: jax.Array
    bias_hh: jax.Array
    bug: str = eqx.field(static=True)

    def __call__(self, x, state):
        h, c = state
        dtype = jnp.bfloat16 if self.bug == "bfloat16" else x.dtype
        recurrent = self.weight_hh
        if self.bug == "transposed":
            recurrent = jnp.concatenate([part.T for part in jnp.split(recurrent, 4)])
        bias = self.bias_ih + (0 if self.bug == "forget" else self.bias_hh)
        gates = (self.weight_ih.astype(dtype) @ x.astype(dtype)).astype(x.dtype) + recurrent @ h + bias
        i, f, g, o = jnp.split(gates, 4)
        if self.bug == "gates":
            f, g = g, f
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


class Readout(eqx.Module):
    """Linear layer."""

    weight: jax.Array
    bias: jax.Array
    bug: str = eqx.field(static=True)

    def __call__(self, x):
        dtype = jnp.float32 if self.bug == "float32" else x.dtype
        weight = self.weight.T if self.bug == "read" else self.weight
        y = (weight.astype(dtype) @ x.astype(dtype)).astype(x.dtype)
        return y if self.bug == "no_bias" else y + self.bias


class Recurrent(eqx.Module):
    """Norm, two steps of the cell and a readout."""

    norm: eqx.nn.LayerNorm
    cell: Cell
    readout: Readout
    bug: str = eqx.field(static=True)

    def __init__(self, bug: str):
        shapes = ((24, 4), (24, 6), (24,), (24,))
        arrays = [jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32) for shape in shapes]
        self.norm = eqx.nn.LayerNorm(4, eps=1e-6 if bug == "eps" else 1e-5)
        self.cell = Cell(*arrays, bug)
        self.readout = Readout(jnp.ones((6, 6)), jnp.ones(6), bug)
        self.bug = bug

    def __call__(self, x):
        state = (jnp.zeros(6, x.dtype), jnp.zeros(6, x.dtype))
        for step in x:
            state = self.cell(self.norm(step), (state[1], state[0]) if self.bug == "state" else state)
        h = state[0] if self.bug == "tanh" else jnp.tanh(state[0])
        return self.readout(h)


class TorchRecurrent(torch.nn.Module):
    """Its twin."""

    def __init__(self):
        super().__init__()
        self.norm, self.cell, self.readout = torch.nn.LayerNorm(4), torch.nn.LSTMCell(4, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        """Readout [B 6] of sequences [B T 4]."""
        state = (x.new_zeros(len(x), 6), x.new_zeros(len(x), 6))
        for step in x.unbind(1):
            state = self.cell(self.norm(step), state)
        return self.readout(torch.tanh(state[0]))


def cell(bug: str = "") -> jaxbench.Pair:
    """Pair of recurrent networks."""
    return jaxbench.Pair(
        Recurrent(bug),
        scattered(TorchRecurrent()),
        np.random.default_rng(0).standard_normal((2, 2, 4)),
        per_example=True,
    )


def scattered(module: torch.nn.Module) -> torch.nn.Module:
    """The module with every parameter and statistic at random, so that nothing is hidden by zeros and ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, x in [*module.named_parameters(), *module.named_buffers()]:
            if x.is_floating_point():
                x.copy_(torch.randn(x.shape, generator=generator) * 0.3 + ("var" in name or x.ndim == 1))
                x.copy_(x.abs() if "var" in name else x)
    return module


PAIRS: dict[str, tuple[Callable[[str], jaxbench.Pair], tuple[Bug, ...]]] = {
    "block": (block, BLOCK),
    "vision": (vision, VISION),
    "cell": (cell, CELL),
}


@functools.cache
def outcome(pair: str, bug: str) -> Any:
    """Result of a pair with a bug."""
    return proof.run(public_types.checked(PAIRS[pair][0](bug)._replace(quick=True, modes=("eval",))))
