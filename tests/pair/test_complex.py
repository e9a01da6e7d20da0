"""Pairs with complex numbers: spectra, complex weights, rotations as Llama's published code keeps them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import jaxbench
from jaxbench.pair import proof, public_types, speed, speed_arms

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((3, 8))
Z = X + 1j * RANDOM.standard_normal((3, 8))


class Spectrum(torch.nn.Module):
    """Fourier coefficients of a linear layer's output, filtered."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 6)
        self.filter = torch.nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.fft(self.fc(x)) * self.filter


class SpectrumPort(nnx.Module):
    def __init__(self, change=lambda y: y):
        self.fc, self.change = nnx.Linear(8, 6, rngs=nnx.Rngs(0)), change
        self.filter = nnx.Param(jnp.ones(6, jnp.complex64))

    def __call__(self, x):
        return self.change(jnp.fft.fft(self.fc(x)) * self.filter[...][None])


def failed(result):
    return {gate.what for gate in result.gates if not gate.passed}


def test_complex_outputs_weights_gradients_and_optimiser_steps_are_compared():
    optimizers = (optax.adam(1e-2), lambda params: torch.optim.Adam(params, 1e-2))
    result = jaxbench.compare(SpectrumPort(), Spectrum(), X, optimizers=optimizers)
    assert result.passed, str(result)
    kinds = {gate.what for gate in result.gates}
    assert {"outputs, eval", "gradients, eval", "parameters after 5 steps", "outputs, float32"} <= kinds
    assert [entry.name for entry in result.comparisons["gradients, eval"].entries][-1] == "filter"
    assert result.notes == ("bfloat16 was not compared: Unsupported dtype BFloat16",)


@pytest.mark.parametrize(
    "change, cause",
    [
        (jnp.conj, "the complex conjugate of PyTorch's"),
        (lambda y: 1j * y, "0+1j times PyTorch's"),
        (lambda y: y.real + 0j, None),  # the imaginary part alone is lost
    ],
)
def test_a_slip_in_a_complex_output_is_found(change, cause):
    result = jaxbench.compare(SpectrumPort(change), Spectrum(), X, quick=True)
    assert "outputs, eval" in failed(result)
    assert result.causes.get("model") == cause


def test_real_numbers_beside_complex_ones_are_refused_with_both_kinds():
    with pytest.raises(ValueError, match="output 0: real numbers from JAX, complex ones from PyTorch"):
        jaxbench.compare(SpectrumPort(jnp.real), Spectrum(), X, quick=True)


@pytest.mark.parametrize("weights", ["jax", "own"])
def test_complex_weights_go_either_way(weights):
    port, module = SpectrumPort(), Spectrum()
    port.filter.set_value(jnp.asarray(RANDOM.standard_normal(6) + 1j * RANDOM.standard_normal(6), jnp.complex64))
    if weights == "own":
        module.filter.data = torch.tensor(np.asarray(port.filter[...]))
        module.fc.weight.data, module.fc.bias.data = (
            torch.tensor(np.asarray(x[...]).T) for x in (port.fc.kernel, port.fc.bias)
        )
    assert jaxbench.compare(port, module, X, weights=weights, quick=True).passed
    if weights == "own":
        module.filter.data = module.filter.data.conj().resolve_conj()
        assert "weights" in failed(jaxbench.compare(port, module, X, weights=weights, quick=True))


class Rotated(torch.nn.Module):
    """Rotary positions as complex numbers in a buffer [T D/2]."""

    def __init__(self, length=5, width=8):
        super().__init__()
        angles = torch.outer(torch.arange(length).double(), 1e4 ** -(torch.arange(0, width, 2).double() / width))
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles))
        self.q_proj = torch.nn.Linear(width, width, bias=False)

    def forward(self, x):
        pairs = torch.view_as_complex(self.q_proj(x).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotations).flatten(-2)


class RotatedPort(nnx.Module):
    """The same with sines and cosines, computed."""

    def __init__(self):
        self.q_proj = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        angles = jnp.outer(jnp.arange(5.0), 1e4 ** -(jnp.arange(0.0, 8, 2) / 8))[None]
        even, odd = jnp.moveaxis(self.q_proj(x).reshape(*x.shape[:-1], 4, 2), -1, 0)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.stack((even * cos - odd * sin, even * sin + odd * cos), axis=-1).reshape(x.shape)


@pytest.mark.filterwarnings("error:Casting complex values")
def test_a_complex_buffer_keeps_its_imaginary_part():
    x = RANDOM.standard_normal((2, 5, 8))
    result = jaxbench.compare(RotatedPort(), Rotated(), x)
    assert result.passed, str(result)
    module = Rotated()
    module.rotations = module.rotations.conj().resolve_conj()  # turned the other way
    assert not jaxbench.compare(RotatedPort(), module, x, quick=True).passed
    assert module.rotations.dtype == torch.complex128


def test_complex_inputs_have_gradients():
    class Gated(torch.nn.Module):
        def forward(self, z):
            return z * z.abs()

    result = jaxbench.compare(lambda z: z * jnp.abs(z), Gated(), Z)
    assert result.passed and "input gradients, eval" in {gate.what for gate in result.gates}
    wrong = jax.custom_vjp(lambda z: z * jnp.abs(z))
    wrong.defvjp(lambda z: (wrong(z), z), lambda z, g: (g * jnp.abs(z),))  # abs taken as a constant
    assert failed(jaxbench.compare(wrong, Gated(), Z, dtypes=())) == {"input gradients, eval"}


def test_arms_of_both_sides_have_the_same_objective_and_train_alike():
    optimizers = (optax.sgd(1e-2), lambda params: torch.optim.SGD(params, 1e-2))
    pair = public_types.checked(jaxbench.Pair(SpectrumPort(), Spectrum(), X, optimizers=optimizers))
    weights, losses = proof.weights(pair), {}
    for name in ("jax_compiled", "torch_eager"):
        arm = speed_arms.arm(name, pair, weights, dtype="float32")
        calls = [timed for part in speed.PARTS for timed in 2 * [arm.timed(part)]]
        losses[name] = [timed.loss(timed.call()) for timed in calls]
    np.testing.assert_allclose(losses["jax_compiled"], losses["torch_eager"], rtol=1e-5)
    assert losses["torch_eager"][-1] < losses["torch_eager"][-2]
