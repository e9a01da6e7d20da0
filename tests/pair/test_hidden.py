"""Slips that something behind them hides, beside cuts that are none: each is found."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jaxbench
from jaxbench.pair.naming import Leaf, equal_paths

RANDOM = np.random.default_rng(5)
X = RANDOM.standard_normal((3, 8))
ROWS = RANDOM.standard_normal((2, 4, 8))
OFF = {"dtypes": (), "quick": True}


def linear(outputs=8):
    return nnx.Linear(8, outputs, rngs=nnx.Rngs(0))


class Inner(torch.nn.Module):
    """A linear layer in a module of its own; with its input added."""

    def __init__(self, is_added=False):
        super().__init__()
        self.lin, self.is_added = torch.nn.Linear(8, 8), is_added

    def forward(self, x):
        return x + self.lin(x) if self.is_added else self.lin(x)


class Scaled(nnx.Module):
    """The same times a factor, which only training may have, and in more columns."""

    def __init__(self, factor=1.0, *, in_training=False, columns=8):
        self.lin, self.factor, self.in_training, self.columns = linear(), factor, in_training, columns
        self.mode = nnx.Dropout(0.0)

    def __call__(self, x):
        is_scaled = not self.in_training or not self.mode.deterministic
        y = self.lin(x) * (self.factor if is_scaled else 1.0)
        return jnp.pad(y, ((0, 0), (0, self.columns - 8)))


class Normed(torch.nn.Module):
    """Two inner modules with a norm between them, which hides the scale of what it is handed."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.res = Inner(), torch.nn.LayerNorm(8, eps=0.0), Inner(is_added=True)
        self.act = torch.nn.Tanh()

    def forward(self, x):
        return self.act(self.res(self.norm(self.embed(x))))


class Act(nnx.Module):
    """The hyperbolic tangent."""

    def __call__(self, x):
        return jnp.tanh(x)


class Port(nnx.Module):
    """The same, its residual around the module, with a factor in front of the norm."""

    def __init__(self, embed, factor=1.0):
        self.embed, self.norm = embed, nnx.LayerNorm(8, epsilon=0.0, rngs=nnx.Rngs(0))
        self.res, self.act, self.factor = Scaled(), Act(), factor

    def __call__(self, x):
        y = self.norm(self.factor * self.embed(x)[:, :8])
        return self.act(y + self.res(y))


