"""Pairs of every kind of JAX model, through the functions that a caller uses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx

import jaxbench
from tests.pair import bugs

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((3, 4))


def mlp(activation=torch.nn.Tanh):
    return bugs.scattered(torch.nn.Sequential(torch.nn.Linear(4, 6), activation(), torch.nn.Linear(6, 2)))


def function(params, x):
    hidden = jnp.tanh(jaxbench.tap("hidden", x @ params["up"]["w"] + params["up"]["b"][None]))
    return hidden @ params["down"]["w"] + params["down"]["b"][None]


PARAMS = {"up": {"w": np.ones((4, 6)), "b": np.ones(6)}, "down": {"w": np.ones((6, 2)), "b": np.ones(2)}}


def test_every_gate_of_a_function_of_parameters():
    decay = {"weight_decay": 0.1}
    optimizers = (optax.adamw(1e-2, **decay), lambda params: torch.optim.AdamW(params, 1e-2, **decay))
    result = jaxbench.compare((function, PARAMS), mlp(), X, {"hidden": "0"}, optimizers=optimizers)
    assert result.passed, str(result)
    assert result.modules == {"hidden": "0", "model": "model"}
    kinds = {gate.what for gate in result.gates}
    assert {"gradients, eval", "input gradients, eval", "parameters after 5 steps", "outputs, bfloat16"} <= kinds
    assert str(result).startswith("the same function")


def test_another_default_of_an_optimiser_shows_in_the_steps_alone():
    optimizers = (optax.adamw(1e-2), lambda params: torch.optim.AdamW(params, 1e-2))
    result = jaxbench.compare((function, PARAMS), mlp(), X, optimizers=optimizers)
    assert {gate.what for gate in result.gates if not gate.passed} == {
        "losses of optimiser steps",
        "parameters after 5 steps",
    }


def test_the_test_helper_names_where_and_why():
    with pytest.raises(AssertionError, match=r"(?s)NOT the same.*a cause is in model.*likely: activation of 1: tanh"):
        jaxbench.assert_same_function((function, PARAMS), mlp(torch.nn.ReLU), X, quick=True)
    jaxbench.assert_same_function((function, PARAMS), mlp(), X, quick=True)


class Norm(linen.Module):
    """Batch norm with PyTorch's momentum and eps."""

    momentum: float = 0.9

    @linen.compact
    def __call__(self, x, train=False):
        return linen.BatchNorm(not train, momentum=self.momentum, epsilon=1e-5)(x)


@pytest.mark.parametrize(("momentum", "cause"), [(0.9, "divided by n=3 in JAX, by n-1"), (0.99, "momentum")])
def test_statistics_after_a_call_in_training_mode_are_compared(momentum, cause):
    modes = {"eval": {"train": False}, "train": {"train": True}}
    twin = bugs.scattered(torch.nn.BatchNorm1d(4))
    result = jaxbench.compare(Norm(momentum), twin, X, jax_modes=modes, dtypes=())
    assert [gate.what for gate in result.gates if not gate.passed] == ["state after a call, train"]
    assert cause in result.causes["state"]


def test_dropout_in_training_mode_is_said_not_to_be_compared():
    twin = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
    result = jaxbench.compare(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), twin, X, quick=True)
    assert result.passed and "dropout p=0.5 in 1 modules" in result.notes[0]


def test_weights_go_to_pytorch_or_stay_and_are_compared():
    layer, twin = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(4, 2)
    kept = {name: x.detach().clone() for name, x in twin.named_parameters()}
    assert jaxbench.compare(layer, twin, X, weights="jax", quick=True).passed
    own = jaxbench.compare(layer, twin, X, weights="own", quick=True)
    assert {gate.id for gate in own.gates if not gate.passed} == {"P5"}  # other weights, the same function
    assert all(torch.equal(kept[name], x) for name, x in twin.named_parameters())  # the caller's module is not touched
    with torch.no_grad():
        twin.weight.copy_(torch.tensor(np.asarray(layer.kernel[...]).T))
        twin.bias.copy_(torch.tensor(np.asarray(layer.bias[...])))
    assert jaxbench.compare(layer, twin, X, weights="own", quick=True).passed


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "mine"}, ValueError, "weights='mine'"),
        ({"modes": ("testing",)}, ValueError, "modes="),
        ({"num_steps": 0}, ValueError, "num_steps=0"),
        ({"torch_outputs": lambda y: (y, y)}, ValueError, "1 floating arrays from JAX, 2 from PyTorch"),
        ({"speed": True}, TypeError, "speed"),
    ],
)
def test_wrong_settings_are_named(options, error, message):
    with pytest.raises(error, match=message):
        jaxbench.compare((function, PARAMS), mlp(), X, **{"quick": True} | options)


