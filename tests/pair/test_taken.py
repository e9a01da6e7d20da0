"""Models and inputs that are taken as they are, and what is refused because it would prove nothing."""

import collections
import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jaxbench

X = np.random.default_rng(2).standard_normal((5, 4))
Batch = collections.namedtuple("Batch", "x scale")


class Layer(torch.nn.Linear):
    """A linear layer, and what a function makes of its input and result."""

    def __init__(self, before=lambda x: x, after=lambda y: y):
        super().__init__(4, 6)
        self.before, self.after = before, after

    def forward(self, x):
        return self.after(super().forward(self.before(x)))


def port(before=lambda x: x, after=lambda y: y):
    layer = lambda p, x: after(before(x) @ p["kernel"] + p["bias"][None])
    return layer, {"kernel": np.zeros((4, 6)), "bias": np.zeros(6)}


def test_inputs_may_be_named_tuples():
    class Scaled(Layer):
        def forward(self, batch):
            return super().forward(batch.x) * batch.scale

    mine = lambda p, batch: port()[0](p, batch.x) * batch.scale
    assert jaxbench.compare((mine, port()[1]), Scaled(), (Batch(X, np.float64(2.0) * X[:, :1]),), dtypes=()).passed


def test_inputs_of_another_class_are_refused_with_what_to_do():
    @dataclasses.dataclass
    class Given:
        x: np.ndarray

    class Opened(Layer):
        def forward(self, given):
            return super().forward(given.x)

    mine = lambda p, given: port()[0](p, given.x)
    with pytest.raises(ValueError, match="PyTorch module cannot be called.*such as dataclasses, as one of these"):
        jaxbench.compare((mine, port()[1]), Opened(), (Given(X),), dtypes=())


def test_a_module_may_write_into_its_inputs():
    result = jaxbench.compare(port(jax.nn.relu), Layer(torch.relu_), X, dtypes=())
    assert result.passed and "input gradients, eval" in result.comparisons, str(result)


@pytest.mark.parametrize("has_rng", [True, False])
@pytest.mark.parametrize("has_state", [True, False])
def test_a_haiku_function_is_taken_with_and_without_its_key(has_rng, has_state):
    network = lambda x: hk.Linear(3)(jnp.tanh(hk.Linear(6)(x)))
    model = (hk.transform_with_state if has_state else hk.transform)(network)
    twin = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    result = jaxbench.compare(model if has_rng else hk.without_apply_rng(model), twin, X, dtypes=())
    assert result.passed, str(result)


def test_modules_that_return_integers_alone_are_refused_in_words():
    with pytest.raises(ValueError, match="outputs: 0 floating arrays from PyTorch"):
        jaxbench.compare(port(after=lambda y: jnp.argmax(y, -1)), Layer(after=lambda y: y.argmax(-1)), X)


@pytest.mark.parametrize("is_quick", [True, False])
def test_an_empty_batch_proves_nothing_and_is_refused(is_quick):
    with pytest.raises(ValueError, match=r"without elements \(\[\[0, 6\]\]\)"):
        jaxbench.compare(port(after=jnp.tanh), Layer(), X[:0], quick=is_quick)


def test_own_weights_are_compared_each_by_itself():
    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(40, 6)
            self.scale = torch.nn.Parameter(torch.tensor([1e-7]))
            self.weight.data *= 1e4

        def forward(self, x):
            return super().forward(x) * self.scale

    twin = Scaled()
    kernel, bias = (p.detach().numpy() for p in (twin.weight, twin.bias))
    layer = lambda p, x: (x @ p["kernel"] + p["bias"][None]) * p["scale"][None]
    params = {"kernel": kernel.T.copy(), "bias": bias.copy(), "scale": np.array([2e-7], np.float32)}
    inputs = np.random.default_rng(0).standard_normal((3, 40))
    result = jaxbench.compare((layer, params), twin, inputs, weights="own", quick=True)
    assert [gate.where for gate in result.gates if not gate.passed] == ["scale"]


def test_an_error_of_one_element_is_not_called_a_cast():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    class Port(nnx.Module):
        def __init__(self, change):
            rngs = nnx.Rngs(0)
            self.up, self.down, self.change = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs), change

        def __call__(self, x):
            return self.down(self.change(jnp.tanh(self.up(x))))

    inputs = np.random.default_rng(0).standard_normal((2, 7, 8))
    one = jaxbench.compare(Port(lambda h: h.at[-1, -1, -1].multiply(1 + 2e-7)), Block(), inputs, quick=True)
    every = jaxbench.compare(Port(lambda h: h.astype(jnp.float32).astype(h.dtype)), Block(), inputs, quick=True)
    assert not one.passed and not one.causes
    assert "a cast to float32" in every.causes["model"]


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_port_of_inference_that_forgets_the_statistics_is_found_beside_a_fresh_batch_norm(is_fresh):
    twin = torch.nn.BatchNorm1d(4)
    if not is_fresh:
        twin.running_mean += 1.0
    forgets = lambda p, x: x / jnp.sqrt(1.0 + 1e-5) * p["weight"][None] + p["bias"][None]
    params = {"weight": np.ones(4), "bias": np.zeros(4)}
    options = {"modes": "eval", "quick": True}
    assert not jaxbench.compare((forgets, params), twin, X, **options).passed
    if is_fresh:
        without = {"running_mean": None, "running_var": None}
        assert jaxbench.compare((forgets, params), twin, X, without, **options).passed
