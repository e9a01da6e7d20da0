"""Values of very different sizes: none hides a slip in another, in outputs or in gradients, and rounding is no slip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

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
