"""A cause is named where a change explains what the unchanged module does not, and looking costs no verdict."""

import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jaxbench
from jaxbench.pair import casts, causes, public_types, report
from jaxbench.pair.alignment import Aligned
from jaxbench.pair.torch_side import TorchSide
from jaxbench.parity import capture, gates
from tests.pair import bugs

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((3, 4, 5))


class Recurrent(torch.nn.Module):
    """A recurrent layer inside a model."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = getattr(torch.nn, kind)(5, 6, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


def steps(params, x, *, kind, is_wrong):
    """The same step by step, its gates in another order where it is wrong."""
    p = params["rnn"]
    h = c = jnp.zeros((len(x), 6), x.dtype)
    sigmoid, ys = jax.nn.sigmoid, []
    for t in range(x.shape[1]):
        by_x = x[:, t] @ p["weight_ih_l0"].T + p["bias_ih_l0"][None]
        by_h = h @ p["weight_hh_l0"].T + p["bias_hh_l0"][None]
        if kind == "LSTM":
            i, f, g, o = jnp.split(by_x + by_h, 4, -1)
            f, g = (g, f) if is_wrong else (f, g)
            c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
            h = sigmoid(o) * jnp.tanh(c)
        elif kind == "GRU":
            (r, z, n), (r_h, z_h, n_h) = jnp.split(by_x, 3, -1), jnp.split(by_h, 3, -1)
            r, z = sigmoid(r + r_h), sigmoid(z + z_h)
            r, z = (z, r) if is_wrong else (r, z)
            h = (1 - z) * jnp.tanh(n + r * n_h) + z * h
        else:
            h = jnp.tanh(by_x + (by_h - p["bias_hh_l0"][None] if is_wrong else by_h))
        ys.append(h)
    return jaxbench.tap("rnn", jnp.stack(ys, 1))


@pytest.mark.parametrize(
    ("kind", "words"), [("LSTM", "order (0, 2, 1, 3)"), ("GRU", "order (1, 0, 2)"), ("RNN", "bias_hh_l0 is missing")]
)
def test_recurrent_layers_are_tried_by_their_own_names(kind, words):
    twin = Recurrent(kind)
    params = {"rnn": {name: np.ones(p.shape) for name, p in twin.rnn.named_parameters()}}
    port = lambda is_wrong: (lambda p, x: steps(p, x, kind=kind, is_wrong=is_wrong), params)
    assert jaxbench.compare(port(False), twin, X, quick=True).passed
    result = jaxbench.compare(port(True), twin, X, quick=True)
    assert not result.passed and "rnn" in {entry.module for entry in result.blamed}
    assert words in result.causes["rnn"]


def case(module, x, mine, *, types=()):
    """What `likely` is told of a module whose JAX output is `mine`, given the module's own input."""
    side = TorchSide(module, dtype="float64")
    run = side.run((x,), is_training=False)
    culprit = capture.LocalError(capture.ROOT, 1.0)
    forced = {capture.ROOT: capture.Call((), (mine,))}
    return culprit, Aligned({capture.ROOT: capture.ROOT}, {}), forced, side, run


def test_a_module_that_is_right_as_it_is_gets_no_cause():
    module, x = bugs.scattered(torch.nn.Conv2d(3, 4, 3, padding=1)), RANDOM.standard_normal((2, 3, 8, 8))
    mine = module.double()(torch.from_numpy(x)).detach().numpy()
    for value in (mine, mine.transpose(0, 2, 3, 1)):  # its own layout, and JAX's
        assert causes.likely(*case(module, x, value), is_training=False) == ""
    assert "2 times" in causes.likely(*case(module, x, 2 * mine), is_training=False)


class Raising(torch.nn.Linear):
    """A module whose settings cannot be looked at."""

    def forward(self, x):
        return super().forward(x)

    def named_modules(self, *args, **kwargs):
        if getattr(self, "is_locked", False):
            raise AttributeError("no such attribute")
        return super().named_modules(*args, **kwargs)


