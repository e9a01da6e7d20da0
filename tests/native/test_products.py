"""Products of a training step as native calls: the function and gradients of XLA's, and who takes them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench import functional, narrow_products
from jaxbench.native import build, library, products
from jaxbench.parity import cases
from jaxbench.training import engine
from jaxbench.training.step_config import StepConfig
from jaxbench.training.train_config import TrainConfig

if not library.is_available():
    pytest.skip("native kernels need a C compiler", allow_module_level=True)

CASE = cases.find("transformer/llama-multi-query")
HERE = {"is_on_mesh": False, "device": "cpu"}


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def _gradients(x: jax.Array, kernel: jax.Array, transposed: bool) -> tuple[jax.Array, ...]:
    """Product of rows by a kernel, and gradients of a sum of it in which every value has its own weight."""

    def weighed(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = functional.matmul(x, kernel, transposed=transposed)
        return jnp.sum(found.astype(jnp.float32) * jnp.cos(jnp.arange(found.size).reshape(found.shape))), found

    gradients, found = jax.jit(jax.grad(weighed, argnums=(0, 1), has_aux=True))(x, kernel)
    return found, *gradients


@pytest.mark.parametrize("transposed", [False, True])
def test_products_and_gradients_err_no_more_than_xla_s_and_stay_bfloat16(transposed):
    x, kernel = _normal(1, 2, 19, 70), _normal(2, *((45, 70) if transposed else (70, 45)))
    wide = _gradients(*(array.astype(jnp.float32) for array in (x, kernel)), transposed)
    by_xla = _gradients(x, kernel, transposed)
    with narrow_products.native(True):
        found = _gradients(x, kernel, transposed)
    for exact, other, own in zip(wide, by_xla, found, strict=True):
        assert own.dtype == jnp.bfloat16 and own.shape == exact.shape
        errors = [np.linalg.norm(np.asarray(y, np.float32) - np.asarray(exact)) for y in (own, other)]
        assert 0 < errors[0] <= 1.2 * errors[1], errors


def test_only_what_is_traced_inside_and_only_bfloat16_is_native():
    calls = {}
    for dtype in ("bfloat16", "float32"):
        x, kernel = jnp.ones((8, 4), dtype), jnp.ones((4, 4), dtype)
        for is_native in (False, True):
            with narrow_products.native(is_native):
                program = str(jax.make_jaxpr(lambda *args: functional.matmul(*args))(x, kernel))
            calls[dtype, is_native] = "jaxbench_product" in program
    assert [key for key, is_called in calls.items() if is_called] == [("bfloat16", True)]


def test_rows_under_vmap_are_multiplied_one_after_another():
    x, kernel = _normal(1, 3, 8, 16), _normal(2, 16, 5)
    with narrow_products.native(True):
        found = jax.jit(jax.vmap(lambda *args: functional.matmul(*args), (0, None)))(x, kernel)
        np.testing.assert_array_equal(found, jax.jit(lambda *args: functional.matmul(*args))(x, kernel), strict=True)


def _losses(kernels: str) -> list[float]:
    step = StepConfig(precision="bfloat16", kernels=kernels)
    run = {"batch_size": 2, "steps": 1, "learning_rate": 1e-2, "data": {"seq_len": CASE.length}}
    config, params = cases.load(CASE)
    trained = engine.Engine(TrainConfig(model=config.model_dump(), step=step, **run), config, params)
    is_called = "jaxbench_product" in trained._step.as_text()
    assert (trained.step_config.kernels, is_called) == (kernels, kernels == "native")
    rows = cases.arrays(CASE, config)
    rows = rows._replace(segments=np.where(rows.positions >= 0, 1, 0).astype(np.int32))
    losses = [trained.fetch(trained.step(rows, 1e-2)).loss for _ in range(6)]
    total, count = trained.evaluate(rows)
    return [*losses, total / count]


def test_a_step_learns_the_same_with_native_products():
    by_xla, native = _losses("xla"), _losses("native")
    assert native[-1] < native[0] - 0.1, "it must learn"
    np.testing.assert_allclose(native, by_xla, rtol=5e-3)


def _resolved(kernels: str, precision: str = "bfloat16", **place: object) -> str:
    return products.resolved(StepConfig(kernels=kernels, precision=precision), **(HERE | place)).kernels


def test_auto_takes_them_where_the_library_has_the_best_bfloat16_of_the_processor(monkeypatch):
    flags = frozenset(build.NEEDED_FLAGS["avx512bf16"])
    for instructions, found, wanted in (
        ("avx512bf16", flags, "native"),
        ("avx512bf16", flags | {"amx_bf16"}, "xla"),
        ("amx", flags | {"amx_bf16"}, "native"),
        ("avx512", flags, "xla"),
    ):
        monkeypatch.setattr(build, "library_path", lambda name=instructions: Path(f"{name}-0123.so"))
        monkeypatch.setattr(build, "cpu_flags", lambda found=found: found)
        assert _resolved("auto") == wanted
    assert (
        _resolved("auto", "float32") == _resolved("auto", is_on_mesh=True) == _resolved("auto", device="gpu") == "xla"
    )
    assert _resolved("native") == "native" and _resolved("xla") == "xla"


@pytest.mark.parametrize("change", [{"precision": "float16"}, {"is_on_mesh": True}, {"device": "tpu"}])
def test_native_products_that_cannot_be_had_are_refused_with_what_was_asked(change):
    named = {"is_on_mesh": "with a mesh"}.get(next(iter(change)), next(iter(change.values())))
    with pytest.raises(ValueError, match=f"step.kernels=native needs .* got .*{named}.*; use step.kernels=auto"):
        _resolved("native", **change)


def test_sizes_that_do_not_fit_are_an_error_and_no_crash():
    with pytest.raises(jax.errors.JaxRuntimeError, match="product: sizes do not fit"):
        jax.block_until_ready(products.product(_normal(1, 4, 6), _normal(2, 5, 3)))
