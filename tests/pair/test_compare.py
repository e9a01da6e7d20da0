"""Pairs of every kind of JAX model, through the functions that a caller uses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx

import jaxbench
from jaxbench.pair import proof, public_types
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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.from_numpy(X).float())])
def test_torchscript_is_compared_as_a_whole(compiled):
    decay = {"weight_decay": 0.1}
    optimizers = (optax.adamw(1e-2, **decay), lambda params: torch.optim.AdamW(params, 1e-2, **decay))
    result = jaxbench.compare((function, PARAMS), compiled(mlp()), X, optimizers=optimizers)
    assert result.passed, str(result)
    assert {"gradients, eval", "parameters after 5 steps"} <= {gate.what for gate in result.gates}
    assert not jaxbench.compare((function, PARAMS), compiled(mlp(torch.nn.ReLU)), X, quick=True).passed


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


class Layer(torch.nn.Linear):
    """Linear layer whose outputs are what a function makes of its result."""

    def __init__(self, out_of):
        super().__init__(4, 4)
        self.out_of = out_of

    def forward(self, x):
        return self.out_of(super().forward(x))


Y = RANDOM.standard_normal((2, 4, 4))  # as many positions as features, so that a transposed output has the same shape


def outputs(of_jax, of_torch, x=Y, **options):
    """Result of equal layers whose outputs differ."""
    layer = lambda p, x: of_jax(x @ p["kernel"] + p["bias"][None, None])
    params = {"kernel": np.zeros((4, 4)), "bias": np.zeros(4)}
    return jaxbench.compare((layer, params), Layer(of_torch), x, quick=True, **options)


@pytest.mark.parametrize(
    "of_jax", [lambda y: y.swapaxes(1, 2), lambda y: y.transpose(1, 2, 0), lambda y: y.reshape(-1)]
)
def test_an_output_in_another_order_of_axes_is_not_the_same(of_jax):
    result = outputs(of_jax, lambda y: y)
    assert not result.passed and "output 0 is equal up to" in str(result) and "jax_outputs=" in str(result)
    assert outputs(of_jax, lambda y: y, jax_outputs=lambda y: unturned(y, of_jax)).passed


def unturned(y, of_jax):
    """What an order of axes was made of."""
    places = np.asarray(of_jax(np.arange(Y.size).reshape(Y.shape))).ravel()
    return y.ravel()[np.argsort(places)].reshape(Y.shape)


def test_heads_in_another_order_are_not_the_same_though_their_shapes_fit_otherwise():
    heads = lambda y: y.reshape(2, 4, 2, 2)
    result = outputs(heads, lambda y: y.view(2, 4, 2, 2).transpose(1, 2))
    assert not result.passed and "axes (0, 2, 1, 3)" in str(result)


def test_channels_last_is_accepted_with_a_note():
    result = outputs(lambda y: y, lambda y: y.transpose(1, 2), Y[:, :3])
    assert result.passed and "output 0: [2, 3, 4] of JAX taken in the order (0, 2, 1)" in str(result)


def test_outputs_by_name_are_compared_by_name():
    named = lambda y: {"logits": y, "aux": 2 * y, "cache": None}
    turned = lambda y: {"aux": 2 * y, "logits": y}
    assert outputs(turned, named).passed
    swapped = outputs(lambda y: {"aux": y, "logits": 2 * y}, named)
    assert {gate.where for gate in swapped.gates if gate.what.startswith("outputs")} == {"output logits"}
    with pytest.raises(ValueError, match=r"only PyTorch's have the keys \['aux'\], only JAX's \['extra'\]"):
        outputs(lambda y: {"logits": y, "extra": y}, named)


def test_integer_and_boolean_outputs_are_compared_exactly():
    both = lambda y: (y, {"best": y.argmax(-1), "above": y > 0})
    assert outputs(both, both).passed
    result = outputs(lambda y: (y, {"best": y.argmin(-1), "above": y > 0}), both)
    assert [gate.where for gate in result.gates if not gate.passed] == ["exact output 1.best"]
    alone = outputs(lambda y: y, lambda y: (y, y.argmax(-1)))
    assert alone.passed and "only PyTorch has it, integers or booleans" in str(alone)


def test_infinities_in_the_same_places_are_equal_and_nan_never_is(recwarn):
    x, lower = Y[:, :4], np.tri(4, dtype=bool)
    mask = lambda y: jnp.where(lower[None], y, -jnp.inf)
    twin = lambda y: y.masked_fill(~torch.tensor(lower), -torch.inf)
    layer, params = (
        lambda p, x: mask(x @ p["kernel"] + p["bias"][None, None]),
        {"kernel": np.zeros((4, 4)), "bias": np.zeros(4)},
    )
    result = jaxbench.compare((layer, params), Layer(twin), x)  # with gradients, and in narrower types
    assert result.passed, str(result)
    shifted = outputs(lambda y: jnp.where(lower.T[None], y, -jnp.inf), twin)
    assert not shifted.passed and "not finite at [0, 0, 1]" in str(shifted)
    nan = outputs(lambda y: y * np.nan, lambda y: y * np.nan)
    assert not nan.passed and "not finite at [0, 0, 0]: nan in JAX, nan in PyTorch" in str(nan)
    assert "dropout" not in str(nan) and not [w for w in recwarn if w.category is RuntimeWarning]


def test_a_pytorch_module_that_is_random_is_said_to_be():
    result = outputs(lambda y: y, lambda y: torch.nn.functional.dropout(y, 0.5))
    assert "the PyTorch module is random in eval mode" in str(result) and "cast" not in str(result)


def norm(p, x, *, is_wrong):
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return (x + p["bias"]) * p["scale"] if is_wrong else x * p["scale"] + p["bias"]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_ones_and_zeros_of_a_fresh_norm_hide_nothing_and_the_callers_module_keeps_them(is_wrong):
    twin, params = torch.nn.LayerNorm(4), {"scale": np.ones(4), "bias": np.zeros(4)}
    mine = lambda p, x: norm({name: each[None] for name, each in p.items()}, x, is_wrong=is_wrong)
    result = jaxbench.compare((mine, params), twin, X, quick=True)
    assert result.passed != is_wrong and "random values: bias, weight" in str(result)
    assert torch.all(twin.weight == 1) and torch.all(twin.bias == 0)
    with pytest.raises(ValueError, match="RuntimeError"):
        jaxbench.compare((mine, params), twin, X[:, :3], quick=True)
    assert torch.all(twin.weight == 1) and torch.all(twin.bias == 0)


def test_variances_stay_positive_and_tensors_that_jax_lacks_stay_as_they_are():
    side = proof.TorchSide(torch.nn.BatchNorm1d(4), dtype="float64")
    names = {"running_var", "running_mean", "weight"}
    assert set(side.disturb(names)) == names
    tensors = side.tensors()
    assert np.all(tensors["running_var"] > 0) and np.ptp(tensors["running_mean"]) > 0 and np.all(tensors["bias"] == 0)


class Plain(torch.nn.Module):
    """A square parameter of its own, used as it is stored."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return x @ self.w


