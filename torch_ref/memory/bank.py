"""A bank of recent and compressed states with a gated read, in PyTorch. Twin: jaxbench/memory/bank.py.

Data's way: every block of C tokens attends to what the bank held before it; then it joins the recent blocks, and the
oldest recent block is compressed into C / ratio slots, for which the oldest slots make room; with min_surprise, only
what differs from what came before it gets a slot of its own. Blocks are counted in a row's own tokens; a state carries
an unfinished one. Sources: Rae et al. 2019, arXiv:1911.05507, sections 3 and 3.1
(recent and compressed memory, compression functions, attention reconstruction); Chen et al. 2024, arXiv:2410.03156
(sigmoid gate of each head and width). Differs from the former: within a call gradients flow through what was written.
Axis letters: R recent states, M slots, S both, C tokens of a block, K slots it becomes, P slots of a page (as many).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench.memory.bank_config import BankConfig
from torch_ref import functional, nn
from torch_ref.memory import layout


class BankState(NamedTuple):
    """What rows' banks hold; entries are filled from the left, oldest first."""

    recent: Float[Tensor, "B R D"]
    slots: Float[Tensor, "B M D"]
    num_recent: Int[Tensor, " B"]
    num_slots: Int[Tensor, " B"]
    use: Float[Tensor, "B S"]  # attention mass in the current block, summed over tokens, mean over heads
    mass: Float[Tensor, "B S"]  # decayed mean of it over blocks
    age: Int[Tensor, "B M"]  # blocks written since the slot was
    evicted: Int[Tensor, " B"]  # slots dropped so far
    cosine: Float[Tensor, " B"]  # of what the last compressed block answers to what it answered uncompressed
    pending: Float[Tensor, "B C D"]  # tokens of an unfinished block
    count: Int[Tensor, " B"]  # how many
    compressed: Int[Tensor, " B"]  # tokens compressed so far


