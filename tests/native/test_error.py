"""On the default model's own numbers, native decode steps are as near float64 as XLA's float32 ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench import transformer
from jaxbench.native import checkpoint, library
from jaxbench.native import model as native_model
from jaxbench.pretrained import weights

if not library.is_available():
    pytest.skip("native kernels need a C compiler", allow_module_level=True)

PROMPT, LENGTH = 6, 14
# Largest relative error of logits, by cache and activations: what such numbers cost, with room. float32 is held to XLA.
BOUNDS = {("bfloat16", "float32"): 0.006, ("int8", "float32"): 0.02, ("float32", "int8"): 0.05}


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """Three rows of tokens of the vocabulary."""
    return np.random.default_rng(0).integers(0, 49152, (3, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def exact(tokens) -> np.ndarray:
    """Float64 logits of the steps behind the prompts."""
    held = weights.load_checkpoint()
    with jax.enable_x64(True):
        model = transformer.build(held.config, held.params, dtype="float64")
        positions = np.tile(np.arange(LENGTH, dtype=np.int32), (len(tokens), 1))
        return np.asarray(jax.jit(lambda m, t, p: m(t, p))(model, tokens, positions))[:, PROMPT:]


def error(model, cache_dtype: str, tokens: np.ndarray, exact: np.ndarray) -> float:
    """Relative 2-norm error of the logits of decode steps, one token a row at a time."""
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (len(tokens), 1))

    @jax.jit
    def step(model, cache, tokens, positions, slot):
        hidden, cache = model.features(tokens, positions, cache=cache, slot=slot)
        return model.logits(hidden)[:, 0], cache

    fill = jax.jit(lambda m, t, p: m.features(t, p)[1].padded(64, dtype=cache_dtype))
    cache, logits = fill(model, tokens[:, :PROMPT], positions[:, :PROMPT]), []
    for i in range(PROMPT, LENGTH):
        found, cache = step(model, cache, tokens[:, i : i + 1], positions[:, i : i + 1], jnp.int32(i))
        logits.append(np.asarray(found, np.float64))
    return float(np.linalg.norm(np.stack(logits, 1) - exact) / np.linalg.norm(exact))


def test_float32_activations_err_no_more_than_half_again_what_xla_s_float32_does(tokens, exact, capsys):
    held = weights.load_checkpoint()
    plain = error(transformer.build(held.config, held.params, dtype="float32"), "float32", tokens, exact)
    native = error(native_model.build(checkpoint.load()), "float32", tokens, exact)
    with capsys.disabled():
        print(f"\nlogits against float64: native {native:.2e}, XLA float32 {plain:.2e}")
    assert 0 < native <= 1.5 * plain


@pytest.mark.parametrize(("cache", "activations"), BOUNDS)
def test_narrower_numbers_cost_what_is_stated(cache, activations, tokens, exact, capsys):
    found = error(
        native_model.build(checkpoint.load(), cache_dtype=cache, activations=activations), cache, tokens, exact
    )
    with capsys.disabled():
        print(f"\nlogits against float64: cache {cache}, activations {activations} {found:.2e}")
    assert 1e-5 < found < BOUNDS[cache, activations]
