"""Values of very different sizes: none hides a slip in another, in outputs or in gradients, and rounding is no slip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx

import jaxbench
from jaxbench.pair import draws

X = np.random.default_rng(5).standard_normal((5, 4))
PARAMS = {name: {"kernel": np.zeros((4, 6)), "bias": np.zeros(6)} for name in ("a", "b")}
KEPT = np.array([[1.0, 1.0, 0.0, 1.0, 0.0, 1.0]])
UNITS = np.array([[1e5, 1e5, 1e5, 1e-8, 1e-8, 1e-8]])  # of a pressure and a concentration


class Two(torch.nn.Module):
    """Two linear layers, and what a function makes of their results."""

    def __init__(self, out_of):
        super().__init__()
        self.a, self.b, self.out_of = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6), out_of

    def forward(self, x):
        return self.out_of(self.a(x), self.b(x))


def compare(of_jax, of_torch, **options):
    layer = lambda p, x: x @ p["kernel"] + p["bias"][None]
    mine = lambda p, x: of_jax(layer(p["a"], x), layer(p["b"], x))
    return jaxbench.compare((mine, PARAMS), Two(of_torch), X, **{"dtypes": ()} | options)


@pytest.mark.parametrize("mask", [-1e4, -1e9, -1e12])
@pytest.mark.parametrize("is_tanh", [False, True])
def test_a_finite_mask_hides_no_slip_in_what_it_leaves(mask, is_tanh):
    mine = lambda a, b: jnp.where(KEPT > 0, jax.nn.gelu(a + b, approximate=is_tanh), mask)
    theirs = lambda a, b: torch.where(torch.tensor(KEPT > 0), F.gelu(a + b), mask)
    result = compare(mine, theirs, quick=True)
    assert result.passed != is_tanh, str(result)
    assert ("GELU" in str(result)) == is_tanh


@pytest.mark.parametrize("mask", [-1e4, -1e9, -1e12])
@pytest.mark.parametrize("is_tanh", [False, True])
def test_a_finite_mask_that_is_added_hides_no_slip_in_gradients(mask, is_tanh):
    mine = lambda a, b: jax.nn.gelu(a + b, approximate=is_tanh) + (1.0 - KEPT) * mask
    theirs = lambda a, b: F.gelu(a + b) + (1.0 - torch.tensor(KEPT)) * mask
    assert compare(mine, theirs).passed != is_tanh


@pytest.mark.parametrize("slip", [lambda y: y, jnp.tanh])
def test_columns_in_other_units_are_compared_by_themselves(slip):
    of_jax = lambda a, b: jnp.concatenate([a[:, :3], slip(b[:, 3:])], axis=-1) * UNITS
    result = compare(of_jax, lambda a, b: torch.cat([a[:, :3], b[:, 3:]], dim=-1) * torch.tensor(UNITS))
    assert result.passed == (slip is not jnp.tanh), str(result)


@pytest.mark.parametrize("scale", [1.0, 1e8, 1e-200])
def test_a_large_output_hides_no_gradient_of_a_small_one(scale):
    mine = lambda a, b: (a * scale * 1e8, jax.lax.stop_gradient(b) * scale)
    result = compare(mine, lambda a, b: (a * scale * 1e8, b * scale))
    failed = {entry.name for entry in result.comparisons["gradients, eval"].entries if not entry.passed}
    assert failed == {"b.weight", "b.bias"}, str(result)


def test_values_whose_squares_are_zero_are_compared():
    assert compare(lambda a, b: a * 1e-200, lambda a, b: a * 1e-200).passed
    assert not compare(lambda a, b: a * 1.0001e-200, lambda a, b: a * 1e-200).passed


def test_usual_outputs_enter_the_objective_as_they_are_and_others_at_their_own_size():
    assert draws.sizes(np.array([0.3, -2.0, 0.0])) == 1.0
    assert draws.sizes(np.array([np.inf, 0.0, -1e38])) == 1.0
    np.testing.assert_array_equal(draws.sizes(np.array([-1e9, 1.0])), [2.0**30, 2.0**14])
    np.testing.assert_array_equal(draws.sizes(np.array([3e-200, 0.0])), [2.0**-663] * 2)


@pytest.mark.parametrize("is_cut", [False, True])
def test_gradients_by_inputs_in_other_units_are_compared_by_themselves(is_cut):
    class Sum(torch.nn.Linear):
        def forward(self, pressure, amount):
            return super().forward(pressure * 1e-5 + amount * 1e8)

    cut = jax.lax.stop_gradient if is_cut else lambda x: x
    layer = lambda p, pressure, amount: (cut(pressure) * 1e-5 + amount * 1e8) @ p["weight"].T + p["bias"][None]
    params = {"weight": np.zeros((6, 4)), "bias": np.zeros(6)}
    result = jaxbench.compare((layer, params), Sum(4, 6), (X * 1e5, X[::-1] * 1e-8), dtypes=())
    failed = [gate.where for gate in result.gates if not gate.passed]
    assert failed == (["input 0"] if is_cut else []), str(result)


@pytest.mark.parametrize("momentum", [0.9, 0.89])
def test_a_small_mean_beside_a_large_variance_is_compared(momentum):
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.randn(6, generator=torch.Generator().manual_seed(0)) * 1e-8)
            self.register_buffer("var", torch.rand(6, generator=torch.Generator().manual_seed(1)) * 1e8)

        def forward(self, x):
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * x[..., :6].mean(0).detach() * 1e-8)
                self.var.mul_(0.9).add_(0.1e8)
            return x * 2.0

    class Port(nnx.Module):
        def __init__(self):
            self.mean, self.var = nnx.BatchStat(jnp.zeros(6)), nnx.BatchStat(jnp.ones(6))

        def __call__(self, x, *, is_training):
            if is_training:
                mean = jax.lax.stop_gradient(x).mean(0) * 1e-8
                self.mean.set_value(momentum * self.mean[...] + 0.1 * mean)
                self.var.set_value(0.9 * self.var[...] + 0.1e8)
            return x * 2.0

    modes = {"eval": {"is_training": False}, "train": {"is_training": True}}
    inputs = np.random.default_rng(1).standard_normal((5, 6)) * 1e-8
    result = jaxbench.compare(Port(), Norm(), inputs, jax_modes=modes, modes=("eval", "train"), quick=True, dtypes=())
    wanted = [] if momentum == 0.9 else [True]
    assert ["state" in gate.what for gate in result.gates if not gate.passed] == wanted, str(result)
