"""What a whole function is: outputs, gradients and state agree; modules inside may be cut otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jaxbench
from jaxbench.pair import draws
from tests.pair import bugs

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((4, 6))
OFF = {"dtypes": ()}


def linear(inputs, outputs, **options):
    return nnx.Linear(inputs, outputs, rngs=nnx.Rngs(0), **options)


class Mlp(torch.nn.Module):
    """Two linear layers, with the residual inside."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Twin(torch.nn.Module):
    """The same and a readout."""

    def __init__(self):
        super().__init__()
        self.mlp, self.out = Mlp(), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.mlp(x))


class Bare(nnx.Module):
    """The two layers without the residual."""

    def __init__(self):
        self.up, self.down = linear(6, 8), linear(8, 6)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


class Around(nnx.Module):
    """The residual around them; with a sum of weights that is wanted, right where they have it alone."""

    def __init__(self, wanted):
        self.mlp, self.out, self.wanted = Bare(), linear(6, 3), wanted

    def __call__(self, x):
        y = x + self.mlp(x)
        total = self.mlp.up.kernel[...].sum()
        return self.out(y if self.wanted is None else jnp.where(jnp.abs(total - self.wanted) < 1e-6, y, 2 * y))


def test_a_residual_around_a_module_or_inside_it_is_the_same_function_and_a_note_names_the_module():
    result = jaxbench.compare(Around(None), Twin(), X, **OFF)
    assert result.passed and not result.blamed and not result.causes, str(result)
    assert "the same function is cut otherwise: mlp (output" in str(result) and "3 draws" in str(result)
    assert {"outputs, eval, draw 2", "gradients, eval, draw 3"} <= {gate.what for gate in result.gates}
    assert jaxbench.compare(Around(None), Twin(), X, quick=True).passed
    left_out = jaxbench.compare(Around(None), Twin(), X, {"mlp": None}, quick=True)
    assert "mlp" not in left_out.modules and "out" in left_out.modules


def test_a_cut_whose_slip_shows_on_other_weights_alone_is_not_the_same():
    twin = bugs.scattered(Twin())
    total = float(twin.mlp.up.weight.detach().double().sum())
    result = jaxbench.compare(Around(total), twin, X, quick=True)
    failed = {gate.what for gate in result.gates if not gate.passed}
    assert "outputs, eval, draw 2" in failed and "outputs, eval" not in failed


