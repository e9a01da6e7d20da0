"""More or fewer slots for a bank that already holds something, in PyTorch. Twin: jaxbench/memory/resize.py.

No parameter depends on the number of slots: the model that reads on is built with another memory_slots and the same
parameters. A state is kept in a checkpoint by its fields' names, `state._asdict()`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ref.memory import layout
from torch_ref.memory.bank import BankState


def grow_slots(state: BankState, number: int) -> BankState:
    """Return the state with room for `number` more slots; what it answers does not change by a bit.

    Raises:
      ValueError: number is negative.
    """
    if number < 0:
        raise ValueError(f"grow_slots: number={number} is negative; shrink_slots takes slots away")

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros((len(x), number, *x.shape[2:]))], dim=1)

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
    is_filled = torch.arange(capacity, device=state.slots.device)[None, :] < state.num_slots[:, None]
    worth = state.mass[:, room:].masked_fill(~is_filled, -1.0)
    # The best `left` slots, in their old order; of equal mass the later ones.
    best = torch.argsort(worth.flip(1), dim=1, stable=True, descending=True)[:, :left]
    kept = (capacity - 1 - best).sort(dim=1).values
    # Where slots are empty, the filled ones come first, so that kept slots stay filled from the left.
    kept = torch.where(
        is_filled.sum(dim=1, keepdim=True) <= left, torch.arange(left, device=kept.device)[None, :], kept
    )
    behind = {name: layout.gathered(getattr(state, name)[:, room:], kept) for name in ("use", "mass")}
    held = {name: torch.cat([getattr(state, name)[:, :room], x], dim=1) for name, x in behind.items()}
    slots, age = (layout.gathered(x, kept) for x in (state.slots, state.age))
    number_left = state.num_slots.clamp(max=left)
    dropped = state.num_slots - number_left
    return state._replace(slots=slots, age=age, num_slots=number_left, evicted=state.evicted + dropped, **held)