def attend(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B S N H"],
    value: Float[Tensor, "B S N H"],
    is_filled: Bool[Tensor, "B S"],
    *,
    page: int,
) -> tuple[Float[Tensor, "B T N H"], Float[Tensor, "B N T S"]]:
    """Return softmax attention to the filled entries, and its weights; zeros where none is filled.

    Sums run page after page of `page` entries (S is a multiple of it), so that unfilled pages behind the others change
    no bit of the result.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key, value = (x.to(wide) for x in (query, key, value))
    scores = torch.einsum("BTNH,BSNH->BNTS", query, key) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~is_filled[:, None, None, :], -torch.inf)
    peak = scores.detach().amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - peak.masked_fill(~torch.isfinite(peak), 0.0))
    total, mass = torch.zeros_like(query), weights.new_zeros(weights.shape[:3])
    for start in range(0, key.shape[1], page):
        few = weights[..., start : start + page]
        total = total + torch.einsum("BNTP,BPNH->BTNH", few, value[:, start : start + page])
        mass = mass + few.sum(dim=-1)
    mass = torch.where(mass > 0, mass, mass.new_ones(()))
    return total / mass.transpose(1, 2)[..., None], weights / mass[..., None]


def appended(
    entries: Float[Tensor, "B S ..."],
    number: Int[Tensor, " B"],
    block: Float[Tensor, "B C ..."],
    added: Int[Tensor, " B"] | None = None,
) -> Tensor:
    """Return entries with a block behind the first `number` of them; where it does not fit, the oldest make room.

    added: how many of the block's first entries count; None = all of them.
    """
    capacity, size = entries.shape[1], block.shape[1] if added is None else added
    dropped = (number + size - capacity).clamp(min=0)
    place = torch.arange(capacity, device=number.device)[None, :] + dropped[:, None]
    source = torch.where(place < number[:, None], place, capacity + place - number[:, None])
    moved = layout.gathered(torch.cat([entries, block], dim=1), source.clamp(max=capacity + block.shape[1] - 1))
    is_filled = place < (number + size)[:, None]
    return torch.where(is_filled.reshape(*place.shape, *(1,) * (moved.ndim - 2)), moved, moved.new_zeros(()))


class Bank(torch.nn.Module):
    """Reads what earlier blocks left behind, and keeps the stream block by block."""

    def __init__(self, config: BankConfig, *, dtype: str):
        super().__init__()
        c, width = config, config.num_heads * config.head_dim
        linear = functools.partial(nn.Linear, use_bias=False, dtype=dtype)
        self.q_proj, self.k_proj, self.v_proj = (linear(c.d_model, width) for _ in range(3))
        sizes = {"conv": (c.ratio * c.d_model, c.d_model), "learned": (c.d_model, c.slots_per_block)}
        self.compress = linear(*sizes[c.compression]) if c.compression in sizes else None
        self.gate = torch.nn.Parameter(torch.zeros((c.num_heads, c.head_dim), dtype=getattr(torch, dtype)))
        self.o_proj = linear(width, c.d_model)
        self.num_heads, self.head_dim, self.d_model = c.num_heads, c.head_dim, c.d_model
        self.block_size, self.slots_per_block, self.compression = c.block_size, c.slots_per_block, c.compression
        self.capacities = (c.recent_blocks * c.block_size, c.memory_slots)
        self.mass_decay, self.min_surprise, self.dtype = c.mass_decay, c.min_surprise, dtype

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: BankState | None = None,
        *,
        own: Float[Tensor, "B T N H"] | None = None,
        is_token: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], BankState, Float[Tensor, ""]]:
        """Return each token's answer, the state behind the last one, and the loss that trains the compression.

        Args:
          x: the stream, normalised.
          state: the state behind the tokens before; None = an empty bank, which answers zeros.
          own: what the tokens' own attention says; answers are gate * bank + (1 - gate) * own. None = zeros.
          is_token: False = padding, which is answered with zeros and changes nothing; None = no padding.

        Raises:
          ValueError: the state is of another model or batch size.

        The loss is the mean square of what attention to a compressed block gets wrong about attention to the block
        itself; its gradient reaches the compression alone (Rae et al. 2019, algorithm 2).
        """
        batch_size, length, _ = x.shape
        if state is not None:
            self._check(state, batch_size)
        is_fresh = state is None and is_token is None
        state = self.init_state(batch_size) if state is None else state
        is_token = torch.ones((batch_size, length), dtype=torch.bool, device=x.device) if is_token is None else is_token
        order, number = torch.argsort((~is_token).to(torch.int32), dim=1, stable=True), is_token.sum(dim=1)
        tokens = layout.gathered(x, order)
        if length == 1:
            answer, state, loss = self._step(tokens, state, number)
        else:
            size = self.block_size
            num_blocks = -(-length // size) if is_fresh else -(-(length + size - 1) // size)
            answer, state, loss = self._read_blocks(tokens, state, number, num_blocks)
        answer = layout.gathered(answer, (torch.cumsum(is_token, dim=1) - 1).clamp(min=0))
        gate = torch.sigmoid(self.gate.to(answer.dtype))
        mixed = gate * answer if own is None else gate * answer + (1.0 - gate) * own.to(answer.dtype)
        out = self.o_proj(mixed.to(self.gate.dtype).reshape(batch_size, length, -1))
        return torch.where(is_token[:, :, None], out, out.new_zeros(())), state, loss

    def init_state(self, batch_size: int) -> BankState:
        """Return the state of rows that have read nothing."""
        like = self.gate.new_zeros(())
        wide = like.to(torch.promote_types(like.dtype, torch.float32))
        recent, slots = (like.new_zeros((batch_size, n, self.d_model)) for n in self.capacities)
        none = torch.zeros((batch_size,), dtype=torch.int32, device=like.device)
        mass = wide.new_zeros((batch_size, sum(self.capacities)))
        age = torch.zeros((batch_size, self.capacities[1]), dtype=torch.int32, device=like.device)
        pending = like.new_zeros((batch_size, self.block_size, self.d_model))
        cosine = wide.new_zeros(batch_size)
        return BankState(recent, slots, none, none, mass, mass, age, none, cosine, pending, none, none)

    def reset(self, state: BankState, is_reset: Bool[Tensor, " B"]) -> BankState:
        """Return the state with some rows as they are before anything is read."""
        blank = self.init_state(len(is_reset))
        return layout.tree_map(functools.partial(layout.chosen, is_reset), blank, state)

    def _check(self, state: BankState, batch_size: int) -> None:
        wanted = [(batch_size, n, self.d_model) for n in (*self.capacities, self.block_size)]
        found = [tuple(x.shape) for x in (state.recent, state.slots, state.pending)]
        if found != wanted:
            raise ValueError(
                f"bank: the state's recent, slots and pending are {found}, wanted {wanted} (rows, entries, width); "
                f"grow_slots and shrink_slots change the number of slots"
            )

    def _step(self, x: Tensor, state: BankState, number: Tensor) -> tuple[Tensor, BankState, Tensor]:
        """Read one token of each row that has one (number = 1, else 0)."""
        is_token = number[:, None] > 0
        answer, state = self._answer(x, is_token, state)
        place = torch.arange(self.block_size, device=x.device)[None, :]
        is_here = is_token & (place == state.count[:, None])
        pending = torch.where(is_here[:, :, None], x.to(state.pending.dtype), state.pending)
        count = state.count + number.to(torch.int32)
        is_full = count == self.block_size
        state, loss = state._replace(pending=pending), state.mass.new_zeros((2,))
        if bool(is_full.any()):
            state, loss = self._write(state, pending, is_full)
        pending = torch.where(is_full[:, None, None], pending.new_zeros(()), pending)
        state = state._replace(pending=pending, count=torch.where(is_full, torch.zeros_like(count), count))
        return answer, state, loss[0] / loss[1].clamp(min=1.0)

    def _read_blocks(
        self, x: Tensor, state: BankState, number: Tensor, num_blocks: int
    ) -> tuple[Tensor, BankState, Tensor]:
        """Read the first `number` tokens of each row, behind its pending ones."""
        size, length = self.block_size, x.shape[1]
        place = torch.arange(num_blocks * size, device=x.device).expand(len(x), num_blocks * size)
        is_old, end = place < state.count[:, None], (state.count + number)[:, None]
        source = torch.where(is_old, length + place, (place - state.count[:, None]).clamp(0, length - 1))
        content = layout.gathered(torch.cat([x, state.pending.to(x.dtype)], dim=1), source)
        content = torch.where((place < end)[:, :, None], content, content.new_zeros(()))
        blocks = tuple(layout.cut(each, size) for each in (content, place < end, (place < end) & ~is_old))

        def read(carry: tuple, block: tuple) -> tuple[tuple, Tensor]:
            (state, loss), (content, is_content, is_query) = carry, block
            answer, state = self._answer(content, is_query, state)
            state, more = self._write(state, content, is_content.all(dim=1))
            return (state, loss + more), answer

        start = (state, state.mass.new_zeros((2,)))
        (state, loss), answers = layout.walk(read, start, blocks)
        answer = layout.gathered(
            layout.joined(answers), torch.arange(length, device=x.device)[None, :] + start[0].count[:, None]
        )
        last = end // size * size + torch.arange(size, device=x.device)[None, :]
        pending = layout.gathered(content, last.clamp(max=num_blocks * size - 1))
        pending = torch.where((last < end)[:, :, None], pending, pending.new_zeros(())).to(state.pending.dtype)
        count = (end[:, 0] % size).to(torch.int32)
        return answer, state._replace(pending=pending, count=count), loss[0] / loss[1].clamp(min=1.0)

    def _heads(self, x: Tensor, kernel: Tensor) -> Tensor:
        return functional.matmul(x, kernel).reshape(*x.shape[:2], self.num_heads, self.head_dim)

    def _answer(self, x: Tensor, is_query: Tensor, state: BankState) -> tuple[Tensor, BankState]:
        """Return what the bank answers, zeros where no token asks, and the state with the attention noted."""
        entries = torch.cat([state.recent, state.slots], dim=1).to(x.dtype)
        numbers = (state.num_recent, state.num_slots)
        pairs = zip(self.capacities, numbers, strict=True)
        filled = [torch.arange(n, device=x.device)[None, :] < number[:, None] for n, number in pairs]
        query, key, value = (
            self._heads(each, proj.kernel)
            for each, proj in ((x, self.q_proj), (entries, self.k_proj), (entries, self.v_proj))
        )
        answer, weights = attend(query, key, value, torch.cat(filled, dim=1), page=self.slots_per_block)
        weights = torch.where(is_query[:, None, :, None], weights, weights.new_zeros(()))
        use = weights.detach().mean(dim=1).sum(dim=1)
        answer = torch.where(is_query[:, :, None, None], answer, answer.new_zeros(()))
        return answer, state._replace(use=state.use + use)

    def _write(self, state: BankState, block: Tensor, is_full: Tensor) -> tuple[BankState, Tensor]:
        """Return the state with a block written in the rows where it is full, and (sum, number) of the losses."""
        size, few = self.block_size, self.slots_per_block
        room, capacity = self.capacities
        mass = self.mass_decay * state.mass + (1.0 - self.mass_decay) * state.use / size
        is_old = state.num_recent == room
        oldest, used = state.recent[:, :size], mass[:, :size]
        new, added = self._allocated(self._compressed(oldest, used))
        loss, cosine = self._reconstruction(block, oldest, used)
        is_made = is_full & is_old

        def grown(entries: Tensor, block: Tensor) -> Tensor:
            return layout.chosen(is_made, appended(entries, state.num_slots, block, added), entries)

        recent_mass = appended(mass[:, :room], state.num_recent, torch.zeros_like(used))
        slot_mass = grown(mass[:, room:], mass.new_zeros((len(block), few)))
        written = state._replace(
            recent=appended(state.recent, state.num_recent, block.to(state.recent.dtype)),
            slots=grown(state.slots, new.to(state.slots.dtype)),
            num_recent=(state.num_recent + size).clamp(max=room),
            num_slots=torch.where(is_made, (state.num_slots + added).clamp(max=capacity), state.num_slots),
            use=torch.zeros_like(state.use),
            mass=torch.cat([recent_mass, slot_mass], dim=1),
            age=grown(state.age + 1, state.age.new_zeros((len(block), few))),
            evicted=state.evicted + is_made * (state.num_slots + added - capacity).clamp(min=0),
            cosine=torch.where(is_made, cosine, state.cosine),
            compressed=state.compressed + is_made.to(torch.int32) * size,
        )
        state = layout.tree_map(functools.partial(layout.chosen, is_full), written, state)
        losses = torch.where(is_made, loss, loss.new_zeros(())).sum()
        return state, torch.stack([losses, is_made.sum().to(loss.dtype)])

    def _allocated(self, fine: Float[Tensor, "B K D"]) -> tuple[Float[Tensor, "B K D"], Int[Tensor, " B"]]:
        """Return a block's slots, filled from the left, and their number.

        Without min_surprise these are all of `fine`. Else one begins a slot of its own where 1 - cosine between it and
        the one before it is over min_surprise, and a slot is the mean of its run: what follows from what came before
        costs nothing.
        """
        few = self.slots_per_block
        if self.min_surprise is None:
            return fine, torch.full((len(fine),), few, dtype=torch.int32, device=fine.device)
        wide = torch.promote_types(fine.dtype, torch.float32)
        fixed = fine.detach().to(wide)
        squares = (fixed * fixed).sum(dim=-1)
        lengths = torch.rsqrt((squares[:, 1:] * squares[:, :-1]).clamp(min=torch.finfo(wide).tiny))
        surprise = 1.0 - (fixed[:, 1:] * fixed[:, :-1]).sum(dim=-1) * lengths
        place = torch.cumsum((surprise > self.min_surprise).to(torch.int32), dim=1, dtype=torch.int32)
        place = torch.nn.functional.pad(place, (1, 0))
        is_in = (place[:, :, None] == torch.arange(few, device=fine.device)[None, None, :]).to(fine.dtype)
        share = is_in / is_in.sum(dim=1, keepdim=True).clamp(min=1.0)
        return torch.einsum("BKP,BKD->BPD", share, fine), place[:, -1] + 1

    def _compressed(self, block: Float[Tensor, "B C D"], mass: Float[Tensor, "B C"]) -> Float[Tensor, "B K D"]:
        """Return what a block is compressed into, C / ratio states."""
        few = self.slots_per_block
        if self.compression == "most_used":
            best = torch.argsort(-mass.detach(), dim=1, stable=True)[:, :few]
            return layout.gathered(block, best.sort(dim=1).values)
        if self.compression == "learned":
            weights = torch.softmax(functional.matmul(block, self.compress.kernel), dim=1)
            return torch.einsum("BCK,BCD->BKD", weights, block)
        groups = block.reshape(len(block), few, -1, self.d_model)
        if self.compression == "conv":
            return functional.matmul(groups.reshape(len(block), few, -1), self.compress.kernel)
        return groups.mean(dim=2) if self.compression == "mean" else groups.amax(dim=2)

    def _reconstruction(self, block: Tensor, oldest: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each row how attention to the slots differs from attention to what they stand for: loss, cosine.

        Queries, states and projections are held fixed, so that the loss trains the compression and nothing else.
        """
        block, oldest = block.detach(), oldest.detach()
        kernels = [proj.kernel.detach() for proj in (self.q_proj, self.k_proj, self.v_proj)]
        query, answers = self._heads(block, kernels[0]), []
        slots, number = self._allocated(self._compressed(oldest, mass))
        for entries, filled in ((oldest, self.block_size), (slots, number[:, None])):
            key, value = (self._heads(entries.to(block.dtype), kernel) for kernel in kernels[1:])
            place = torch.arange(entries.shape[1], device=entries.device)[None, :]
            is_filled = (place < filled).expand(entries.shape[:2])
            answers.append(attend(query, key, value, is_filled, page=self.slots_per_block)[0])
        wanted, found = answers
        loss = torch.square(found - wanted).mean(dim=(1, 2, 3))
        one, other = wanted.detach(), found.detach()
        lengths = (one * one).sum(dim=-1) * (other * other).sum(dim=-1)
        cosine = (one * other).sum(dim=-1) * torch.rsqrt(lengths.clamp(min=torch.finfo(one.dtype).tiny))
        return loss, cosine.mean(dim=(1, 2))