def test_a_module_that_alone_differs_stays_one_to_blame_and_the_way_out_is_said():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 4.0 * super().forward(x)

    class Port(nnx.Module):
        def __init__(self):
            self.a, self.b = linear(6, 6), nnx.LayerNorm(6, epsilon=0.0, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.b(self.a(x))

    twin = torch.nn.Sequential(Scaled(6, 6), torch.nn.LayerNorm(6, eps=0.0))
    result = jaxbench.compare(Port(), twin, X, quick=True)
    assert not result.passed and result.causes == {"a": "0.25 times PyTorch's"}
    assert "names={'its.name': None}" in str(result)
    assert jaxbench.compare(Port(), twin, X, {"a": None}, quick=True).passed


class Wide(torch.nn.Module):
    """A convolution that is padded on both sides and cut behind it."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = torch.nn.Conv1d(6, 6, 3, padding=2), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class Causal(nnx.Module):
    """The same, padded in front."""

    def __init__(self, padding):
        self.conv = nnx.Conv(6, 6, (3,), padding=padding, rngs=nnx.Rngs(0))
        self.out = linear(6, 3)

    def __call__(self, x):
        return self.out(self.conv(x))


@pytest.mark.parametrize(("padding", "is_same"), [("CAUSAL", True), ("SAME", False)])
def test_a_module_of_another_shape_is_a_note_and_the_whole_function_decides(padding, is_same):
    result = jaxbench.compare(Causal(padding), Wide(), RANDOM.standard_normal((2, 9, 6)), quick=True)
    assert result.passed == is_same, str(result)
    assert "no layout gives both outputs one shape: conv" in str(result)
    assert is_same or result.causes["conv"].startswith("padding is (1, 1) on each axis in JAX")


class Film(torch.nn.Module):
    """A scale and a shift by a condition."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x, c):
        return x * (1 + self.scale(c)) + self.shift(c)


class Conditioned(torch.nn.Module):
    """The same on what a layer makes."""

    def __init__(self):
        super().__init__()
        self.inp, self.film = torch.nn.Linear(6, 6), Film()

    def forward(self, x, c):
        return self.film(torch.tanh(self.inp(x)), c)


class FilmPort(nnx.Module):
    """The condition first."""

    def __init__(self):
        self.scale, self.shift = linear(6, 6), linear(6, 6)

    def __call__(self, c, x):
        return x * (1 + self.scale(c)) + self.shift(c)


class ConditionedPort(nnx.Module):
    """The same on what a layer makes."""

    def __init__(self, is_wrong):
        self.inp, self.film, self.is_wrong = linear(6, 6), FilmPort(), is_wrong

    def __call__(self, x, c):
        h = jnp.tanh(self.inp(x))
        return self.film(h, c) if self.is_wrong else self.film(c, h)


def test_a_module_may_take_its_arguments_in_another_order_if_it_is_handed_them_so():
    inputs = (X, RANDOM.standard_normal((4, 6)))
    result = jaxbench.compare(ConditionedPort(False), Conditioned(), inputs, quick=True)
    assert result.passed and [note for note in result.notes if not note.startswith("quick: ")] == [], str(result)
    wrong = jaxbench.compare(ConditionedPort(True), Conditioned(), inputs, quick=True)
    assert not wrong.passed and wrong.blamed[0].module == "film"


class Encoder(torch.nn.Module):
    """Two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x)
        return y, torch.tanh(self.second(y))


class Both(torch.nn.Module):
    """Their product, read out."""

    def __init__(self):
        super().__init__()
        self.encoder, self.out = Encoder(), torch.nn.Linear(6, 3)

    def forward(self, x):
        y, h = self.encoder(x)
        return self.out(y * h)


class EncoderPort(nnx.Module):
    """The outputs in the other order, the tanh lost or not."""

    def __init__(self, is_wrong):
        self.first, self.second, self.is_wrong = linear(6, 6), linear(6, 6), is_wrong

    def __call__(self, x):
        y = self.first(x)
        h = self.second(y)
        return (y, h) if self.is_wrong else (jnp.tanh(h), y)


class BothPort(nnx.Module):
    """Their product, read out."""

    def __init__(self, is_wrong):
        self.encoder, self.out = EncoderPort(is_wrong), linear(6, 3)

    def __call__(self, x):
        y, h = self.encoder(x)
        return self.out(y * h)


def test_every_output_of_a_module_is_compared_in_the_order_that_fits():
    assert jaxbench.compare(BothPort(False), Both(), X, quick=True).passed
    wrong = jaxbench.compare(BothPort(True), Both(), X, quick=True)
    assert [(each.module, each.part) for each in wrong.blamed] == [("encoder", "output 1")]


def test_channels_as_many_as_height_and_width_blame_the_code_that_has_the_slip_alone():
    class Port(nnx.Module):
        def __init__(self):
            sizes = ((3, 8), (8, 8), (8, 4))
            self.a, self.b, self.c = (nnx.Conv(i, o, (3, 3), padding=1, rngs=nnx.Rngs(0)) for i, o in sizes)

        def __call__(self, x):
            return self.c(jax.nn.relu(self.b(jnp.tanh(self.a(x)))))

    conv = lambda i, o: torch.nn.Conv2d(i, o, 3, padding=1)
    twin = torch.nn.Sequential(conv(3, 8), torch.nn.ReLU(), conv(8, 8), torch.nn.ReLU(), conv(8, 4))
    to_jax = lambda x: (x.transpose(0, 2, 3, 1),)
    image = RANDOM.standard_normal((2, 3, 8, 8))
    result = jaxbench.compare(Port(), twin, image, jax_inputs=to_jax, quick=True)
    assert {each.module for each in result.blamed} == {"model"}, str(result)


def test_further_draws_keep_signs_masks_and_what_lies_between_0_and_1():
    tensors = {"a": np.array([1.0, -2.0]), "scale": np.full(3, 1e-6), "b": np.ones(2)}
    drawn = draws.weights(tensors, ["a", "scale"], 1)
    assert np.all(np.sign(drawn["a"]) == [1, -1]) and np.all(drawn["a"] != tensors["a"])
    assert np.all(drawn["scale"] > 0.1) and np.all(drawn["b"] == 1)
    mask, share = np.array([[1.0, 0.0]]), np.array([0.2, 1.0, np.inf])
    assert draws.inputs((mask, {"share": share}), 1)[0] is mask
    redrawn = draws.inputs((mask, {"share": share}), 1)[1]["share"]
    assert np.all(redrawn[:2] < share[:2]) and np.all(redrawn > 0) and np.isinf(redrawn[2])