SLIPS = {
    "none": (Scaled(), 1.0, {}, True),
    "in a module and around it, not cancelling": (Scaled(0.25), 3.0, {}, False),
    "in a module and around it, cancelling": (Scaled(0.25), 4.0, {}, True),
    "around, and a sound module is left out": (Scaled(), 3.0, {"act": None}, False),
    "in a module of another shape": (Scaled(0.25, columns=10), 1.0, {}, False),
    "none in a module of another shape": (Scaled(columns=10), 1.0, {}, True),
    "in a module that is left out": (Scaled(0.25), 1.0, {"embed": None}, True),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_what_a_norm_hides_is_found_also_beside_a_residual_that_is_only_cut_otherwise(slip):
    embed, factor, names, is_same = SLIPS[slip]
    result = jaxbench.compare(Port(embed, factor), Normed(), X, names, **OFF)
    assert result.passed == is_same, str(result)


def test_a_slip_of_training_alone_is_found_beside_a_cut():
    port = Port(Scaled(0.25, in_training=True))
    assert jaxbench.compare(port, Normed(), X, **OFF).passed
    assert not jaxbench.compare(port, Normed(), X, modes=("eval", "train"), **OFF).passed


def test_a_jax_model_that_alone_computes_something_else_in_training_is_not_the_same():
    assert jaxbench.compare(Scaled(2.0), Inner(), X, **OFF).passed is False
    result = jaxbench.compare(Scaled(2.0, in_training=True), Inner(), X, **OFF)
    assert not result.passed and any("train" in gate.what for gate in result.gates if not gate.passed)


class Mean(torch.nn.Module):
    """Mean over the positions of a mask."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)

    def forward(self, x, mask):
        return (self.lin(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Sum(nnx.Module):
    """The sum, to be divided by whoever calls it."""

    def __init__(self):
        self.lin = linear()

    def __call__(self, x, mask):
        return (self.lin(x) * mask[..., None]).sum(1)


class Divided(nnx.Module):
    """The sum over a count: of the mask, or a constant."""

    def __init__(self, count):
        self.pool, self.head, self.count = Sum(), linear(4), count

    def __call__(self, x, mask):
        count = mask.sum(1, keepdims=True) if self.count is None else self.count
        return self.head(self.pool(x, mask) / count)


class Pooled(torch.nn.Module):
    """A head on a mean."""

    def __init__(self):
        super().__init__()
        self.pool, self.head = Mean(), torch.nn.Linear(8, 4)

    def forward(self, x, mask):
        return self.head(self.pool(x, mask))


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_a_constant_that_fits_this_mask_alone_is_found_since_masks_are_shuffled(dtype):
    mask = np.array([[1, 1, 1, 0], [1, 0, 1, 1]], dtype)
    assert jaxbench.compare(Divided(None), Pooled(), (ROWS, mask), **OFF).passed
    assert not jaxbench.compare(Divided(3), Pooled(), (ROWS, mask), **OFF).passed


def test_a_tensor_that_jax_lacks_leaves_no_module_of_its_name_out():
    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((8,), 2.0))
            self.lin, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8, eps=0.0)

        def forward(self, x):
            return self.norm(self.lin(x))

    class Module(nnx.Module):
        def __init__(self):
            self.scale, self.norm = Scaled(0.25), nnx.LayerNorm(8, epsilon=0.0, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(self.scale(x))

    assert not jaxbench.compare(Module(), Named(), X, {"scale": None}, **OFF).passed


def test_numpy_scalars_are_numbers():
    def port(params, x):
        return x @ params["weight"].T, np.float64(2.0)

    class Twin(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return x @ self.weight.T, np.float64(3.0)

    assert not jaxbench.compare((port, {"weight": np.zeros((8, 8))}), Twin(), X, **OFF).passed


def test_a_cache_that_grows_is_a_note():
    class Twin(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(8, 8)
            self.register_buffer("cache", torch.zeros(0, 8))

        def forward(self, x):
            self.cache = torch.cat([self.cache, x])
            return self.lin(x)

    class Port(nnx.Module):
        def __init__(self):
            self.lin, self.cache = linear(), nnx.Variable(jnp.zeros((0, 8)))

        def __call__(self, x):
            self.cache.set_value(jnp.concatenate([self.cache.get_value(), x]))
            return self.lin(x)

    result = jaxbench.compare(Port(), Twin(), X, **OFF)
    assert result.passed and "buffers whose shape a call changes were not compared: cache" in str(result)


def test_a_buffer_that_only_pytorch_moves_is_a_note():
    class Twin(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(8, 8)
            self.register_buffer("average", torch.randn(8))

        def forward(self, x):
            self.average.mul_(0.9).add_(0.1 * x.mean(0))
            return self.lin(x)

    result = jaxbench.compare(Scaled(), Twin(), X, {"average": None}, **OFF)
    assert result.passed and "moves and the JAX model lacks were not compared: average" in str(result)


def test_equal_names_with_some_of_the_other_sides_numbers_are_equal_paths():
    arrays = [Leaf(f"fc{i}.kernel", (8, 8), i) for i in range(1, 6)] + [Leaf("head.kernel", (8, 3), 6)]
    tensors = [Leaf(f"fc{i}.weight", (8, 8), i) for i in range(1, 7)]
    assert equal_paths(arrays, tensors) == {(f"fc{i}.kernel", f"fc{i}.weight") for i in range(1, 6)}
