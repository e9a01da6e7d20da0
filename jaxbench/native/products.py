"""Products of bfloat16 matrices in a training step, as native calls: forward and both gradients (src/product.h).

XLA:CPU multiplies a transposed operand at half the rate or worse (docs/xla_cpu.md, rule 16). A native call takes
matrices as stored, transposed or not. I and O are a kernel's in and out.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxbench.native import build, calls, library
from jaxbench.training.step_config import StepConfig


def resolved(step: StepConfig, *, is_on_mesh: bool, device: str) -> StepConfig:
    """Resolve kernels=auto of a step for `device` (a JAX platform): to native or xla.

    auto selects native products for bfloat16 on one processor with AMX, or with AVX-512's bfloat16 alone, where they
    are faster.

    Raises:
      ValueError: native products are requested and not available.
    """
    can = step.precision == "bfloat16" and not is_on_mesh and device == "cpu"
    if step.kernels == "native" and not can:
        raise ValueError(
            f"step.kernels=native needs step.precision=bfloat16 on one CPU device without a mesh, got "
            f"precision={step.precision} on {device}{' with a mesh' if is_on_mesh else ''}; use step.kernels=auto"
        )
    if step.kernels == "native":
        library.load()
    elif step.kernels == "auto":
        # XLA's products use AMX where there is one: vectors lose to them.
        wanted = "amx-" if "amx_bf16" in build.cpu_flags() else "avx512bf16-"
        can = can and library.is_available() and build.library_path().name.startswith(wanted)
    return step.model_copy(update={"kernels": "native" if can and step.kernels != "xla" else "xla"})


def product(
    left: Float[Array, "R I"],
    right: Float[Array, "I O"],
    *,
    left_transposed: bool = False,
    right_transposed: bool = False,
) -> Float[Array, "R O"]:
    """Multiply two bfloat16 matrices, with sums in float32, rounded to bfloat16.

    left_transposed, right_transposed: the array holds the operand's transpose, [I R] or [O I].
    """
    calls.register()
    rows = left.shape[1 if left_transposed else 0]
    out = jax.ShapeDtypeStruct((rows, right.shape[0 if right_transposed else 1]), jnp.bfloat16)
    ints = np.array((left_transposed, right_transposed, 0), np.int64)
    call = jax.ffi.ffi_call("jaxbench_product", out, vmap_method="sequential")
    return call(left, right, ints=ints)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def multiply(x: Float[Array, "R I"], kernel: Float[Array, "..."], axis: int) -> Float[Array, "R O"]:
    """Multiply rows by a kernel: (in, out) with axis 0, (out, in) with axis 1; bfloat16 in and out, sums in float32."""
    return product(x, kernel, right_transposed=axis == 1)


def _forward(x: Array, kernel: Array, axis: int) -> tuple[Array, tuple[Array, Array]]:
    return multiply(x, kernel, axis), (x, kernel)


def _backward(axis: int, residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    grad = grad.astype(jnp.bfloat16)
    left, right = (x, grad) if axis == 0 else (grad, x)
    x_grad = product(grad, kernel, right_transposed=axis == 0)
    return x_grad, product(left, right, left_transposed=True)


multiply.defvjp(_forward, _backward)
