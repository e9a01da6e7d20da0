"""Functions on narrow arrays: their own gradients beside float64 and PyTorch, and factors that are not rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2

from jaxbench import functional, narrow_products, nn, prng
from jaxbench.eqx import nn as eqx_nn
from torch_ref import functional as torch_functional
from torch_ref import nn as torch_nn
from torch_ref import prng as torch_prng

ROWS, WIDTH, EPS = (3, 5), 32, 1e-5


def _inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows, scale, bias and the gradient of the norm: numbers that bfloat16 holds."""
    random = np.random.default_rng(0)
    drawn = (3 + 2 * random.normal(size=(*ROWS, WIDTH)), 1 + random.normal(size=WIDTH), random.normal(size=WIDTH))
    drawn += (random.normal(size=(*ROWS, WIDTH)),)
    return tuple(np.asarray(jnp.asarray(each, jnp.bfloat16).astype(jnp.float32)) for each in drawn)


def _gradients(norm, arrays, grad, dtype):
    """Return the gradients of a norm's arrays, as float64."""
    arrays, grad = (jax.tree.map(lambda x: jnp.asarray(x, dtype), each) for each in (arrays, grad))
    found = jax.jit(lambda arrays, grad: jax.vjp(lambda *each: norm(*each, eps=EPS), *arrays)[1](grad))(arrays, grad)
    return [np.asarray(each, np.float64) for each in found]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_a_narrow_norms_gradients_are_float64s_but_for_one_rounding(name, dtype, bits, x64):
    x, scale, bias, grad = _inputs()
    arrays = (x, scale, bias) if name == "layer_norm" else (x, scale)
    norm = getattr(functional, name)
    found, wanted = _gradients(norm, arrays, grad, dtype), _gradients(norm, arrays, grad, "float64")
    for mine, exact in zip(found, wanted, strict=True):
        # One rounding of the result; the rounded normalised rows are in no gradient
        np.testing.assert_allclose(mine, exact, rtol=2.0**-bits, atol=2e-6 * np.abs(exact).max())


def test_a_narrow_layer_norm_has_the_gradients_that_pytorch_gives_it():
    x, scale, bias, grad = _inputs()
    theirs = [torch.tensor(each, dtype=torch.bfloat16, requires_grad=True) for each in (x, scale, bias)]
    torch_functional.layer_norm(*theirs, eps=EPS).backward(torch.tensor(grad, dtype=torch.bfloat16))
    for mine, its in zip(_gradients(functional.layer_norm, (x, scale, bias), grad, "bfloat16"), theirs, strict=True):
        wanted = its.grad.double().numpy()
        assert np.linalg.norm(mine - wanted) < 0.01 * np.linalg.norm(wanted)


def test_scale_and_bias_keep_a_type_of_their_own_in_their_gradients():
    x, scale, bias, _ = _inputs()

    def loss(*arrays):
        return jnp.sum(functional.layer_norm(*arrays, eps=EPS).astype(jnp.float32))

    grads = jax.grad(loss, (0, 1, 2))(jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale), jnp.asarray(bias))
    assert [each.dtype for each in grads] == [jnp.bfloat16, jnp.float32, jnp.float32]


def test_from_its_bits_a_narrow_number_is_itself(monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, cuda, **_: cuda(*arrays))  # as on a GPU
    every = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16)
    found = narrow_products.as_rounded(every)
    np.testing.assert_array_equal(found, every.astype(jnp.float32), strict=True)  # NaN where it is NaN


@pytest.mark.parametrize("is_cast", [False, True], ids=["narrow", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torch_multiplies_types_without_a_product_in_float32_and_rounds_once(dtype, is_cast, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, kernel = (torch.randn(size, generator=generator).to(dtype) for size in ((2, 5, 16), (16, 8)))
    exact = [each.double().requires_grad_() for each in (x, kernel)]
    expected = exact[0] @ exact[1]
    expected.sum().backward()
    monkeypatch.setattr(torch_functional, "NARROW_PRODUCTS", frozenset())
    given = [(each.float() if is_cast else each).requires_grad_() for each in (x, kernel)]
    with torch.autocast("cpu", dtype=dtype, enabled=is_cast):
        found = torch_functional.matmul(*given)
        tied = torch_functional.matmul(given[0], given[1].T, transposed=True)
    found.sum().backward()
    assert found.dtype == dtype and torch.equal(found, tied)
    assert torch.equal(found, expected.float().to(dtype))
    for mine, wanted in zip(given, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), wanted.grad, rtol=torch.finfo(dtype).eps, atol=0)


def _share(found, exact) -> float:
    """By which factor rows are too large as a whole, less 1: roundings of single values cancel."""
    found, exact = (np.asarray(each, np.float64) for each in (found, exact))
    return float((found * exact).sum() / np.square(exact).sum() - 1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_factor_is_not_rounded_to_the_narrow_type_that_it_multiplies(dtype):
    narrow = torch.tensor(np.random.default_rng(0).normal(size=(2, 64, 256)), dtype=getattr(torch, dtype))
    exact = narrow.double().numpy()
    x = jnp.asarray(exact, dtype)
    for factor in (1.3, 12.0**-0.5):
        for found in (functional.times(x, factor), torch_functional.times(narrow, factor).float()):
            assert abs(_share(found, exact * factor)) < 2e-4
    rate, site = 0.1, {"site": 3}  # in bfloat16 0.9 is 0.8984
    kept = functional.dropout(x, rate, functional.DropoutStream(prng.key_from_seed(0), 0), **site)
    theirs = torch_functional.dropout(
        narrow, rate, torch_functional.DropoutStream(torch_prng.key_from_seed(0), 0), **site
    )
    np.testing.assert_array_equal(np.asarray(kept, np.float32), theirs.float().numpy())
    is_kept = np.asarray(kept, np.float32) != 0
    assert abs(_share(kept, np.where(is_kept, exact, 0.0) / (1.0 - rate))) < 2e-4


def test_every_backend_rounds_an_embedding_scale_to_the_tables_type_as_gemma_does():
    table, index = np.random.default_rng(0).normal(size=(64, 32)), np.arange(64, dtype=np.int32)[None]
    theirs = modeling_gemma2.Gemma2TextScaledWordEmbedding(64, 32, padding_idx=0, embed_scale=640**0.5)
    theirs.weight.data.copy_(torch.tensor(table))
    wanted = theirs.to(torch.bfloat16)(torch.tensor(index)).float().detach().numpy()
    how = {"dtype": "bfloat16", "scale": 640**0.5}
    for library in (nn, eqx_nn, torch_nn):
        embed = library.load_params(library.Embed(64, 32, **how), {"embedding": table})
        found = embed(torch.tensor(index)).float().detach().numpy() if library is torch_nn else embed(index)
        np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)
