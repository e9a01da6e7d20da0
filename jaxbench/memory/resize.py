"""Grow or shrink the slots of a bank's state, in JAX. Twin: torch_ref/memory/resize.py.

No parameter depends on the number of slots: a model built with another memory_slots and the same parameters can
resume from the resized state. A checkpoint stores a state by its field names, `state._asdict()`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Shaped

from jaxbench.memory import layout
from jaxbench.memory.bank import BankState


def grow_slots(state: BankState, number: int) -> BankState:
    """Add `number` empty slots to a bank's state; its read-outs stay bit-identical.

    Raises:
      ValueError: number is negative.
    """
    if number < 0:
        raise ValueError(f"grow_slots: number={number} is negative; shrink_slots takes slots away")

    def padded(x: Shaped[Array, "B S ..."]) -> Shaped[Array, "B R ..."]:
        return jnp.concatenate([x, jnp.zeros((len(x), number, *x.shape[2:]), x.dtype)], axis=1)

    grown = {name: padded(getattr(state, name)) for name in ("slots", "use", "mass", "age")}
    return state._replace(**grown)


def shrink_slots(state: BankState, number: int) -> BankState:
    """Remove `number` slots from a bank's state: empty ones first, then those with the least attention mass.

    The newest, which nothing has attended to yet, are removed last. While only empty ones are removed, the bank's
    read-outs stay bit-identical.

    Raises:
      ValueError: number is negative or not below the number of slots.
    """
    capacity = state.slots.shape[1]
    if not 0 <= number < capacity:
        raise ValueError(f"shrink_slots: number={number} is outside [0, {capacity}), the bank has {capacity} slots")
    num_recent, left = state.recent.shape[1], capacity - number
    is_filled = jnp.arange(capacity)[None, :] < state.num_slots[:, None]
    mass = state.mass[:, num_recent:]
    # Nothing has attended to the newest slots yet, so their mass of 0 is no evidence against them.
    mass = jnp.where(state.age == 0, jnp.asarray(jnp.inf, mass.dtype), mass)
    mass = jnp.where(is_filled, mass, jnp.asarray(-1.0, mass.dtype))
    # The slots with the most mass, in their old order; at equal mass, the later ones.
    best = jnp.argsort(mass[:, ::-1], axis=1, stable=True, descending=True)[:, :left]
    kept = jnp.sort(capacity - 1 - best, axis=1)
    # Where slots are empty, the filled ones come first, so that kept slots stay filled from the left.
    kept = jnp.where(jnp.sum(is_filled, axis=1, keepdims=True) <= left, jnp.arange(left)[None, :], kept)
    slot_values = {name: layout.gathered(getattr(state, name)[:, num_recent:], kept) for name in ("use", "mass")}
    entries = {
        name: jnp.concatenate([getattr(state, name)[:, :num_recent], x], axis=1) for name, x in slot_values.items()
    }
    slots, age = (layout.gathered(x, kept) for x in (state.slots, state.age))
    num_left = jnp.minimum(state.num_slots, left)
    num_dropped = state.num_slots - num_left
    return state._replace(slots=slots, age=age, num_slots=num_left, evicted=state.evicted + num_dropped, **entries)