def test_an_error_while_a_cause_is_looked_for_loses_nothing():
    given = case(Raising(4, 4), X[:, :, :4], np.ones((3, 4, 4)))
    given[3].module.is_locked = True
    assert causes.likely(*given, is_training=False) == ""


class Mixed(torch.nn.Module):
    """A sine between two linear layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        return self.b(torch.sin(self.a(x)))


class MixedPort(nnx.Module):
    """Its port with a function in the sine's place."""

    def __init__(self, between):
        self.a, self.b = nnx.Linear(6, 6, rngs=nnx.Rngs(0)), nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        self.between = between

    def __call__(self, x):
        return self.b(self.between(self.a(x)))


def taylor(h):
    return h - h**3 / 6 + h**5 / 120


@pytest.mark.parametrize(
    "between", [taylor, lambda h: jnp.sin(h + 0.002), lambda h: jnp.sin(jnp.clip(h, -1, 1)), lambda h: 0.999 * h]
)
def test_a_slip_of_the_size_of_a_rounding_is_called_no_cast(between):
    twin = bugs.scattered(Mixed())
    result = jaxbench.compare(MixedPort(between), twin, RANDOM.standard_normal((4, 6)), quick=True)
    assert not result.passed and "cast" not in str(result)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("what", ["result", "argument", "both"])
def test_a_cast_is_named_with_its_type(dtype, what):
    def between(h):
        h = h if what == "result" else h.astype(dtype).astype(jnp.float64)
        h = jnp.sin(h)
        return h if what == "argument" else h.astype(dtype).astype(jnp.float64)

    twin = bugs.scattered(Mixed())
    result = jaxbench.compare(MixedPort(between), twin, RANDOM.standard_normal((8, 6)), quick=True)
    assert not result.passed
    named = [name for name in ("float32", "float16", "bfloat16") if f" a cast to {name}" in str(result)]
    assert named in ([dtype], []) and (named or what == "argument")  # of a result, its own numbers show the rounding


def test_a_rounding_of_weights_explains_an_error_and_another_of_its_size_does_not():
    x, weight = RANDOM.standard_normal((20, 6)), RANDOM.standard_normal((6, 6))
    rounded = torch.from_numpy(weight).bfloat16().double().numpy() - weight
    miss = (x @ rounded).ravel()
    other = np.linalg.norm(miss) * RANDOM.standard_normal(miss.shape) / np.sqrt(miss.size)
    assert casts._explained(miss, other, [miss.copy()]) > 0.99
    assert casts._explained(other, RANDOM.standard_normal(miss.shape) * np.std(miss), [miss]) < casts.MIN_EXPLAINED
    assert casts._explained(100 * miss, other, [miss]) < casts.MIN_EXPLAINED  # far more than one rounding makes


class Stopped(torch.nn.Linear):
    """A layer whose gate gets no gradient."""

    def forward(self, x):
        y = super().forward(x)
        return y * torch.sigmoid(y).detach()


def test_equal_values_with_other_gradients_are_said_to_be_that():
    port = lambda p, x: (lambda y: y * jax.nn.sigmoid(y))(x @ p["kernel"] + p["bias"][None])
    params = {"kernel": np.ones((5, 4)), "bias": np.ones(4)}
    result = jaxbench.compare((port, params), Stopped(5, 4), X[0], dtypes=())
    assert not result.passed and "values agree, gradients do not: look for stop_gradient or detach" in str(result)
    assert "none of the known ones" not in str(result)
    result = jaxbench.compare((lambda p, x: 3 * port(p, x) ** 2, params), Stopped(5, 4), X[0], dtypes=())
    assert "values agree" not in str(result)


def test_blamed_modules_with_a_cause_come_first():
    local = tuple(capture.LocalError(f"layer_{i}", 1.0) for i in range(7))
    gate = gates.Gate("P1", "outputs, eval", False, 1.0, 1e-9)
    weights = types.SimpleNamespace(assumed=())
    result = public_types.Result((gate,), weights, {}, {}, "", local, local, None, {"layer_6": "a slip"}, ())
    lines = report.text(result).splitlines()
    assert lines[2] == "a cause is in layer_6: output, 1.0e+00 by itself" and lines[3] == "  likely: a slip"
    assert lines[4].startswith("a cause is in layer_0") and "and 3 more modules differ" in lines[-1]


