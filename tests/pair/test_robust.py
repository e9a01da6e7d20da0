"""What must not hide a slip, and what must not fail a sound port: masks, seeds, state, plain numbers, frozen models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import jaxbench
from jaxbench.pair import draws, proof
from jaxbench.pair.torch_side import TorchSide
from jaxbench.parity import capture, run

RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((4, 6))
MASK = float(np.finfo(np.float32).min)


class Layer(torch.nn.Linear):
    """A linear layer, and what a function makes of its result."""

    def __init__(self, out_of=lambda y: y):
        super().__init__(6, 5)
        self.out_of = out_of

    def forward(self, x):
        return self.out_of(super().forward(x))


def compare(of_jax, of_torch, inputs=X, **options):
    layer = lambda p, x: of_jax(x @ p["kernel"] + p["bias"][None])
    params = {"kernel": np.zeros((6, 5)), "bias": np.zeros(5)}
    return jaxbench.compare((layer, params), Layer(of_torch), inputs, **{"dtypes": ()} | options)


class Identity(torch.nn.Module):
    """Its input."""

    def forward(self, x):
        return x * 1


@pytest.mark.parametrize("seed", [0, 1])
def test_no_seed_of_the_example_input_hides_a_gradient(seed):
    x = np.random.default_rng(seed).standard_normal((8, 64))
    result = jaxbench.compare(jax.lax.stop_gradient, Identity(), x, dtypes=())
    assert [gate.what for gate in result.gates if not gate.passed] == ["input gradients, eval"]


def test_targets_are_those_of_the_inputs_and_ask_nothing_of_masks():
    y = np.array([1.0, MASK, np.inf, -2.0])
    (first,), (again,), (other,) = (draws.targets((y,), x) for x in ((X,), (X.copy(),), (X + 1,)))
    np.testing.assert_array_equal(first, again)
    assert np.array_equal(np.isnan(first), [False, True, True, False]) and first[0] != other[0]


@pytest.mark.parametrize("slip", [lambda y: 2 * y, lambda y: y])
def test_a_mask_beside_an_output_or_in_it_hides_nothing(slip):
    lower = np.tri(4, 5, dtype=bool)
    mine = lambda y: (jnp.where(lower, 0.0, MASK), slip(y), jnp.where(lower, slip(y), MASK))
    theirs = lambda y: (
        torch.zeros(4, 5, dtype=y.dtype).masked_fill(~torch.tensor(lower), MASK), y,
        y.masked_fill(~torch.tensor(lower), MASK),
    )  # fmt: skip
    result = compare(mine, theirs)
    failed = {entry.name for entry in result.comparisons["outputs, eval"].entries if not entry.passed}
    assert failed == ({"output 1", "output 2"} if slip(1) == 2 else set())
    assert result.passed == (slip(1) == 1), str(result)


def test_an_output_counts_by_itself_however_large_the_others_are():
    result = compare(lambda y: (y * 1e9, y + 1e-6), lambda y: (y * 1e9, y), quick=True)
    assert not result.passed


class Step(torch.nn.Module):
    """Writes into a cache in any mode."""

    def __init__(self):
        super().__init__()
        self.kv = torch.nn.Linear(6, 6)
        self.register_buffer("cache", torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        self.cache[:, 1] = self.kv(x).detach()
        return self.kv(x)


class StepPort(nnx.Module):
    """The same, at a place."""

    def __init__(self, place):
        self.kv, self.place = nnx.Linear(6, 6, rngs=nnx.Rngs(0)), place
        self.cache = nnx.Cache(jnp.zeros((4, 3, 6)))

    def __call__(self, x):
        self.cache.set_value(self.cache[...].at[:, self.place].set(self.kv(x)))
        return self.kv(x)


@pytest.mark.parametrize("place", [1, 2])
def test_a_cache_written_in_evaluation_mode_is_compared(place):
    result = jaxbench.compare(StepPort(place), Step(), X, quick=True)
    failed = [gate.what for gate in result.gates if not gate.passed]
    assert failed == ([] if place == 1 else ["state after a call, eval"])


class Running(torch.nn.Module):
    """A normaliser of its own with a running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class RunningPort(nnx.Module):
    """The same, with a momentum."""

    def __init__(self, momentum):
        self.mean, self.momentum, self.is_training = nnx.BatchStat(jnp.zeros(6)), momentum, False

    def train(self, **attributes):
        self.is_training = True

    def eval(self, **attributes):
        self.is_training = False

    def __call__(self, x):
        if self.is_training:
            self.mean[...] = self.mean[...] + self.momentum * (x.mean(0) - self.mean[...])
        return x - self.mean[...][None]


