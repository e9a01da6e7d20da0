"""A bank of recent and compressed states with a gated read, in PyTorch. Twin: jaxbench/memory/bank.py.

How it works, its sources and axis letters: see the twin's module docstring.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from jaxbench.memory.bank_config import ROUNDING, BankConfig
from torch_ref import functional, nn
from torch_ref.memory import layout
from torch_ref.memory.layout import _unnarrowed


class BankState(NamedTuple):
    """State of rows' banks; entries are filled from the left, oldest first."""

    recent: Float[Tensor, "B R D"]
    slots: Float[Tensor, "B M D"]
    num_recent: Int[Tensor, " B"]
    num_slots: Int[Tensor, " B"]
    use: Float[Tensor, "B S"]  # attention mass from the current block: sum over its tokens, mean over heads
    mass: Float[Tensor, "B S"]  # exponential moving average over blocks of use / C
    age: Int[Tensor, "B M"]  # blocks written since the slot was written
    evicted: Int[Tensor, " B"]  # slots dropped so far
    cosine: Float[Tensor, " B"]  # of attention outputs: last compressed block versus the same block uncompressed
    pending: Float[Tensor, "B C D"]  # tokens of an unfinished block
    count: Int[Tensor, " B"]  # number of pending tokens, 0 to C - 1
    compressed: Int[Tensor, " B"]  # tokens compressed so far

    @property
    def penalised(self) -> tuple[Float[Tensor, "..."], ...]:
        """Arrays whose mean squares are added to the loss of parity cases (target.py), so that gradients reach them."""
        return (self.slots,)


