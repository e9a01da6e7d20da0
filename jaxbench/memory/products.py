"""Products over the tokens of a chunk, in the forms that XLA:CPU multiplies fast (docs/xla_cpu.md, rule 16).

Its fast path wants the contracted axis last in the left operand. A sum over tokens of outer products (a memory's
update, and the gradient of every kernel) has the contracted axis first in both operands, so one of them is transposed
in memory. Axis letters: chunk.py's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


@jax.custom_vjp
def multiply(x: Float[Array, "E T I"], kernel: Float[Array, "E I O"]) -> Float[Array, "E T O"]:
    """Batched matrix product x @ kernel of each memory: einsum ETI,EIO->ETO."""
    return jnp.matmul(x, kernel)


def _multiply_forward(
    x: Float[Array, "E T I"], kernel: Float[Array, "E I O"]
) -> tuple[Float[Array, "E T O"], tuple[Array, Array]]:
    return jnp.matmul(x, kernel), (x, kernel)


def _multiply_backward(
    residuals: tuple[Array, Array], grad: Float[Array, "E T O"]
) -> tuple[Float[Array, "E T I"], Float[Array, "E I O"]]:
    x, kernel = residuals
    return multiply_transposed(grad, kernel), outer(x, grad)


multiply.defvjp(_multiply_forward, _multiply_backward)


@jax.custom_vjp
def multiply_transposed(x: Float[Array, "E T O"], kernel: Float[Array, "E I O"]) -> Float[Array, "E T I"]:
    """Batched matrix product with the transposed kernel of each memory: einsum ETO,EIO->ETI."""
    return jnp.einsum("ETO,EIO->ETI", x, kernel)


def _transposed_forward(
    x: Float[Array, "E T O"], kernel: Float[Array, "E I O"]
) -> tuple[Float[Array, "E T I"], tuple[Array, Array]]:
    return jnp.einsum("ETO,EIO->ETI", x, kernel), (x, kernel)


def _transposed_backward(
    residuals: tuple[Array, Array], grad: Float[Array, "E T I"]
) -> tuple[Float[Array, "E T O"], Float[Array, "E I O"]]:
    x, kernel = residuals
    return multiply(grad, kernel), outer(grad, x)


multiply_transposed.defvjp(_transposed_forward, _transposed_backward)


@jax.custom_vjp
def outer(x: Float[Array, "E T I"], y: Float[Array, "E T O"]) -> Float[Array, "E I O"]:
    """Sum over tokens of outer products x_t^T y_t, for each memory: einsum ETI,ETO->EIO."""
    # The barrier keeps the layout: without it the transpose is folded back into the product.
    return jnp.matmul(lax.optimization_barrier(jnp.swapaxes(x, 1, 2)), y)


def _outer_forward(
    x: Float[Array, "E T I"], y: Float[Array, "E T O"]
) -> tuple[Float[Array, "E I O"], tuple[Array, Array]]:
    return outer(x, y), (x, y)


def _outer_backward(
    residuals: tuple[Array, Array], grad: Float[Array, "E I O"]
) -> tuple[Float[Array, "E T I"], Float[Array, "E T O"]]:
    x, y = residuals
    return multiply_transposed(y, grad), multiply(x, grad)


outer.defvjp(_outer_forward, _outer_backward)
