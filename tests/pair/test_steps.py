"""Optimiser steps train the JAX model's own arrays and carry its state, as whoever trains it would."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import jaxbench

RANDOM = np.random.default_rng(11)
X, TOKENS = RANDOM.standard_normal((5, 4)), RANDOM.integers(0, 7, (3, 6))
SGD = (optax.sgd(0.1), lambda params: torch.optim.SGD(params, 0.1))
UNTIED = {"embed.embedding": "embed.weight", "head.kernel": "embed.weight"}


class Tied(torch.nn.Module):
    """An embedding that is also the readout."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class Embedding(nnx.Module):
    """A table of rows."""

    def __init__(self):
        self.embedding = nnx.Param(jnp.zeros((7, 4)))

    def __call__(self, tokens):
        return self.embedding[...][tokens]


class TiedPort(nnx.Module):
    """The same with one array or with two."""

    def __init__(self, *, is_tied):
        self.embed = Embedding()
        self.head = None if is_tied else nnx.Linear(4, 7, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        rows = self.embed(tokens)
        return rows @ self.embed.embedding[...].T if self.head is None else self.head(rows)


@pytest.mark.parametrize(("is_tied", "names"), [(True, {}), (False, UNTIED)])
def test_two_arrays_of_one_tensor_are_a_note_and_part_in_training(is_tied, names):
    options = {"names": names, "dtypes": ()}
    result = jaxbench.compare(TiedPort(is_tied=is_tied), Tied(), TOKENS, optimizers=SGD, **options)
    failed = [gate.what for gate in result.gates if not gate.passed]
    assert failed == ([] if is_tied else ["losses of optimiser steps", "parameters after 5 steps"])
    again = jaxbench.compare(TiedPort(is_tied=is_tied), Tied(), TOKENS, **options)
    said = "embed.weight is one tensor in PyTorch and several arrays in JAX" in str(again)
    assert again.passed and said != is_tied


class Centred(torch.nn.Module):
    """A linear layer, less a running mean of what it gave in training."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)
        self.register_buffer("centre", torch.randn(6, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.centre


class CentredPort(nnx.Module):
    """The same, with a momentum."""

    def __init__(self, momentum=0.9):
        self.linear, self.momentum = nnx.Linear(4, 6, rngs=nnx.Rngs(0)), momentum
        self.centre = nnx.BatchStat(jnp.zeros(6))

    def __call__(self, x, *, is_training):
        y = self.linear(x)
        if is_training:
            moved = self.momentum * self.centre[...] + 0.1 * jax.lax.stop_gradient(y).mean(0)
            self.centre.set_value(moved)
        return y - self.centre[...][None]


@pytest.mark.parametrize("momentum", [0.9, 0.8])
def test_state_goes_from_step_to_step_on_both_sides(momentum):
    modes = {"eval": {"is_training": False}, "train": {"is_training": True}}
    result = jaxbench.compare(CentredPort(momentum), Centred(), X, jax_modes=modes, optimizers=SGD, dtypes=())
    assert result.passed == (momentum == 0.9), str(result)
    steps = [gate for gate in result.gates if gate.what in ("losses of optimiser steps", "parameters after 5 steps")]
    assert len(steps) == 2


def test_a_bias_that_is_the_sum_of_two_tensors_is_trained_at_its_own_pace():
    class Both(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 6)
            self.more = torch.nn.Parameter(torch.randn(6, generator=torch.Generator().manual_seed(1)))

        def forward(self, x):
            return super().forward(x) + self.more

    names = {"bias": lambda tensors: tensors["bias"] + tensors["more"]}
    port = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    result = jaxbench.compare(port, Both(), X, names, optimizers=SGD, dtypes=())
    [gate] = [gate for gate in result.gates if gate.what == "parameters after 5 steps"]
    assert gate.where == "bias" and not gate.passed
    assert jaxbench.compare(port, Both(), X, names, dtypes=()).passed


def test_the_transformation_sees_the_jax_arrays_by_name():
    seen = []
    decay = lambda params: seen.append(sorted(params)) or {name: name == "kernel" for name in params}
    optimizers = (optax.adamw(1e-2, weight_decay=0.1, mask=decay), lambda params: torch.optim.AdamW([
        {"params": [p for p in params if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ], lr=1e-2))  # fmt: skip
    port = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    assert jaxbench.compare(port, torch.nn.Linear(4, 6), X, optimizers=optimizers, dtypes=()).passed
    assert seen[0] == ["bias", "kernel"]


@pytest.mark.parametrize(("eps", "is_same"), [(1e-8, True), (1e-7, False)])
def test_a_slip_in_small_updates_shows_though_parameters_are_large_beside_them(eps, is_same):
    optimizers = (optax.adam(1e-8, eps=eps), lambda params: torch.optim.Adam(params, 1e-8))
    port = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    result = jaxbench.compare(port, torch.nn.Linear(4, 6), X, optimizers=optimizers, dtypes=())
    failed = [gate.what for gate in result.gates if not gate.passed]
    assert failed == ([] if is_same else ["updates of 5 steps"]), str(result)


def test_updates_of_a_bias_without_a_gradient_are_rounding():
    class Softmax(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 6)
            self.shift = torch.nn.Parameter(torch.randn(1, generator=torch.Generator().manual_seed(2)))

        def forward(self, x):
            return (super().forward(x) + self.shift).softmax(-1)

    layer = lambda p, x: jax.nn.softmax(x @ p["weight"].T + p["bias"][None] + p["shift"][None])
    params = {"weight": np.zeros((6, 4)), "bias": np.zeros(6), "shift": np.zeros(1)}
    optimizers = (optax.adam(1e-2), lambda params: torch.optim.Adam(params, 1e-2))
    result = jaxbench.compare((layer, params), Softmax(), X, optimizers=optimizers, dtypes=())
    assert result.passed, str(result)
    assert {entry.name for entry in result.comparisons["updates of 5 steps"].entries} == {"weight", "bias"}


class Preference(torch.nn.Module):
    """A layer against a frozen reference."""

    def __init__(self):
        super().__init__()
        self.policy, self.reference = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
        self.reference.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.policy(x) - self.reference(x))


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_frozen_layer_that_gradients_reach_in_jax_is_a_note(is_stopped):
    class Port(nnx.Module):
        def __init__(self):
            self.policy, self.reference = (nnx.Linear(4, 6, rngs=nnx.Rngs(i)) for i in range(2))

        def __call__(self, x):
            other = self.reference(x)
            return jnp.tanh(self.policy(x) - (jax.lax.stop_gradient(other) if is_stopped else other))

    result = jaxbench.compare(Port(), Preference(), X, dtypes=(), optimizers=SGD)
    said = "PyTorch does not train these, and gradients reach them in JAX, which stop_gradient would stop: " in str(
        result
    )
    assert said != is_stopped
