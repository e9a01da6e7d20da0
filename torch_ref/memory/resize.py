"""Grow or shrink the slots of a bank's state, in PyTorch. Twin: jaxbench/memory/resize.py.

No parameter depends on the number of slots: a model built with another memory_slots and the same parameters can
resume from the resized state. A checkpoint stores a state by its field names, `state._asdict()`.
"""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

from torch_ref.memory import layout
from torch_ref.memory.bank import BankState


def grow_slots(state: BankState, number: int) -> BankState:
    """Add `number` empty slots to a bank's state; its read-outs stay bit-identical.

    Arguments, results and errors are the twin's.
    """
    if number < 0:
        raise ValueError(f"grow_slots: number={number} is negative; shrink_slots takes slots away")

    def padded(x: Shaped[Tensor, "B S ..."]) -> Shaped[Tensor, "B R ..."]:
        return torch.cat([x, x.new_zeros((len(x), number, *x.shape[2:]))], dim=1)

    grown = {name: padded(getattr(state, name)) for name in ("slots", "use", "mass", "age")}
    return state._replace(**grown)


def shrink_slots(state: BankState, number: int) -> BankState:
    """Remove `number` slots from a bank's state: empty ones first, then those with the least attention mass.

    The newest, which nothing has attended to yet, are removed last.

    Arguments, results and errors are the twin's.
    """
    capacity = state.slots.shape[1]
    if not 0 <= number < capacity:
        raise ValueError(f"shrink_slots: number={number} is outside [0, {capacity}), the bank has {capacity} slots")
    num_recent, left = state.recent.shape[1], capacity - number
    is_filled = torch.arange(capacity, device=state.slots.device)[None, :] < state.num_slots[:, None]
    # Nothing has attended to the newest slots yet, so their mass of 0 is no evidence against them.
    mass = state.mass[:, num_recent:].masked_fill(state.age == 0, torch.inf).masked_fill(~is_filled, -1.0)
    # The slots with the most mass, in their old order; at equal mass, the later ones.
    best = torch.argsort(mass.flip(1), dim=1, stable=True, descending=True)[:, :left]
    kept = (capacity - 1 - best).sort(dim=1).values
    # Where slots are empty, the filled ones come first, so that kept slots stay filled from the left.
    kept = torch.where(
        is_filled.sum(dim=1, keepdim=True) <= left, torch.arange(left, device=kept.device)[None, :], kept
    )
    slot_values = {name: layout.gathered(getattr(state, name)[:, num_recent:], kept) for name in ("use", "mass")}
    entries = {name: torch.cat([getattr(state, name)[:, :num_recent], x], dim=1) for name, x in slot_values.items()}
    slots, age = (layout.gathered(x, kept) for x in (state.slots, state.age))
    num_left = state.num_slots.clamp(max=left)
    num_dropped = state.num_slots - num_left
    return state._replace(slots=slots, age=age, num_slots=num_left, evicted=state.evicted + num_dropped, **entries)
