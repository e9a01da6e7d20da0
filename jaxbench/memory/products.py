"""Products over the tokens of a chunk, in the forms that XLA:CPU multiplies fast (docs/xla_cpu.md, rule 16).

XLA:CPU's fast path needs the contracted axis last in the left operand. A sum over tokens of outer products (a memory's
update, and the gradient of every kernel) has the contracted axis first in both operands, so one of them is transposed
in memory. Axis letters: as in chunk.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


def _with_gradients(gradients: Callable[..., tuple[Array, Array]]) -> Callable[..., Callable[..., Array]]:
    """Decorate a product of x and y: gradients(x, y, grad) returns the gradients with respect to x and y."""

    def decorated(product: Callable[..., Array]) -> Callable[..., Array]:
        by_hand = jax.custom_vjp(product)
        by_hand.defvjp(lambda x, y: (product(x, y), (x, y)), lambda factors, grad: gradients(*factors, grad))
        return by_hand

    return decorated


@_with_gradients(lambda x, kernel, grad: (multiply_transposed(grad, kernel), outer(x, grad)))
def multiply(x: Float[Array, "E T I"], kernel: Float[Array, "E I O"]) -> Float[Array, "E T O"]:
    """Batched matrix product x @ kernel of each memory: einsum ETI,EIO->ETO."""
    return jnp.matmul(x, kernel)


@_with_gradients(lambda x, kernel, grad: (multiply(grad, kernel), outer(grad, x)))
def multiply_transposed(x: Float[Array, "E T O"], kernel: Float[Array, "E I O"]) -> Float[Array, "E T I"]:
    """Batched matrix product with the transposed kernel of each memory: einsum ETO,EIO->ETI."""
    return jnp.einsum("ETO,EIO->ETI", x, kernel)


@_with_gradients(lambda x, y, grad: (multiply_transposed(y, grad), multiply(x, grad)))
def outer(x: Float[Array, "E T I"], y: Float[Array, "E T O"]) -> Float[Array, "E I O"]:
    """Sum over tokens of outer products x_t^T y_t, for each memory: einsum ETI,ETO->EIO."""
    # The barrier keeps the layout: without it the transpose is folded back into the product.
    return jnp.matmul(lax.optimization_barrier(jnp.swapaxes(x, 1, 2)), y)
