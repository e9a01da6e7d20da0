"""Products over the tokens of a chunk, in the forms that XLA:CPU multiplies fast (docs/xla_cpu.md, rule 16).

Its fast path wants the contracted axis last in the left operand. A sum over tokens of outer products, which is what a
memory learns by and what the gradient of every kernel is, has it first in both; so one operand is laid out anew. Axis
letters: chunk.py's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


@jax.custom_vjp
def multiply(x: Float[Array, "E T I"], kernel: Float[Array, "E I O"]) -> Float[Array, "E T O"]:
    """Return each token's row times its memory's kernel."""
    return jnp.matmul(x, kernel)


def _multiply_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.matmul(x, kernel), (x, kernel)


def _multiply_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = kept
    return multiply_transposed(grad, kernel), outer(x, grad)


multiply.defvjp(_multiply_forward, _multiply_backward)


@jax.custom_vjp
def multiply_transposed(x: Float[Array, "E T O"], kernel: Float[Array, "E I O"]) -> Float[Array, "E T I"]:
    """Return each token's row times its memory's transposed kernel."""
    return jnp.einsum("ETO,EIO->ETI", x, kernel)


def _transposed_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.einsum("ETO,EIO->ETI", x, kernel), (x, kernel)


def _transposed_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = kept
    return multiply(grad, kernel), outer(grad, x)


multiply_transposed.defvjp(_transposed_forward, _transposed_backward)


@jax.custom_vjp
def outer(x: Float[Array, "E T I"], y: Float[Array, "E T O"]) -> Float[Array, "E I O"]:
    """Return the sum over tokens of the outer products of two rows."""
    # The barrier keeps the layout: without it the transpose is folded back into the product.
    return jnp.matmul(lax.optimization_barrier(jnp.swapaxes(x, 1, 2)), y)


def _outer_forward(x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return outer(x, y), (x, y)


def _outer_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, y = kept
    return multiply_transposed(y, grad), multiply(x, grad)


outer.defvjp(_outer_forward, _outer_backward)