@pytest.mark.parametrize("momentum", [0.1, 0.9])
def test_training_mode_is_compared_where_it_differs_without_a_norm_of_pytorchs(momentum):
    result = jaxbench.compare(RunningPort(momentum), Running(), X, quick=True)
    assert result.passed == (momentum == 0.1), str(result)
    assert "state after a call, train" in {gate.what for gate in result.gates}


def test_a_training_mode_that_jax_does_not_have_is_a_note():
    port = lambda p, x: x - p["mean"][None]
    result = jaxbench.compare((port, {"mean": np.zeros(6)}), Running(), X, quick=True)
    assert result.passed and "training mode was not compared: PyTorch's outputs there are others" in str(result)
    dropped = compare(lambda y: y, torch.nn.functional.dropout, quick=True)
    assert not dropped.passed and "or keeps state between calls" in str(dropped)


class Averaged(torch.nn.Module):
    """A layer that keeps an average of its outputs, of which its outputs tell nothing."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        y = self.layer(x)
        if self.training:
            self.average.lerp_(y.mean(0).detach(), 0.1)
        return y


class AveragedPort(nnx.Module):
    """The same; it may forget its average."""

    def __init__(self, *, has_average):
        self.layer = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
        self.average, self.has_average = nnx.Variable(jnp.zeros(4)), has_average

    def __call__(self, x, *, train=False):
        y = self.layer(x)
        if train and self.has_average:
            self.average[...] = self.average[...] + 0.1 * (y.mean(0) - self.average[...])
        return y


@pytest.mark.parametrize("has_average", [True, False])
def test_a_training_mode_that_the_caller_gives_is_compared_also_where_jax_does_nothing_in_it(has_average):
    options = {"jax_modes": {"eval": {"train": False}, "train": {"train": True}}, "quick": True}
    result = jaxbench.compare(AveragedPort(has_average=has_average), Averaged(), X, **options)
    failed = [gate.what for gate in result.gates if not gate.passed]
    assert failed == ([] if has_average else ["state after a call, train"]), str(result)
    assert "quick: gradients, optimiser steps and narrower types were not compared" in result.notes


def test_plain_numbers_are_compared_and_one_of_one_side_is_a_note():
    assert compare(lambda y: {"y": y, "n": 3.5}, lambda y: {"y": y, "n": 3.5}, quick=True).passed
    wrong = compare(lambda y: {"y": y, "n": 4.5}, lambda y: {"y": y, "n": 3.5}, quick=True)
    assert [gate.where for gate in wrong.gates if not gate.passed] == ["exact output n"]
    alone = compare(lambda y: {"y": y}, lambda y: {"y": y, "n": 3}, quick=True)
    assert alone.passed and "n was not compared: only PyTorch has it" in str(alone)


def test_booleans_stand_against_booleans_and_an_empty_output_has_no_loss():
    result = compare(lambda y: (y, y > 0), lambda y: (y, y.argmax(-1), y > 0), quick=True)
    assert result.passed and "integers or booleans" in str(result)
    assert not compare(lambda y: (y, y > 0.1), lambda y: (y, y.argmax(-1), y > 0), quick=True).passed
    empty = compare(lambda y: {"y": y, "none": y[:0]}, lambda y: {"y": y, "none": y[:0]})
    assert empty.passed, str(empty)


def test_a_constant_input_is_a_note():
    class Masked(Layer):
        def forward(self, x, mask):
            return super().forward(x) * mask[:, None]

    port = lambda p, x, mask: x @ p["kernel"] + p["bias"][None]
    params = {"kernel": np.zeros((6, 5)), "bias": np.zeros(5)}
    result = jaxbench.compare((port, params), Masked(), (X, np.ones(4, int)), quick=True)
    assert result.passed and "constant inputs, which hide slips, were compared as they are: input 1" in str(result)
    assert draws.constant((X, {"mask": np.ones(3), "ids": np.arange(3)}, np.ones(()), [np.zeros(2)])) == [
        "input 1 mask",
        "input 3",
    ]


def test_outputs_of_a_compiled_function_are_found_by_their_keys():
    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.logvar = torch.nn.Linear(6, 4), torch.nn.Linear(6, 3)

        def forward(self, x):
            return {"mean": self.mean(x), "logvar": self.logvar(x)}

    @jax.jit
    def encode(p, x):
        return {name: x @ p[name]["kernel"] + p[name]["bias"][None] for name in ("mean", "logvar")}

    params = {n: {"kernel": np.zeros((6, i)), "bias": np.zeros(i)} for n, i in (("mean", 4), ("logvar", 3))}
    result = jaxbench.compare((encode, params), Encoder(), X)
    assert result.passed and "outputs, float32" in {gate.what for gate in result.gates}, str(result)


def test_a_scalar_loss_passes_whatever_its_two_rounding_errors_are():
    class Loss(torch.nn.Module):
        def forward(self, x, t):
            return torch.nn.functional.mse_loss(x, t)

    for seed in range(8):
        inputs = tuple(np.random.default_rng(seed).standard_normal((2, 64, 10)))
        result = jaxbench.compare(lambda x, t: ((x - t) ** 2).mean(), Loss(), inputs)
        assert result.passed, str(result)


class Keeping(torch.nn.Module):
    """Keeps a buffer that no state dict has, a number and a list between calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.randn(6, generator=torch.Generator().manual_seed(0)), persistent=False)
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.memory.mul_(0.9)
        return x * self.memory + (self.calls - 1) + (len(self.seen) - 1)


