"""A bank of recent and compressed states with a gated read, in Flax NNX. Twin: torch_ref/memory/bank.py.

Every block of C tokens attends to the bank as it was before the block. Then the block is written: it joins the recent
blocks, and the oldest recent block is compressed into C / ratio slots, which evict the oldest slots. With min_surprise,
a compressed state that is close to the one before it shares its slot. Blocks count a row's own tokens, not padding; the
state carries an unfinished block. Sources: Rae et al. 2019, arXiv:1911.05507, sections 3 and 3.1 (recent and compressed
memory, compression functions, attention-reconstruction loss); Chen et al. 2024, arXiv:2410.03156 (sigmoid gate for each
head and channel). Differs from Rae et al.: within a call, gradients flow through what was written.
Axis letters: R recent states, M slots, S = R + M entries, C tokens of a block, K slots it becomes, P = K of a page.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped

from jaxbench import functional, nn
from jaxbench.memory import layout
from jaxbench.memory.bank_config import ROUNDING, BankConfig


class BankState(NamedTuple):
    """State of rows' banks; entries are filled from the left, oldest first."""

    recent: Float[Array, "B R D"]
    slots: Float[Array, "B M D"]
    num_recent: Int[Array, " B"]
    num_slots: Int[Array, " B"]
    use: Float[Array, "B S"]  # attention mass from the current block: sum over its tokens, mean over heads
    mass: Float[Array, "B S"]  # exponential moving average over blocks of use / C
    age: Int[Array, "B M"]  # blocks written since the slot was written
    evicted: Int[Array, " B"]  # slots dropped so far
    cosine: Float[Array, " B"]  # of attention outputs: last compressed block versus the same block uncompressed
    pending: Float[Array, "B C D"]  # tokens of an unfinished block
    count: Int[Array, " B"]  # number of pending tokens, 0 to C - 1
    compressed: Int[Array, " B"]  # tokens compressed so far

    @property
    def penalised(self) -> tuple[Float[Array, "..."], ...]:
        """Arrays whose mean squares are added to the loss of parity cases (target.py), so that gradients reach them."""
        return (self.slots,)


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    is_filled: Bool[Array, "B S"],
    *,
    page: int,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """Attend to the filled entries with softmax: outputs and attention weights, zeros where no entry is filled.

    Sums run over one page of `page` entries after another (S is a multiple of it), so that unfilled pages after the
    others leave the result bit-identical.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    query, key, value = (x.astype(wide) for x in (query, key, value))
    scores = jnp.einsum("BTNH,BSNH->BNTS", query, key) / math.sqrt(query.shape[-1])
    scores = jnp.where(is_filled[:, None, None, :], scores, jnp.asarray(-jnp.inf, wide))
    peak = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, jnp.zeros((), wide)))
    pages = weights.reshape(*weights.shape[:3], -1, page)
    values = value.reshape(len(value), -1, page, *value.shape[2:])

    def add(total: tuple[Array, Array], each: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        weights, values = each
        part = jnp.einsum("BNTP,BPNH->BTNH", weights, values)
        return (total[0] + part, total[1] + jnp.sum(weights, axis=-1)), None

    start = (jnp.zeros_like(query), jnp.zeros(weights.shape[:3], wide))
    (total, mass), _ = lax.scan(add, start, (jnp.moveaxis(pages, 3, 0), jnp.moveaxis(values, 1, 0)))
    mass = jnp.where(mass > 0, mass, jnp.ones((), wide))
    return total / jnp.swapaxes(mass, 1, 2)[..., None], weights / mass[..., None]


def append(
    entries: Shaped[Array, "B S ..."],
    num_filled: Int[Array, " B"],
    block: Shaped[Array, "B C ..."],
    num_added: Int[Array, " B"] | None = None,
) -> Shaped[Array, "B S ..."]:
    """Append a block to a first-in, first-out queue of S entries, which drops its oldest where the block does not fit.

    The queue is filled from the left; the block's first num_added entries are appended, None = all.
    """
    capacity = entries.shape[1]
    num_added = block.shape[1] if num_added is None else num_added
    dropped = jnp.maximum(num_filled + num_added - capacity, 0)
    place = jnp.arange(capacity)[None, :] + dropped[:, None]
    source = jnp.where(place < num_filled[:, None], place, capacity + place - num_filled[:, None])
    moved = layout.gathered(
        jnp.concatenate([entries, block], axis=1), jnp.minimum(source, capacity + block.shape[1] - 1)
    )
    is_filled = place < (num_filled + num_added)[:, None]
    return jnp.where(is_filled.reshape(*place.shape, *(1,) * (moved.ndim - 2)), moved, jnp.zeros((), moved.dtype))


class Bank(nnx.Module):
    """Compressive memory of earlier blocks with an attention read-out through a gate."""

    def __init__(self, config: BankConfig, *, dtype: str):
        c, width = config, config.num_heads * config.head_dim
        linear = functools.partial(nn.Linear, use_bias=False, dtype=dtype)
        self.q_proj, self.k_proj, self.v_proj = (linear(c.d_model, width) for _ in range(3))
        sizes = {"conv": (c.ratio * c.d_model, c.d_model), "learned": (c.d_model, c.slots_per_block)}
        self.compress = linear(*sizes[c.compression]) if c.compression in sizes else None
        self.gate = nnx.Param(jnp.zeros((c.num_heads, c.head_dim), dtype))
        self.o_proj = linear(width, c.d_model)
        self.num_heads, self.head_dim, self.d_model = c.num_heads, c.head_dim, c.d_model
        self.block_size, self.slots_per_block, self.compression = c.block_size, c.slots_per_block, c.compression
        self.capacities = (c.recent_blocks * c.block_size, c.memory_slots)
        self.mass_decay, self.min_surprise, self.dtype = c.mass_decay, c.min_surprise, dtype

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: BankState | None = None,
        *,
        attention_out: Float[Array, "B T N H"] | None = None,
        is_token: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], BankState, Float[Array, ""]]:
        """Read the bank at each token and write the tokens into it, block by block.

        Args:
          x: the residual stream, normalised.
          state: the state after earlier tokens; None = an empty bank, whose read-outs are zeros.
          attention_out: output per head of the tokens' own attention, None = zeros; the output projection gets
            gate * read-out + (1 - gate) * attention_out, with gate in (0, 1).
          is_token: False = padding, whose outputs are zeros and which writes nothing; None = no padding.

        Returns:
          The output at each token, the state after the last one, and the attention-reconstruction loss: the mean
          squared difference between attention to a compressed block and attention to the block itself. Its gradient
          reaches only the compression (Rae et al. 2019, algorithm 2).

        Raises:
          ValueError: x, attention_out or is_token has another shape, or the state is for another model or batch size.
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
            return x.astype(self.dtype), state, jnp.zeros((), state.mass.dtype)
        tokens, num_tokens = layout.left_align(x, is_token)
        if length == 1:
            read_out, state, loss = self._read_token(tokens, state, num_tokens)
        else:
            size = self.block_size
            num_blocks = -(-length // size) if is_fresh else -(-(length + size - 1) // size)
            read_out, state, loss = self._read_blocks(tokens, state, num_tokens, num_blocks)
        read_out = layout.restore_padding(read_out, is_token)
        gate = jax.nn.sigmoid(self.gate[...].astype(read_out.dtype))[None, None]
        mixed = gate * read_out
        if attention_out is not None:
            mixed = mixed + (1.0 - gate) * attention_out.astype(read_out.dtype)
        out = self.o_proj(mixed.astype(self.dtype).reshape(batch_size, length, -1))
        if is_token is not None:
            out = jnp.where(is_token[:, :, None], out, jnp.zeros((), out.dtype))
        return out, state, loss

    def init_state(self, batch_size: int) -> BankState:
        """State of empty banks."""
        wide = jnp.promote_types(self.dtype, jnp.float32)
        recent, slots = (jnp.zeros((batch_size, n, self.d_model), self.dtype) for n in self.capacities)
        zeros = jnp.zeros((batch_size,), jnp.int32)
        mass = jnp.zeros((batch_size, sum(self.capacities)), wide)
        age = jnp.zeros((batch_size, self.capacities[1]), jnp.int32)
        pending = jnp.zeros((batch_size, self.block_size, self.d_model), self.dtype)
        cosine = jnp.zeros(batch_size, wide)
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

    def reset(self, state: BankState, is_reset: Bool[Array, " B"]) -> BankState:
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
        self, x: Float[Array, "B 1 D"], state: BankState, num_tokens: Int[Array, " B"]
    ) -> tuple[Float[Array, "B 1 N H"], BankState, Float[Array, ""]]:
        """Read one token of each row that has one (num_tokens = 1, else 0), and write the blocks that it completes."""
        is_token = num_tokens[:, None] > 0
        read_out, state = self._read(x, is_token, state)
        is_new = is_token & (jnp.arange(self.block_size)[None, :] == state.count[:, None])
        pending = jnp.where(is_new[:, :, None], x.astype(state.pending.dtype), state.pending)
        count = state.count + num_tokens.astype(jnp.int32)
        is_full = count == self.block_size
        state = state._replace(pending=pending)
        unchanged = (state, jnp.zeros((2,), state.mass.dtype))
        state, losses = lax.cond(jnp.any(is_full), self._write, lambda *_: unchanged, state, pending, is_full)
        pending = jnp.where(is_full[:, None, None], jnp.zeros((), pending.dtype), pending)
        state = state._replace(pending=pending, count=jnp.where(is_full, 0, count))
        return read_out, state, losses[0] / jnp.maximum(losses[1], 1.0)

    def _read_blocks(
        self, x: Float[Array, "B T D"], state: BankState, num_tokens: Int[Array, " B"], num_blocks: int
    ) -> tuple[Float[Array, "B T N H"], BankState, Float[Array, ""]]:
        """Read the first num_tokens of each row, block by block, and write every block that is full.

        A row is laid out as its pending tokens, then the new ones, then zeros, and cut into blocks of C tokens. Each
        block reads the bank as it was before the block. The tokens of an unfinished last block are pending afterwards.
        """
        size, length, num_pending = self.block_size, x.shape[1], state.count
        end = (num_pending + num_tokens)[:, None]
        place = jnp.broadcast_to(jnp.arange(num_blocks * size)[None, :], (len(x), num_blocks * size))
        is_pending, is_filled = place < num_pending[:, None], place < end
        source = jnp.where(is_pending, length + place, jnp.clip(place - num_pending[:, None], 0, length - 1))
        tokens = layout.gathered(jnp.concatenate([x, state.pending.astype(x.dtype)], axis=1), source)
        tokens = jnp.where(is_filled[:, :, None], tokens, jnp.zeros((), x.dtype))
        blocks = tuple(layout.split_chunks(each, size) for each in (tokens, is_filled, is_filled & ~is_pending))

        def read_and_write(carry: tuple, block: tuple) -> tuple[tuple, Float[Array, "B C N H"]]:
            (state, losses), (tokens, is_filled, is_query) = carry, block
            read_out, state = self._read(tokens, is_query, state)
            state, new_losses = self._write(state, tokens, jnp.all(is_filled, axis=1))
            return (state, losses + new_losses), read_out

        start = (state, jnp.zeros((2,), state.mass.dtype))
        (state, losses), read_outs = layout.scan_chunks(read_and_write, start, blocks)
        new = jnp.arange(length)[None, :] + num_pending[:, None]  # where the call's tokens were laid out
        read_out = layout.gathered(layout.join_chunks(read_outs), new)
        last_block = end // size * size + jnp.arange(size)[None, :]
        pending = layout.gathered(tokens, jnp.minimum(last_block, num_blocks * size - 1))
        pending = jnp.where((last_block < end)[:, :, None], pending, jnp.zeros((), x.dtype))
        count = (end[:, 0] % size).astype(jnp.int32)
        state = state._replace(pending=pending.astype(state.pending.dtype), count=count)
        return read_out, state, losses[0] / jnp.maximum(losses[1], 1.0)

    def _heads(self, x: Float[Array, "B T D"], kernel: Float[Array, "D I"]) -> Float[Array, "B T N H"]:
        return functional.matmul(x, kernel).reshape(*x.shape[:2], self.num_heads, self.head_dim)

    def _read(
        self, x: Float[Array, "B T D"], is_query: Bool[Array, "B T"], state: BankState
    ) -> tuple[Float[Array, "B T N H"], BankState]:
        """Attend to the bank, zeros where a token is not a query; add the attention weights to the state's use."""
        entries = jnp.concatenate([state.recent, state.slots], axis=1).astype(x.dtype)
        parts = zip(self.capacities, (state.num_recent, state.num_slots), strict=True)
        is_filled = [jnp.arange(capacity)[None, :] < num_filled[:, None] for capacity, num_filled in parts]
        query = self._heads(x, self.q_proj.kernel[...])
        key, value = (self._heads(entries, proj.kernel[...]) for proj in (self.k_proj, self.v_proj))
        is_filled = jnp.concatenate(is_filled, axis=1)
        read_out, weights = attend(query, key, value, is_filled, page=self.slots_per_block)
        weights = jnp.where(is_query[:, None, :, None], weights, jnp.zeros((), weights.dtype))
        use = lax.stop_gradient(jnp.sum(jnp.mean(weights, axis=1), axis=1))
        read_out = jnp.where(is_query[:, :, None, None], read_out, jnp.zeros((), read_out.dtype))
        return read_out, state._replace(use=state.use + use)

    def _write(
        self, state: BankState, block: Float[Array, "B C D"], is_full: Bool[Array, " B"]
    ) -> tuple[BankState, Float[Array, " 2"]]:
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

        def pushed(queue: Shaped[Array, "B M ..."], new: Shaped[Array, "B K ..."]) -> Shaped[Array, "B M ..."]:
            return layout.select_rows(is_compressed, append(queue, state.num_slots, new, num_added), queue)

        # New entries start with no attention mass, new slots at age 0.
        recent_mass = append(mass[:, :num_recent], state.num_recent, jnp.zeros_like(oldest_mass))
        slot_mass = pushed(mass[:, num_recent:], jnp.zeros(slots.shape[:2], mass.dtype))
        written = state._replace(
            recent=append(state.recent, state.num_recent, block.astype(state.recent.dtype)),
            slots=pushed(state.slots, slots.astype(state.slots.dtype)),
            num_recent=jnp.minimum(state.num_recent + size, num_recent),
            num_slots=jnp.where(is_compressed, jnp.minimum(num_needed, num_slots), state.num_slots),
            use=jnp.zeros_like(state.use),
            mass=jnp.concatenate([recent_mass, slot_mass], axis=1),
            age=pushed(state.age + 1, jnp.zeros(slots.shape[:2], state.age.dtype)),
            evicted=state.evicted + jnp.where(is_compressed, jnp.maximum(num_needed - num_slots, 0), 0),
            cosine=jnp.where(is_compressed, cosine, state.cosine),
            compressed=state.compressed + jnp.where(is_compressed, size, 0),
        )
        state = layout.select_rows(is_full, written, state)
        loss_sum = jnp.sum(jnp.where(is_compressed, loss, jnp.zeros((), loss.dtype)))
        return state, jnp.stack([loss_sum, jnp.sum(is_compressed).astype(loss.dtype)])

    def _allocate_slots(self, fine: Float[Array, "B K D"]) -> tuple[Float[Array, "B K D"], Int[Array, " B"]]:
        """Slots of a compressed block, filled from the left, and their number in each row.

        Without min_surprise, every compressed state is a slot. With it (adaptive compression), a state starts a new
        slot where its surprise, 1 - cosine to the state before it, exceeds min_surprise by more than rounding error; a
        slot is the mean of its run of states.
        """
        few = self.slots_per_block
        if self.min_surprise is None:
            return fine, jnp.full((len(fine),), few, jnp.int32)
        wide = jnp.promote_types(fine.dtype, jnp.float32)
        fixed = lax.stop_gradient(fine).astype(wide)
        squares = jnp.sum(fixed * fixed, axis=-1)
        lengths = lax.rsqrt(jnp.maximum(squares[:, 1:] * squares[:, :-1], jnp.finfo(wide).tiny))
        surprise = 1.0 - jnp.sum(fixed[:, 1:] * fixed[:, :-1], axis=-1) * lengths
        limit = self.min_surprise + ROUNDING * jnp.finfo(wide).eps
        place = jnp.cumsum((surprise > limit).astype(jnp.int32), axis=1)
        place = jnp.pad(place, ((0, 0), (1, 0)))
        is_in = (place[:, :, None] == jnp.arange(few)[None, None, :]).astype(fine.dtype)
        share = is_in / jnp.maximum(jnp.sum(is_in, axis=1, keepdims=True), 1.0)
        return jnp.einsum("BKP,BKD->BPD", share, fine), place[:, -1] + 1

    def _compress(self, block: Float[Array, "B C D"], mass: Float[Array, "B C"]) -> Float[Array, "B K D"]:
        """Compress a block into K = C / ratio states, given their attention mass (Rae et al. 2019, section 3.1)."""
        few = self.slots_per_block
        if self.compression == "most_used":
            best = jnp.argsort(-lax.stop_gradient(mass), axis=1, stable=True)[:, :few]
            return layout.gathered(block, jnp.sort(best, axis=1))
        if self.compression == "learned":
            weights = jax.nn.softmax(functional.matmul(block, self.compress.kernel[...]), axis=1)
            return jnp.einsum("BCK,BCD->BKD", weights, block)
        groups = block.reshape(len(block), few, -1, self.d_model)
        if self.compression == "conv":
            return functional.matmul(groups.reshape(len(block), few, -1), self.compress.kernel[...])
        return jnp.mean(groups, axis=2) if self.compression == "mean" else jnp.max(groups, axis=2)

    def _reconstruction(
        self, block: Float[Array, "B C D"], oldest: Float[Array, "B C D"], mass: Float[Array, "B C"]
    ) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        """Attention-reconstruction loss of each row, and the cosine of the attention outputs that it compares.

        The block's queries attend to the oldest recent block and, separately, to the slots made from it. Queries,
        states and projections get no gradient, so that the loss trains only the compression.
        """
        block, oldest = lax.stop_gradient((block, oldest))
        kernels = lax.stop_gradient([proj.kernel[...] for proj in (self.q_proj, self.k_proj, self.v_proj)])
        query, outputs = self._heads(block, kernels[0]), []
        slots, num_slots = self._allocate_slots(self._compress(oldest, mass))
        for entries, num_filled in ((oldest, self.block_size), (slots, num_slots[:, None])):
            key, value = (self._heads(entries.astype(block.dtype), kernel) for kernel in kernels[1:])
            is_filled = jnp.broadcast_to(jnp.arange(entries.shape[1])[None, :] < num_filled, entries.shape[:2])
            outputs.append(attend(query, key, value, is_filled, page=self.slots_per_block)[0])
        target, output = outputs
        loss = jnp.mean(jnp.square(output - target), axis=(1, 2, 3))
        fixed_target, fixed_output = lax.stop_gradient((target, output))
        lengths = jnp.sum(fixed_target * fixed_target, axis=-1) * jnp.sum(fixed_output * fixed_output, axis=-1)
        cosine = jnp.sum(fixed_target * fixed_output, axis=-1) * lax.rsqrt(
            jnp.maximum(lengths, jnp.finfo(fixed_target.dtype).tiny)
        )
        return loss, jnp.mean(cosine, axis=(1, 2))


def build(config: BankConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32") -> Bank:
    """Build the bank of a configuration from parameters by name, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    return nn.load_params(Bank(config, dtype=dtype), params)
