"""A bank of recent and compressed states with a gated read, in Flax NNX. Twin: torch_ref/memory/bank.py.

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

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxbench import functional, nn
from jaxbench.memory import layout
from jaxbench.memory.bank_config import BankConfig


class BankState(NamedTuple):
    """What rows' banks hold; entries are filled from the left, oldest first."""

    recent: Float[Array, "B R D"]
    slots: Float[Array, "B M D"]
    num_recent: Int[Array, " B"]
    num_slots: Int[Array, " B"]
    use: Float[Array, "B S"]  # attention mass in the current block, summed over tokens, mean over heads
    mass: Float[Array, "B S"]  # decayed mean of it over blocks
    age: Int[Array, "B M"]  # blocks written since the slot was
    evicted: Int[Array, " B"]  # slots dropped so far
    cosine: Float[Array, " B"]  # of what the last compressed block answers to what it answered uncompressed
    pending: Float[Array, "B C D"]  # tokens of an unfinished block
    count: Int[Array, " B"]  # how many
    compressed: Int[Array, " B"]  # tokens compressed so far


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    is_filled: Bool[Array, "B S"],
    *,
    page: int,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """Return softmax attention to the filled entries, and its weights; zeros where none is filled.

    Sums run page after page of `page` entries (S is a multiple of it), so that unfilled pages behind the others change
    no bit of the result.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    query, key, value = (x.astype(wide) for x in (query, key, value))
    scores = jnp.einsum("BTNH,BSNH->BNTS", query, key) / math.sqrt(query.shape[-1])
    open_ = is_filled[:, None, None, :]
    scores = jnp.where(open_, scores, jnp.asarray(-jnp.inf, wide))
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


def appended(
    entries: Float[Array, "B S ..."],
    number: Int[Array, " B"],
    block: Float[Array, "B C ..."],
    added: Int[Array, " B"] | None = None,
) -> Array:
    """Return entries with a block behind the first `number` of them; where it does not fit, the oldest make room.

    added: how many of the block's first entries count; None = all of them.
    """
    capacity, size = entries.shape[1], block.shape[1] if added is None else added
    dropped = jnp.maximum(number + size - capacity, 0)
    place = jnp.arange(capacity)[None, :] + dropped[:, None]
    source = jnp.where(place < number[:, None], place, capacity + place - number[:, None])
    moved = layout.gathered(
        jnp.concatenate([entries, block], axis=1), jnp.minimum(source, capacity + block.shape[1] - 1)
    )
    is_filled = place < (number + size)[:, None]
    return jnp.where(is_filled.reshape(*place.shape, *(1,) * (moved.ndim - 2)), moved, jnp.zeros((), moved.dtype))


class Bank(nnx.Module):
    """Reads what earlier blocks left behind, and keeps the stream block by block."""

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
        own: Float[Array, "B T N H"] | None = None,
        is_token: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], BankState, Float[Array, ""]]:
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
        is_token = jnp.ones((batch_size, length), bool) if is_token is None else is_token
        order, number = jnp.argsort(~is_token, axis=1, stable=True), jnp.sum(is_token, axis=1)
        tokens = layout.gathered(x, order)
        if length == 1:
            answer, state, loss = self._step(tokens, state, number)
        else:
            size = self.block_size
            num_blocks = -(-length // size) if is_fresh else -(-(length + size - 1) // size)
            answer, state, loss = self._read_blocks(tokens, state, number, num_blocks)
        answer = layout.gathered(answer, jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0))
        gate = jax.nn.sigmoid(self.gate[...].astype(answer.dtype))[None, None]
        mixed = gate * answer if own is None else gate * answer + (1.0 - gate) * own.astype(answer.dtype)
        out = self.o_proj(mixed.astype(self.dtype).reshape(batch_size, length, -1))
        return jnp.where(is_token[:, :, None], out, jnp.zeros((), out.dtype)), state, loss

    def init_state(self, batch_size: int) -> BankState:
        """Return the state of rows that have read nothing."""
        wide = jnp.promote_types(self.dtype, jnp.float32)
        recent, slots = (jnp.zeros((batch_size, n, self.d_model), self.dtype) for n in self.capacities)
        none = jnp.zeros((batch_size,), jnp.int32)
        mass = jnp.zeros((batch_size, sum(self.capacities)), wide)
        age = jnp.zeros((batch_size, self.capacities[1]), jnp.int32)
        pending = jnp.zeros((batch_size, self.block_size, self.d_model), self.dtype)
        cosine = jnp.zeros(batch_size, wide)
        return BankState(recent, slots, none, none, mass, mass, age, none, cosine, pending, none, none)

    def reset(self, state: BankState, is_reset: Bool[Array, " B"]) -> BankState:
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

    def _step(self, x: Array, state: BankState, number: Array) -> tuple[Array, BankState, Array]:
        """Read one token of each row that has one (number = 1, else 0)."""
        is_token = number[:, None] > 0
        answer, state = self._answer(x, is_token, state)
        is_here = is_token & (jnp.arange(self.block_size)[None, :] == state.count[:, None])
        pending = jnp.where(is_here[:, :, None], x.astype(state.pending.dtype), state.pending)
        count = state.count + number.astype(jnp.int32)
        is_full = count == self.block_size
        state = state._replace(pending=pending)
        none = (state, jnp.zeros((2,), state.mass.dtype))
        state, loss = lax.cond(jnp.any(is_full), self._write, lambda *_: none, state, pending, is_full)
        pending = jnp.where(is_full[:, None, None], jnp.zeros((), pending.dtype), pending)
        state = state._replace(pending=pending, count=jnp.where(is_full, 0, count))
        return answer, state, loss[0] / jnp.maximum(loss[1], 1.0)

    def _read_blocks(
        self, x: Array, state: BankState, number: Array, num_blocks: int
    ) -> tuple[Array, BankState, Array]:
        """Read the first `number` tokens of each row, behind its pending ones."""
        size, length = self.block_size, x.shape[1]
        place = jnp.broadcast_to(jnp.arange(num_blocks * size)[None, :], (len(x), num_blocks * size))
        is_old, end = place < state.count[:, None], (state.count + number)[:, None]
        source = jnp.where(is_old, length + place, jnp.clip(place - state.count[:, None], 0, length - 1))
        content = layout.gathered(jnp.concatenate([x, state.pending.astype(x.dtype)], axis=1), source)
        content = jnp.where((place < end)[:, :, None], content, jnp.zeros((), x.dtype))
        blocks = tuple(layout.cut(each, size) for each in (content, place < end, (place < end) & ~is_old))

        def read(carry: tuple, block: tuple) -> tuple[tuple, Array]:
            (state, loss), (content, is_content, is_query) = carry, block
            answer, state = self._answer(content, is_query, state)
            state, more = self._write(state, content, jnp.all(is_content, axis=1))
            return (state, loss + more), answer

        start = (state, jnp.zeros((2,), state.mass.dtype))
        (state, loss), answers = layout.walk(read, start, blocks)
        answer = layout.gathered(layout.joined(answers), jnp.arange(length)[None, :] + start[0].count[:, None])
        last = end // size * size + jnp.arange(size)[None, :]
        pending = layout.gathered(content, jnp.minimum(last, num_blocks * size - 1))
        pending = jnp.where((last < end)[:, :, None], pending, jnp.zeros((), x.dtype)).astype(state.pending.dtype)
        count = (end[:, 0] % size).astype(jnp.int32)
        return answer, state._replace(pending=pending, count=count), loss[0] / jnp.maximum(loss[1], 1.0)

    def _heads(self, x: Array, kernel: Array) -> Array:
        return functional.matmul(x, kernel).reshape(*x.shape[:2], self.num_heads, self.head_dim)

    def _answer(self, x: Array, is_query: Array, state: BankState) -> tuple[Array, BankState]:
        """Return what the bank answers, zeros where no token asks, and the state with the attention noted."""
        entries = jnp.concatenate([state.recent, state.slots], axis=1).astype(x.dtype)
        numbers = (state.num_recent, state.num_slots)
        filled = [jnp.arange(n)[None, :] < number[:, None] for n, number in zip(self.capacities, numbers, strict=True)]
        query, key, value = (
            self._heads(each, proj.kernel[...])
            for each, proj in ((x, self.q_proj), (entries, self.k_proj), (entries, self.v_proj))
        )
        answer, weights = attend(query, key, value, jnp.concatenate(filled, axis=1), page=self.slots_per_block)
        weights = jnp.where(is_query[:, None, :, None], weights, jnp.zeros((), weights.dtype))
        use = lax.stop_gradient(jnp.sum(jnp.mean(weights, axis=1), axis=1))
        answer = jnp.where(is_query[:, :, None, None], answer, jnp.zeros((), answer.dtype))
        return answer, state._replace(use=state.use + use)

    def _write(self, state: BankState, block: Array, is_full: Array) -> tuple[BankState, Array]:
        """Return the state with a block written in the rows where it is full, and (sum, number) of the losses."""
        size, few = self.block_size, self.slots_per_block
        room, capacity = self.capacities
        mass = self.mass_decay * state.mass + (1.0 - self.mass_decay) * state.use / size
        is_old = state.num_recent == room
        oldest, used = state.recent[:, :size], mass[:, :size]
        new, added = self._allocated(self._compressed(oldest, used))
        loss, cosine = self._reconstruction(block, oldest, used)
        is_made = is_full & is_old

        def grown(entries: Array, block: Array) -> Array:
            return layout.chosen(is_made, appended(entries, state.num_slots, block, added), entries)

        recent_mass = appended(mass[:, :room], state.num_recent, jnp.zeros_like(used))
        slot_mass = grown(mass[:, room:], jnp.zeros((len(block), few), mass.dtype))
        written = state._replace(
            recent=appended(state.recent, state.num_recent, block.astype(state.recent.dtype)),
            slots=grown(state.slots, new.astype(state.slots.dtype)),
            num_recent=jnp.minimum(state.num_recent + size, room),
            num_slots=jnp.where(is_made, jnp.minimum(state.num_slots + added, capacity), state.num_slots),
            use=jnp.zeros_like(state.use),
            mass=jnp.concatenate([recent_mass, slot_mass], axis=1),
            age=grown(state.age + 1, jnp.zeros((len(block), few), state.age.dtype)),
            evicted=state.evicted + jnp.where(is_made, jnp.maximum(state.num_slots + added - capacity, 0), 0),
            cosine=jnp.where(is_made, cosine, state.cosine),
            compressed=state.compressed + jnp.where(is_made, size, 0),
        )
        state = layout.tree_map(functools.partial(layout.chosen, is_full), written, state)
        losses = jnp.sum(jnp.where(is_made, loss, jnp.zeros((), loss.dtype)))
        return state, jnp.stack([losses, jnp.sum(is_made).astype(loss.dtype)])

    def _allocated(self, fine: Float[Array, "B K D"]) -> tuple[Float[Array, "B K D"], Int[Array, " B"]]:
        """Return a block's slots, filled from the left, and their number.

        Without min_surprise these are all of `fine`. Else one begins a slot of its own where 1 - cosine between it and
        the one before it is over min_surprise, and a slot is the mean of its run: what follows from what came before
        costs nothing.
        """
        few = self.slots_per_block
        if self.min_surprise is None:
            return fine, jnp.full((len(fine),), few, jnp.int32)
        wide = jnp.promote_types(fine.dtype, jnp.float32)
        fixed = lax.stop_gradient(fine).astype(wide)
        squares = jnp.sum(fixed * fixed, axis=-1)
        lengths = lax.rsqrt(jnp.maximum(squares[:, 1:] * squares[:, :-1], jnp.finfo(wide).tiny))
        surprise = 1.0 - jnp.sum(fixed[:, 1:] * fixed[:, :-1], axis=-1) * lengths
        place = jnp.cumsum((surprise > self.min_surprise).astype(jnp.int32), axis=1)
        place = jnp.pad(place, ((0, 0), (1, 0)))
        is_in = (place[:, :, None] == jnp.arange(few)[None, None, :]).astype(fine.dtype)
        share = is_in / jnp.maximum(jnp.sum(is_in, axis=1, keepdims=True), 1.0)
        return jnp.einsum("BKP,BKD->BPD", share, fine), place[:, -1] + 1

    def _compressed(self, block: Float[Array, "B C D"], mass: Float[Array, "B C"]) -> Float[Array, "B K D"]:
        """Return what a block is compressed into, C / ratio states."""
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

    def _reconstruction(self, block: Array, oldest: Array, mass: Array) -> tuple[Array, Array]:
        """Return for each row how attention to the slots differs from attention to what they stand for: loss, cosine.

        Queries, states and projections are held fixed, so that the loss trains the compression and nothing else.
        """
        block, oldest = lax.stop_gradient((block, oldest))
        kernels = lax.stop_gradient([proj.kernel[...] for proj in (self.q_proj, self.k_proj, self.v_proj)])
        query, answers = self._heads(block, kernels[0]), []
        slots, number = self._allocated(self._compressed(oldest, mass))
        for entries, filled in ((oldest, self.block_size), (slots, number[:, None])):
            key, value = (self._heads(entries.astype(block.dtype), kernel) for kernel in kernels[1:])
            is_filled = jnp.broadcast_to(jnp.arange(entries.shape[1])[None, :] < filled, entries.shape[:2])
            answers.append(attend(query, key, value, is_filled, page=self.slots_per_block)[0])
        wanted, found = answers
        loss = jnp.mean(jnp.square(found - wanted), axis=(1, 2, 3))
        one, other = lax.stop_gradient((wanted, found))
        lengths = jnp.sum(one * one, axis=-1) * jnp.sum(other * other, axis=-1)
        cosine = jnp.sum(one * other, axis=-1) * lax.rsqrt(jnp.maximum(lengths, jnp.finfo(one.dtype).tiny))
        return loss, jnp.mean(cosine, axis=(1, 2))


# Training on a target, as the parity table does it


class Batch(NamedTuple):
    """One step's data."""

    x: Float[Array, "B T D"]
    target: Float[Array, "B T D"]
    is_token: Bool[Array, "B T"] | None  # None = no padding