def test_a_square_parameter_of_a_class_without_a_layout_is_taken_as_it_is_stored():
    params = {"w": np.zeros((4, 4))}
    assert jaxbench.compare((lambda p, x: x @ p["w"], params), Plain(), X, quick=True).passed
    result = jaxbench.compare((lambda p, x: x @ p["w"].T, params), Plain(), X, quick=True)
    assert not result.passed and "w is transposed in JAX" in str(result)
    own = {"w": Plain().w.detach().numpy().T}
    result = jaxbench.compare((lambda p, x: x @ p["w"].T, own), Plain(), X, quick=True, weights="own")
    assert result.passed and "w has the values of w, axes (1, 0) of PyTorch's" in str(result)


def test_one_mode_or_type_may_be_given_as_a_word_and_inputs_as_a_list():
    modes = {"eval": {"train": False}, "train": {"train": True}}
    twin = bugs.scattered(torch.nn.BatchNorm1d(4))
    result = jaxbench.compare(Norm(), twin, [X], jax_modes=modes, modes="train", dtypes="float32", quick=True)
    assert "state after a call, train" in {gate.what for gate in result.gates}
    pair = public_types.checked(jaxbench.Pair(function, twin, [X], modes="train", dtypes="float32"))
    assert (pair.modes, pair.dtypes, type(pair.inputs)) == (("train",), ("float32",), tuple)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": {"up.w": 3}}, "names={'up.w': 3}: wanted a PyTorch name"),
        ({"names": {"hiden": "0"}}, "names={'hiden': '0'}.*nearest: hidden"),
        ({"jax_modes": {"evall": {}}}, "jax_modes={'evall': {}}: 'evall' is none of eval, train"),
        ({"inputs": X[:, :3]}, "the PyTorch module cannot be called on the inputs in eval mode: RuntimeError"),
        ({"jax_inputs": lambda x: (x[:, :3],)}, "the JAX model cannot be called on the inputs"),
        ({"jax_modes": {"eval": {"no_such": 1}}}, "the JAX model cannot be called on the inputs.*no_such"),
    ],
)
def test_what_cannot_be_called_or_is_misspelt_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        jaxbench.compare((function, PARAMS), mlp(), **{"inputs": X, "quick": True} | options)


def test_a_model_with_a_narrow_type_of_its_own_is_told_what_to_do():
    layer = lambda dtype: nnx.Linear(4, 2, dtype=dtype, rngs=nnx.Rngs(0))
    result = jaxbench.compare(layer(jnp.bfloat16), torch.nn.Linear(4, 2), X, quick=True)
    assert not result.passed and "cast to bfloat16" in str(result) and "dtype=jnp.float64 (or dtype=None" in str(result)
    assert jaxbench.compare(layer(jnp.float64), torch.nn.Linear(4, 2), X, quick=True).passed
    assert jaxbench.compare(layer(None), torch.nn.Linear(4, 2), X, quick=True).passed