class Normed(eqx.Module):
    """Linear layer and batch norm, which keeps its statistics in a state."""

    l: eqx.nn.Linear
    bn: eqx.nn.BatchNorm

    def __init__(self):
        self.l = eqx.nn.Linear(5, 4, key=jax.random.key(0))
        self.bn = eqx.nn.BatchNorm(4, "batch", momentum=0.9, mode="batch")

    def __call__(self, x, state):
        return self.bn(self.l(x), state)


class TorchNormed(torch.nn.Module):
    """Its twin."""

    def __init__(self):
        super().__init__()
        self.l, self.bn = torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(self.l(x))


def test_an_equinox_model_with_its_state_is_taken():
    side, twin, x = eqx.nn.make_with_state(Normed)(), bugs.scattered(TorchNormed()), RANDOM.standard_normal((7, 5))
    result = jaxbench.compare(side, twin, x, per_example=True, modes="eval", quick=True)
    assert result.passed, str(result)
    assert result.weights.rules["bn.var"].sources == ("bn.running_var",)
    batched = lambda m, x, s: jax.vmap(m, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, s)
    result = jaxbench.compare(side, twin, x, jax_call=batched, quick=True)
    assert "divided by n=7 in JAX" in result.causes["state"]
    assert [gate.what for gate in result.gates if not gate.passed] == ["state after a call, train"]
    with pytest.raises(TypeError, match=r"jax_side=\(Normed, int\): wanted an Equinox model, or \(model, state\)"):
        jaxbench.compare((side[0], 3), twin, x)


@pytest.mark.parametrize("more", [{"times": 1.0}, {"index": np.arange(5)}, {"name": None}])
def test_numbers_and_integers_among_parameters_stay_as_they_are(more):
    params = {"kernel": np.ones((5, 4)), "bias": np.ones(4)} | more
    port = lambda p, x: x[:, p.get("index", slice(None))] @ p["kernel"] * p.get("times", 1.0) + p["bias"][None]
    result = jaxbench.compare((port, params), torch.nn.Linear(5, 4), X[0], dtypes=())
    assert result.passed and set(result.weights.rules) == {"kernel", "bias"}


class Positions(torch.nn.Module):
    """Embeddings of tokens and of their positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.head = torch.nn.Embedding(7, 4), torch.nn.Embedding(9, 4), torch.nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])))


class Rows(nnx.Module):
    """A table of rows, which are read as they are or from one further on."""

    def __init__(self, count, shift=0):
        self.embedding, self.shift = nnx.Param(jnp.zeros((count, 4))), shift

    def __call__(self, ids):
        return self.embedding[...][ids + self.shift]


class PositionsPort(nnx.Module):
    """The same; positions begin at `start`, and the table shifts them."""

    def __init__(self, start, shift):
        self.tokens, self.places, self.head = Rows(7), Rows(9, shift), nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.start = start

    def __call__(self, tokens):
        return self.head(self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]) + self.start)[None])


@pytest.mark.parametrize(
    ("start", "shift", "module", "part"),
    [(1, 0, "model", "input of places"), (0, 1, "places", "output"), (1, 1, "places", "output"), (1, -1, None, None)],
)
def test_other_integers_are_the_slip_of_the_module_that_hands_them_over(start, shift, module, part):
    tokens = np.random.default_rng(0).integers(0, 7, (2, 5))
    result = jaxbench.compare(PositionsPort(start, shift), Positions(), tokens, quick=True)
    assert [(entry.module, entry.part) for entry in result.blamed] == ([] if module is None else [(module, part)])
    assert result.passed == (module is None)
    assert ("other integers are handed over: 1 in JAX, 0 in PyTorch at [0]" in str(result)) == (module == "model")
