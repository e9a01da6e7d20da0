"""More or fewer slots for a bank that already holds something, in JAX. Twin: torch_ref/memory/resize.py.

No parameter depends on the number of slots: the model that reads on is built with another memory_slots and the same
parameters. A state is kept in a checkpoint by its fields' names, `state._asdict()`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxbench.memory import layout
from jaxbench.memory.bank import BankState


def grow_slots(state: BankState, number: int) -> BankState:
    """Return the state with room for `number` more slots; what it answers does not change by a bit.

    Raises:
      ValueError: number is negative.
    """
    if number < 0:
        raise ValueError(f"grow_slots: number={number} is negative; shrink_slots takes slots away")

    def padded(x: Array) -> Array:
        return jnp.concatenate([x, jnp.zeros((len(x), number, *x.shape[2:]), x.dtype)], axis=1)

    held = {name: padded(getattr(state, name)) for name in ("slots", "use", "mass", "age")}
    return state._replace(**held)


def shrink_slots(state: BankState, number: int) -> BankState:
    """Return the state with `number` slots less: empty ones go first, then those of the least attention mass.

    While only empty ones go, what it answers does not change by a bit.

    Raises:
      ValueError: number is negative or not below the number of slots.
    """
    capacity = state.slots.shape[1]
    if not 0 <= number < capacity:
        raise ValueError(f"shrink_slots: number={number} is outside [0, {capacity}), the bank has {capacity} slots")
    room, left = state.recent.shape[1], capacity - number
    is_filled = jnp.arange(capacity)[None, :] < state.num_slots[:, None]
    worth = jnp.where(is_filled, state.mass[:, room:], jnp.asarray(-1.0, state.mass.dtype))
    # The best `left` slots, in their old order; of equal mass the later ones.
    best = jnp.argsort(worth[:, ::-1], axis=1, stable=True, descending=True)[:, :left]
    kept = jnp.sort(capacity - 1 - best, axis=1)
    # Where slots are empty, the filled ones come first, so that kept slots stay filled from the left.
    kept = jnp.where(jnp.sum(is_filled, axis=1, keepdims=True) <= left, jnp.arange(left)[None, :], kept)
    behind = {name: layout.gathered(getattr(state, name)[:, room:], kept) for name in ("use", "mass")}
    held = {name: jnp.concatenate([getattr(state, name)[:, :room], x], axis=1) for name, x in behind.items()}
    slots, age = (layout.gathered(x, kept) for x in (state.slots, state.age))
    number_left = jnp.minimum(state.num_slots, left)
    dropped = state.num_slots - number_left
    return state._replace(slots=slots, age=age, num_slots=number_left, evicted=state.evicted + dropped, **held)