def test_what_is_no_model_is_named():
    with pytest.raises(TypeError, match="torch_module=function"):
        jaxbench.compare((function, PARAMS), function, X)
    with pytest.raises(TypeError, match="jax_side=int"):
        jaxbench.compare(3, mlp(), X)


def test_a_tap_outside_a_comparison_does_nothing():
    assert jaxbench.tap("name", 3) == 3
    assert jax.jit(lambda x: jaxbench.tap("name", x))(2.0) == 2.0


def test_haikus_norm_with_its_averages_is_the_norm_of_pytorch():
    hk = pytest.importorskip("haiku")

    def network(x, is_training):
        x = hk.Conv2D(4, 3, with_bias=False)(x)
        return hk.BatchNorm(True, True, 0.9, eps=1e-5)(x, is_training)

    layers = (torch.nn.Conv2d(2, 4, 3, padding=1, bias=False), torch.nn.BatchNorm2d(4))
    twin = bugs.scattered(torch.nn.Sequential(*layers))
    image = RANDOM.standard_normal((2, 2, 6, 6))
    result = jaxbench.compare(
        hk.transform_with_state(network), twin, image, jax_inputs=lambda x: (x.transpose(0, 2, 3, 1),),
        jax_modes={"eval": {"is_training": False}, "train": {"is_training": True}}, modes=("eval",), quick=True,
    )  # fmt: skip
    assert result.passed, str(result)
    rules = result.weights.rules
    assert rules["batch_norm.mean"].sources == ("1.running_mean",) and rules["batch_norm.scale"].sources == (
        "1.weight",
    )
    assert any(name.endswith("counter") for name in result.weights.kept)  # PyTorch has none; it is said


class Doubled(torch.nn.Linear):
    """A linear layer with a parameter that its output needs and JAX does not have: a scale of 1."""

    def __init__(self):
        super().__init__(4, 2)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_tensor_that_jax_is_said_not_to_have_has_no_gradient_to_compare():
    optimizers = (optax.sgd(1e-2), lambda params: torch.optim.SGD(params, 1e-2))
    result = jaxbench.compare(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), Doubled(), X, {"scale": None}, dtypes=())
    assert result.passed, str(result)
    moved = jaxbench.compare(
        nnx.Linear(4, 2, rngs=nnx.Rngs(0)), Doubled(), X, {"scale": None}, dtypes=(), optimizers=optimizers
    )
    assert not moved.passed  # PyTorch's scale moves, and the loss with it


def test_frozen_parameters_stay_and_the_others_are_trained_alike():
    twin = mlp()
    twin[0].requires_grad_(False)
    optimizers = (optax.sgd(1e-2), lambda params: torch.optim.SGD(params, 1e-2))
    result = jaxbench.compare((function, PARAMS), twin, X, dtypes=(), optimizers=optimizers)
    assert result.passed, str(result)
    assert {"loss, eval", "gradients, eval", "parameters after 5 steps"} <= {gate.what for gate in result.gates}


def test_a_module_without_a_floating_output_is_refused():
    class Argmax(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    with pytest.raises(ValueError, match="0 floating arrays from PyTorch, wanted one at least"):
        jaxbench.compare(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), Argmax(4, 2), X)


class Child(nnx.Linear):
    """Inherits its __call__."""


def test_modules_that_inherit_their_call_are_compared_too():
    class Two(nnx.Module):
        def __init__(self):
            self.first, self.second = Child(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    layers = (torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    result = jaxbench.compare(Two(), torch.nn.Sequential(*layers), X, quick=True)
    assert result.passed and {"first", "second"} <= result.modules.keys()