# Training on a target, as the parity table does it


class Batch(NamedTuple):
    """One step's data."""

    x: Float[Tensor, "B T D"]
    target: Float[Tensor, "B T D"]
    is_token: Bool[Tensor, "B T"] | None  # None = no padding


def predict(model: Bank, batch: Batch, *, dropout: Any = None) -> tuple[Tensor, BankState, Tensor]:
    """Return the bank's answers to a batch, the state behind it and the compression's loss; there is no dropout."""
    return model(batch.x.to(model.gate.dtype), is_token=batch.is_token)


def loss_of(output: tuple[Tensor, BankState, Tensor], batch: Batch) -> Float[Tensor, ""]:
    """Return the mean squared error at tokens, plus the compression's loss, plus the mean square of the slots."""
    answer, state, loss = output
    wide = torch.promote_types(answer.dtype, torch.float32)
    squares = torch.square(answer.to(wide) - batch.target.to(wide)).mean(dim=-1)
    is_token = torch.ones(squares.shape, dtype=torch.bool) if batch.is_token is None else batch.is_token
    error = torch.where(is_token, squares, squares.new_zeros(())).sum() / is_token.sum().to(wide)
    return error + loss.to(wide) + torch.square(state.slots.to(wide)).mean()


def loss_fn(model: Bank, batch: Batch, *, dropout: Any = None) -> Float[Tensor, ""]:
    """Return the model's loss on a batch."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(config: BankConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32", device: str = "cpu") -> Bank:
    """Return the bank of a configuration holding `params`, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    with torch.device("meta"):
        model = Bank(config, dtype=dtype)
    return nn.load_params(model, params, device=device)