def predict(model: Bank, batch: Batch, *, dropout: Any = None) -> tuple[Array, BankState, Array]:
    """Return the bank's answers to a batch, the state behind it and the compression's loss; there is no dropout."""
    return model(batch.x.astype(model.dtype), is_token=batch.is_token)


def loss_of(output: tuple[Array, BankState, Array], batch: Batch) -> Float[Array, ""]:
    """Return the mean squared error at tokens, plus the compression's loss, plus the mean square of the slots."""
    answer, state, loss = output
    wide = jnp.promote_types(answer.dtype, jnp.float32)
    squares = jnp.mean(jnp.square(answer.astype(wide) - batch.target.astype(wide)), axis=-1)
    is_token = jnp.ones(squares.shape, bool) if batch.is_token is None else batch.is_token
    error = jnp.sum(jnp.where(is_token, squares, jnp.zeros((), wide))) / jnp.sum(is_token).astype(wide)
    return error + loss.astype(wide) + jnp.mean(jnp.square(state.slots.astype(wide)))


def loss_fn(model: Bank, batch: Batch, *, dropout: Any = None) -> Float[Array, ""]:
    """Return the model's loss on a batch."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(config: BankConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32") -> Bank:
    """Return the bank of a configuration holding `params`, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    return nn.load_params(Bank(config, dtype=dtype), params)
