"""Gate P3: what is measured is exact in the stated type, and off in every narrower way of multiplying."""

import jax
import numpy as np
import pytest
import torch

from jaxbench import functional
from jaxbench.parity import cases, products, run
from torch_ref import functional as torch_functional

CASE = cases.find("transformer/llama-grouped")
SETTINGS = {"jax_default_matmul_precision": "highest"}


def measured(dtype):
    config, params = cases.load(CASE)
    with run.pinned(dtype):
        sides = run.sides(CASE, config, params, dtype=dtype, backend="flax")
        return products.gate({side.name: side.products() for side in sides}, dtype, SETTINGS)


def shortened(x, bits):
    """Float32 values rounded to `bits` significant bits, as TensorFloat-32 (11) and bfloat16 (8) operands are."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.round(mantissa * 2.0**bits), exponent - bits).astype(np.float32)


@pytest.mark.parametrize("dtype", products.BITS)
def test_products_of_both_backends_are_exact(dtype):
    gate = measured(dtype)
    assert gate.passed and gate.error <= 1.0 and gate.note == "jax_default_matmul_precision=highest"


@pytest.mark.parametrize("dtype", products.BITS)
def test_results_fill_the_type_and_hold_no_more(dtype):
    left, right, gradient = (x.astype(np.int64) for x in products.operands(dtype))
    bits = np.finfo(dtype).nmant + 1
    for exact in (left @ right, gradient @ right.T):
        assert 2 ** (bits - 4) < np.abs(exact).max() <= 2**bits
        np.testing.assert_array_equal(exact.astype(dtype).astype(np.int64), exact)


def jax_operand(x, bits):
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits - 1)


def torch_operand(x, bits):
    return x + (torch.from_numpy(shortened(x.detach().numpy(), bits)) - x).detach()


@pytest.mark.parametrize("bits", [11, 8], ids=["TensorFloat-32", "bfloat16"])
@pytest.mark.parametrize(
    ("backend", "library", "short"),
    [("flax", functional, jax_operand), ("torch", torch_functional, torch_operand)],
    ids=["flax", "torch"],
)
def test_narrow_operands_fail_and_the_backend_is_named(backend, library, short, bits, monkeypatch):
    original = library.matmul
    monkeypatch.setattr(library, "matmul", lambda x, kernel: original(short(x, bits), short(kernel, bits)))
    gate = measured("float32")
    assert not gate.passed and gate.where.startswith(f"{backend}: ") and gate.error > 100


def test_three_passes_of_bfloat16_fail():
    left, right, _ = products.operands("float32")
    high = [shortened(x, 8) for x in (left, right)]
    low = [shortened(x - h, 8) for x, h in zip((left, right), high, strict=True)]
    product = high[0] @ high[1] + high[0] @ low[1] + low[0] @ high[1]
    assert (product != left.astype(np.int64) @ right.astype(np.int64)).mean() > 0.5


def test_an_array_of_another_type_than_stated_fails():
    found = {"product": np.zeros(1, np.float32), "gradient": np.zeros(1), "attention": np.zeros(1)}
    gate = products.gate({"flax": found}, "float64", {})
    assert not gate.passed and gate.error == np.inf


def test_attentions_scores_tell_narrow_queries_apart():
    """The exact scores differ by 1; those of queries with 11 or 8 bits by another number."""
    query, key, _ = products.attended("float32")
    differences = []
    for bits in (24, 11, 8):
        scores = shortened(query, bits)[0, 1, 0] @ key[0, 0] / 2.0
        differences.append(scores[0] - scores[1])
    assert differences[0] == 1.0 and differences[1] != 1.0 and differences[2] != 1.0


def test_a_type_without_a_stated_precision_is_refused():
    with pytest.raises(ValueError, match="dtype='bfloat16' is not one of float32, float64"):
        products.operands("bfloat16")