@_unnarrowed
def attend(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B S N H"],
    value: Float[Tensor, "B S N H"],
    is_filled: Bool[Tensor, "B S"],
    *,
    page: int,
) -> tuple[Float[Tensor, "B T N H"], Float[Tensor, "B N T S"]]:
    """Attend to the filled entries with softmax: outputs and attention weights, zeros where no entry is filled.

    Sums run over one page of `page` entries after another (S is a multiple of it), so that unfilled pages after the
    others leave the result bit-identical.
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


def append(
    entries: Shaped[Tensor, "B S ..."],
    num_filled: Int[Tensor, " B"],
    block: Shaped[Tensor, "B C ..."],
    num_added: Int[Tensor, " B"] | None = None,
) -> Shaped[Tensor, "B S ..."]:
    """Append a block to a first-in, first-out queue of S entries, which drops its oldest where the block does not fit.

    The queue is filled from the left; the block's first num_added entries are appended, None = all.
    """
    capacity = entries.shape[1]
    num_added = block.shape[1] if num_added is None else num_added
    dropped = (num_filled + num_added - capacity).clamp(min=0)
    place = torch.arange(capacity, device=num_filled.device)[None, :] + dropped[:, None]
    source = torch.where(place < num_filled[:, None], place, capacity + place - num_filled[:, None])
    moved = layout.gathered(torch.cat([entries, block], dim=1), source.clamp(max=capacity + block.shape[1] - 1))
    is_filled = place < (num_filled + num_added)[:, None]
    return torch.where(is_filled.reshape(*place.shape, *(1,) * (moved.ndim - 2)), moved, moved.new_zeros(()))


class Bank(torch.nn.Module):
    """Compressive memory of earlier blocks with an attention read-out through a gate."""

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
        attention_out: Float[Tensor, "B T N H"] | None = None,
        is_token: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], BankState, Float[Tensor, ""]]:
        """Read the bank at each token and write the tokens into it, block by block.

        Arguments, results and errors are the twin's.
        """
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"bank: x is {tuple(x.shape)}, wanted (rows, tokens, d_model={self.d_model})")
        batch_size, length, _ = x.shape
        heads = (batch_size, length, self.num_heads, self.head_dim)
        if attention_out is not None and tuple(attention_out.shape) != heads:
            raise ValueError(f"bank: attention_out is {tuple(attention_out.shape)}, wanted {heads}")
        if state is not None:
            self._check(state, batch_size)
        is_fresh = state is None and is_token is None
        state = self.init_state(batch_size) if state is None else state
        if length == 0:
            return x.to(self.gate.dtype), state, state.mass.new_zeros(())
        tokens, num_tokens = layout.left_align(x, is_token)
        if length == 1:
            read_out, state, loss = self._read_token(tokens, state, num_tokens)
        else:
            size = self.block_size
            num_blocks = -(-length // size) if is_fresh else -(-(length + size - 1) // size)
            read_out, state, loss = self._read_blocks(tokens, state, num_tokens, num_blocks)
        read_out = layout.restore_padding(read_out, is_token)
        gate = torch.sigmoid(self.gate.to(read_out.dtype))
        mixed = gate * read_out
        if attention_out is not None:
            mixed = mixed + (1.0 - gate) * attention_out.to(read_out.dtype)
        out = self.o_proj(mixed.to(self.gate.dtype).reshape(batch_size, length, -1))
        if is_token is not None:
            out = torch.where(is_token[:, :, None], out, out.new_zeros(()))
        return out, state, loss

    def init_state(self, batch_size: int) -> BankState:
        """State of empty banks."""
        like = self.gate.new_zeros(())
        wide = like.to(torch.promote_types(like.dtype, torch.float32))
        recent, slots = (like.new_zeros((batch_size, n, self.d_model)) for n in self.capacities)
        zeros = torch.zeros((batch_size,), dtype=torch.int32, device=like.device)
        mass = wide.new_zeros((batch_size, sum(self.capacities)))
        age = torch.zeros((batch_size, self.capacities[1]), dtype=torch.int32, device=like.device)
        pending = like.new_zeros((batch_size, self.block_size, self.d_model))
        cosine = wide.new_zeros(batch_size)
        return BankState(
            recent=recent,
            slots=slots,
            num_recent=zeros,
            num_slots=zeros,
            use=mass,
            mass=mass,
            age=age,
            evicted=zeros,
            cosine=cosine,
            pending=pending,
            count=zeros,
            compressed=zeros,
        )

    def reset(self, state: BankState, is_reset: Bool[Tensor, " B"]) -> BankState:
        """Reset some rows of a state to empty banks."""
        return layout.reset_rows(state, is_reset, self.init_state)

    def _check(self, state: BankState, batch_size: int) -> None:
        wanted = [(batch_size, n, self.d_model) for n in (*self.capacities, self.block_size)]
        given = [tuple(x.shape) for x in (state.recent, state.slots, state.pending)]
        if given != wanted:
            raise ValueError(
                f"bank: the state's recent, slots and pending are {given}, wanted {wanted} (rows, entries, width); "
                f"grow_slots and shrink_slots change the number of slots"
            )

    def _read_token(
        self, x: Float[Tensor, "B 1 D"], state: BankState, num_tokens: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B 1 N H"], BankState, Float[Tensor, ""]]:
        """Read one token of each row that has one (num_tokens = 1, else 0), and write the blocks that it completes."""
        is_token = num_tokens[:, None] > 0
        read_out, state = self._read(x, is_token, state)
        place = torch.arange(self.block_size, device=x.device)[None, :]
        is_new = is_token & (place == state.count[:, None])
        pending = torch.where(is_new[:, :, None], x.to(state.pending.dtype), state.pending)
        count = state.count + num_tokens.to(torch.int32)
        is_full = count == self.block_size
        state, losses = state._replace(pending=pending), state.mass.new_zeros((2,))
        if bool(is_full.any()):
            state, losses = self._write(state, pending, is_full)
        pending = torch.where(is_full[:, None, None], pending.new_zeros(()), pending)
        state = state._replace(pending=pending, count=torch.where(is_full, torch.zeros_like(count), count))
        return read_out, state, losses[0] / losses[1].clamp(min=1.0)

    def _read_blocks(
        self, x: Float[Tensor, "B T D"], state: BankState, num_tokens: Int[Tensor, " B"], num_blocks: int
    ) -> tuple[Float[Tensor, "B T N H"], BankState, Float[Tensor, ""]]:
        """Read the first num_tokens of each row, block by block, and write every block that is full.

        A row is laid out as its pending tokens, then the new ones, then zeros, and cut into blocks of C tokens. Each
        block reads the bank as it was before the block. The tokens of an unfinished last block are pending afterwards.
        """
        size, length, num_pending = self.block_size, x.shape[1], state.count
        end = (num_pending + num_tokens)[:, None]
        place = torch.arange(num_blocks * size, device=x.device).expand(len(x), num_blocks * size)
        is_pending, is_filled = place < num_pending[:, None], place < end
        source = torch.where(is_pending, length + place, (place - num_pending[:, None]).clamp(0, length - 1))
        tokens = layout.gathered(torch.cat([x, state.pending.to(x.dtype)], dim=1), source)
        tokens = torch.where(is_filled[:, :, None], tokens, tokens.new_zeros(()))
        blocks = tuple(layout.split_chunks(each, size) for each in (tokens, is_filled, is_filled & ~is_pending))

        def read_and_write(carry: tuple, block: tuple) -> tuple[tuple, Float[Tensor, "B C N H"]]:
            (state, losses), (tokens, is_filled, is_query) = carry, block
            read_out, state = self._read(tokens, is_query, state)
            state, new_losses = self._write(state, tokens, is_filled.all(dim=1))
            return (state, losses + new_losses), read_out

        start = (state, state.mass.new_zeros((2,)))
        (state, losses), read_outs = layout.scan_chunks(read_and_write, start, blocks)
        new = torch.arange(length, device=x.device)[None, :] + num_pending[:, None]  # where the tokens were laid out
        read_out = layout.gathered(layout.join_chunks(read_outs), new)
        last_block = end // size * size + torch.arange(size, device=x.device)[None, :]
        pending = layout.gathered(tokens, last_block.clamp(max=num_blocks * size - 1))
        pending = torch.where((last_block < end)[:, :, None], pending, pending.new_zeros(()))
        count = (end[:, 0] % size).to(torch.int32)
        state = state._replace(pending=pending.to(state.pending.dtype), count=count)
        return read_out, state, losses[0] / losses[1].clamp(min=1.0)

    def _heads(self, x: Float[Tensor, "B T D"], kernel: Float[Tensor, "D I"]) -> Float[Tensor, "B T N H"]:
        return functional.matmul(x, kernel).reshape(*x.shape[:2], self.num_heads, self.head_dim)

    def _read(
        self, x: Float[Tensor, "B T D"], is_query: Bool[Tensor, "B T"], state: BankState
    ) -> tuple[Float[Tensor, "B T N H"], BankState]:
        """Attend to the bank, zeros where a token is not a query; add the attention weights to the state's use."""
        entries = torch.cat([state.recent, state.slots], dim=1).to(x.dtype)
        parts = zip(self.capacities, (state.num_recent, state.num_slots), strict=True)
        is_filled = [torch.arange(size, device=x.device)[None, :] < num_filled[:, None] for size, num_filled in parts]
        query = self._heads(x, self.q_proj.kernel)
        key, value = (self._heads(entries, proj.kernel) for proj in (self.k_proj, self.v_proj))
        read_out, weights = attend(query, key, value, torch.cat(is_filled, dim=1), page=self.slots_per_block)
        weights = torch.where(is_query[:, None, :, None], weights, weights.new_zeros(()))
        use = weights.detach().mean(dim=1).sum(dim=1)
        read_out = torch.where(is_query[:, :, None, None], read_out, read_out.new_zeros(()))
        return read_out, state._replace(use=state.use + use)

    def _write(
        self, state: BankState, block: Float[Tensor, "B C D"], is_full: Bool[Tensor, " B"]
    ) -> tuple[BankState, Float[Tensor, " 2"]]:
        """Write a block in the rows where it is full; if the recent blocks are full, compress the oldest into slots.

        Also return (sum, number) of the reconstruction losses of the blocks that were compressed.
        """
        size, (num_recent, num_slots) = self.block_size, self.capacities
        # Attention mass: moving average over blocks of the attention that an entry got per token of this block.
        mass = self.mass_decay * state.mass + (1.0 - self.mass_decay) * state.use / size
        # Compression of the oldest recent block, in rows whose recent blocks leave no room for another.
        oldest, oldest_mass = state.recent[:, :size], mass[:, :size]
        slots, num_added = self._allocate_slots(self._compress(oldest, oldest_mass))
        loss, cosine = self._reconstruction(block, oldest, oldest_mass)
        is_compressed = is_full & (state.num_recent == num_recent)
        num_needed = state.num_slots + num_added  # slots, if there were no limit

        def pushed(queue: Shaped[Tensor, "B M ..."], new: Shaped[Tensor, "B K ..."]) -> Shaped[Tensor, "B M ..."]:
            return layout.select_rows(is_compressed, append(queue, state.num_slots, new, num_added), queue)

        # New entries start with no attention mass, new slots at age 0.
        recent_mass = append(mass[:, :num_recent], state.num_recent, torch.zeros_like(oldest_mass))
        slot_mass = pushed(mass[:, num_recent:], mass.new_zeros(slots.shape[:2]))
        written = state._replace(
            recent=append(state.recent, state.num_recent, block.to(state.recent.dtype)),
            slots=pushed(state.slots, slots.to(state.slots.dtype)),
            num_recent=(state.num_recent + size).clamp(max=num_recent),
            num_slots=torch.where(is_compressed, num_needed.clamp(max=num_slots), state.num_slots),
            use=torch.zeros_like(state.use),
            mass=torch.cat([recent_mass, slot_mass], dim=1),
            age=pushed(state.age + 1, state.age.new_zeros(slots.shape[:2])),
            evicted=state.evicted + is_compressed * (num_needed - num_slots).clamp(min=0),
            cosine=torch.where(is_compressed, cosine, state.cosine),
            compressed=state.compressed + is_compressed.to(torch.int32) * size,
        )
        state = layout.select_rows(is_full, written, state)
        loss_sum = torch.where(is_compressed, loss, loss.new_zeros(())).sum()
        return state, torch.stack([loss_sum, is_compressed.sum().to(loss.dtype)])

    def _allocate_slots(self, fine: Float[Tensor, "B K D"]) -> tuple[Float[Tensor, "B K D"], Int[Tensor, " B"]]:
        """Slots of a compressed block, filled from the left, and their number in each row.

        Without min_surprise, every compressed state is a slot. With it (adaptive compression), a state starts a new
        slot where its surprise, 1 - cosine to the state before it, exceeds min_surprise by more than rounding error; a
        slot is the mean of its run of states.
        """
        few = self.slots_per_block
        if self.min_surprise is None:
            return fine, torch.full((len(fine),), few, dtype=torch.int32, device=fine.device)
        wide = torch.promote_types(fine.dtype, torch.float32)
        fixed = fine.detach().to(wide)
        squares = (fixed * fixed).sum(dim=-1)
        lengths = torch.rsqrt((squares[:, 1:] * squares[:, :-1]).clamp(min=torch.finfo(wide).tiny))
        surprise = 1.0 - (fixed[:, 1:] * fixed[:, :-1]).sum(dim=-1) * lengths
        limit = self.min_surprise + ROUNDING * torch.finfo(wide).eps
        place = torch.cumsum((surprise > limit).to(torch.int32), dim=1, dtype=torch.int32)
        place = torch.nn.functional.pad(place, (1, 0))
        is_in = (place[:, :, None] == torch.arange(few, device=fine.device)[None, None, :]).to(fine.dtype)
        share = is_in / is_in.sum(dim=1, keepdim=True).clamp(min=1.0)
        return torch.einsum("BKP,BKD->BPD", share, fine), place[:, -1] + 1

    def _compress(self, block: Float[Tensor, "B C D"], mass: Float[Tensor, "B C"]) -> Float[Tensor, "B K D"]:
        """Compress a block into K = C / ratio states, given their attention mass (Rae et al. 2019, section 3.1)."""
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

    def _reconstruction(
        self, block: Float[Tensor, "B C D"], oldest: Float[Tensor, "B C D"], mass: Float[Tensor, "B C"]
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """Attention-reconstruction loss of each row, and the cosine of the attention outputs that it compares.

        The block's queries attend to the oldest recent block and, separately, to the slots made from it. Queries,
        states and projections get no gradient, so that the loss trains only the compression.
        """
        block, oldest = block.detach(), oldest.detach()
        kernels = [proj.kernel.detach() for proj in (self.q_proj, self.k_proj, self.v_proj)]
        query, outputs = self._heads(block, kernels[0]), []
        slots, num_slots = self._allocate_slots(self._compress(oldest, mass))
        for entries, num_filled in ((oldest, self.block_size), (slots, num_slots[:, None])):
            key, value = (self._heads(entries.to(block.dtype), kernel) for kernel in kernels[1:])
            place = torch.arange(entries.shape[1], device=entries.device)[None, :]
            is_filled = (place < num_filled).expand(entries.shape[:2])
            outputs.append(attend(query, key, value, is_filled, page=self.slots_per_block)[0])
        target, output = outputs
        loss = torch.square(output - target).mean(dim=(1, 2, 3))
        fixed_target, fixed_output = target.detach(), output.detach()
        lengths = (fixed_target * fixed_target).sum(dim=-1) * (fixed_output * fixed_output).sum(dim=-1)
        cosine = (fixed_target * fixed_output).sum(dim=-1) * torch.rsqrt(
            lengths.clamp(min=torch.finfo(fixed_target.dtype).tiny)
        )
        return loss, cosine.mean(dim=(1, 2))


def build(config: BankConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32", device: str = "cpu") -> Bank:
    """Build the bank of a configuration from parameters by name, cast to dtype.

    Arguments, results and errors are the twin's.
    """
    with torch.device("meta"):
        model = Bank(config, dtype=dtype)
    return nn.load_params(model, params, device=device)
