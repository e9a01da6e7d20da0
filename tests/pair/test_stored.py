"""Arrays whose names do not tell how they are stored: their use does, and the endings of vectors tell their kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jaxbench
from jaxbench.pair import contracted
from jaxbench.pair.matching import Leaf, match

D = 6
X = np.random.default_rng(4).standard_normal((3, D))


class Twin(torch.nn.Module):
    """A norm and two square layers."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(D)
        self.wq, self.wk, self.wo = (torch.nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        return self.wo(torch.tanh(self.wq(h)) * self.wk(h))


def port(params, x, *, slip=""):
    mean = x.mean(-1, keepdims=True)
    h = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    h = h * params["ln_g"][None] + params["ln_b"][None]
    key = params["wk"].T if slip == "transposed" else params["wk"]
    return (jnp.tanh(h @ params["wq"]) * (h @ key)) @ params["wo"]


def params():
    return {name: jnp.ones((D, D)) for name in ("wq", "wk", "wo")} | {"ln_g": jnp.ones(D), "ln_b": jnp.zeros(D)}


def test_square_arrays_of_a_function_are_transposed_as_it_multiplies_them():
    result = jaxbench.compare((port, params()), Twin(), X, dtypes=())
    assert result.passed and not result.weights.assumed, str(result)
    axes = {name: rule.arrangement.axes for name, rule in result.weights.rules.items()}
    assert axes == {"ln_b": (0,), "ln_g": (0,), "wk": (1, 0), "wo": (1, 0), "wq": (1, 0)}


def test_arrays_stored_as_in_pytorch_stay_as_they_are():
    stored = lambda p, x: port({name: w.T if w.ndim > 1 else w for name, w in p.items()}, x)
    result = jaxbench.compare((stored, params()), Twin(), X, dtypes=())
    assert result.passed and result.weights.rules["wq"].arrangement.axes == (0, 1), str(result)


def test_one_array_that_alone_is_transposed_is_a_slip():
    wrong = jaxbench.compare((lambda p, x: port(p, x, slip="transposed"), params()), Twin(), X, quick=True)
    assert not wrong.passed and set(wrong.causes.values()) == {"weight of wk is transposed in JAX"}, str(wrong)


class Bare(nnx.Module):
    """The same with parameters of its own in place of layers."""

    def __init__(self):
        self.arrays = nnx.Dict({name: nnx.Param(x) for name, x in params().items()})

    def __call__(self, x):
        return port({name: param[...] for name, param in self.arrays.items()}, x)


def test_parameters_of_a_module_of_ones_own_are_taken_by_their_use_too():
    result = jaxbench.compare(Bare(), Twin(), X, dtypes=())
    assert result.passed, str(result)


@pytest.mark.parametrize(
    ("function", "shape", "is_reversed"),
    [
        (lambda w, x: x @ w, (D, D), True),
        (lambda w, x: x @ w.T, (D, D), False),
        (lambda w, x: jnp.einsum("bd,dnh->bnh", x, w), (D, 2, 3), True),
        (lambda w, x: jnp.einsum("bd,edf->ebf", x, w), (4, D, D), None),
        (lambda w, x: jnp.einsum("ebd,edf->ebf", jnp.stack([x] * 4), w), (4, D, D), True),
        (lambda w, x: jnp.einsum("ebd,efd->ebf", jnp.stack([x] * 4), w), (4, D, D), False),
        (lambda w, x: x @ (w / jnp.linalg.norm(w, axis=0, keepdims=True)), (D, D), True),
        (lambda w, x: jax.lax.scan(lambda h, layer: (h @ layer, None), x, w)[0], (2, D, D), True),
        (lambda w, x: jax.jit(lambda w: x @ w[1].T)(w), (2, D, D), False),
        (lambda w, x: x[:, None] * w[None], (D, D), None),
        (lambda w, x: w[jnp.zeros(3, int)], (D, D), None),
        (lambda w, x: x if float(w.sum()) > 0 else x @ w, (D, D), None),
    ],
)
def test_the_axes_of_a_product_tell_how_an_array_is_stored(function, shape, is_reversed):
    found = contracted.is_reversed(lambda arrays: function(arrays[0], jnp.asarray(X, "float32")), [jnp.ones(shape)])
    assert found == ({} if is_reversed is None else {0: is_reversed})


@pytest.mark.parametrize(("spec", "is_reversed"), [("HWIO", True), ("OIHW", False), ("HIWO", None)])
def test_so_do_those_of_a_convolution(spec, is_reversed):
    image = jnp.ones((1, 5, 5, 3))
    convolved = lambda arrays: jax.lax.conv_general_dilated(
        image, arrays[0], (1, 1), "SAME", dimension_numbers=("NHWC", spec, "NHWC")
    )
    found = contracted.is_reversed(convolved, [jnp.ones((3, 3, 3, 3))])
    assert found == ({} if is_reversed is None else {0: is_reversed})


def test_endings_of_vectors_tell_weights_from_biases_and_those_of_matrices_do_not():
    kinds = {("ln_g", (D,)): "weight", ("ln_1_b", (D,)): "bias", ("lora_b", (2, D)): "", ("wq", (D, D)): ""}
    assert {(name, shape): Leaf(name, shape, 0).kind for name, shape in kinds} == kinds


def test_magnitudes_and_directions_of_weight_norm_are_told_by_name():
    names = ("bias", "parametrizations.weight.original0", "parametrizations.weight.original1")
    shapes = ((D,), (D, 1), (D, D))
    tensors = [
        Leaf(f"{of}.{n}", s, 0, owner="Linear") for of in ("up", "down") for n, s in zip(names, shapes, strict=True)
    ]
    tensors.append(Leaf("scale", (D,), 0))
    arrays = [Leaf(f"{of}_{n}", s, 0) for of in ("down", "up") for n, s in (("b", (D,)), ("g", (D,)), ("v", (D, D)))]
    found = match([*arrays, Leaf("res_scale", (D,), 0)], tensors)
    wanted = {f"{of}_{n}": f"{of}.{name}" for of in ("up", "down") for n, name in zip("bgv", names, strict=True)}
    assert {guess.name: guess.rule.sources[0] for guess in found.guesses} == wanted | {"res_scale": "scale"}