def test_what_a_module_keeps_between_calls_is_given_back():
    side = TorchSide(Keeping(), dtype="float64")
    first, again = (side.run((X,), is_training=False).outputs.floating[0] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (side.module.calls, side.module.seen) == (0, [])


def test_a_frozen_model_on_tokens_is_compared_by_its_outputs():
    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = torch.nn.Embedding(9, 6)
            self.requires_grad_(False)

        def forward(self, t):
            return self.emb(t).mean(1)

    params, tokens = {"emb": {"embedding": np.zeros((9, 6))}}, RANDOM.integers(0, 9, (3, 4))
    sgd = (optax.sgd(0.1), lambda params: torch.optim.SGD(params, 0.1))
    port = lambda factor: (lambda p, t: factor * p["emb"]["embedding"][t].mean(1), params)
    result = jaxbench.compare(port(1), Tokens(), tokens, dtypes=(), optimizers=sgd)
    assert result.passed and "gradients were not compared" in str(result)
    assert not jaxbench.compare(port(2), Tokens(), tokens, dtypes=()).passed


def test_sparse_gradients_are_compared():
    bag = torch.nn.EmbeddingBag(9, 6, mode="sum", sparse=True)
    port = (lambda p, t: p["embedding"][t].sum(1), {"embedding": np.zeros((9, 6))})
    result = jaxbench.compare(port, bag, RANDOM.integers(0, 9, (3, 4)), dtypes=())
    assert result.passed and "gradients, eval" in {gate.what for gate in result.gates}


def test_a_module_that_keeps_its_last_result_is_copied():
    class Last(Layer):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    module = Last()
    module(torch.randn(2, 6))
    port = (lambda p, x: x @ p["kernel"] + p["bias"][None], {"kernel": np.zeros((6, 5)), "bias": np.zeros(5)})
    assert jaxbench.compare(port, module, X, dtypes=()).passed
    assert module.last.grad_fn is not None  # the caller's stays as it is


def test_tensors_of_the_default_type_are_float64_in_the_float64_run():
    class Bytes(Layer):
        def forward(self, x):
            return super().forward(x / 255 + torch.zeros(6))

    port = (lambda p, x: x / 255 @ p["kernel"] + p["bias"][None], {"kernel": np.zeros((6, 5)), "bias": np.zeros(5)})
    result = jaxbench.compare(port, Bytes(), RANDOM.integers(0, 256, (3, 6), dtype=np.uint8), dtypes=())
    assert result.passed and torch.get_default_dtype() == torch.float32


def test_what_cannot_be_called_says_what_to_do():
    class Keyword(Layer):
        def forward(self, *, x):
            return super().forward(x)

    class Narrow(Layer):
        def forward(self, x):
            return super().forward(x.float())

    port = (lambda p, x: x @ p["kernel"] + p["bias"][None], {"kernel": np.zeros((6, 5)), "bias": np.zeros(5)})
    with pytest.raises(ValueError, match="wrap the module in one whose forward"):
        jaxbench.compare(port, Keyword(), X)
    with pytest.raises(ValueError, match="widen=True"):
        jaxbench.compare(port, Narrow(), X)
    lbfgs = (optax.sgd(0.1), lambda params: torch.optim.LBFGS(params, 0.1))
    with pytest.raises(ValueError, match="optimizers: PyTorch's steps fail.*call the model again"):
        jaxbench.compare(port, Layer(), X, dtypes=(), optimizers=lbfgs)


def test_outputs_are_put_in_the_order_of_another_tree():
    kind = lambda x: "floating"
    one = capture.outputs_of({"b": 1.5 * np.ones(1), "a": [np.zeros(1), 2]}, kind_of=kind)
    other = capture.outputs_of({"a": [np.zeros(1), 2], "b": 1.5 * np.ones(1)}, kind_of=kind)
    ordered = capture.in_order_of(other, one.tree)
    assert [float(x[0]) for x in ordered.floating] == [1.5, 0.0] and ordered.tree == one.tree
    assert capture.in_order_of(other, None) is other


def test_speed_gets_the_same_weights_as_before():
    pair = jaxbench.Pair((lambda p, x: x - p["mean"][None], {"mean": np.zeros(6)}), Running(), (X,))
    with run.pinned("float64"):
        assert set(proof.weights(pair).tensors) == {"mean"}
