"""Logits to tokens: filters, draws, and the generator with its compiled programs.

Twin: torch_ref/sample.py.

A generator compiles two programs for each bucket of sizes: prefill (prompt -> first token and cache) and decode (a loop
over tokens inside one program, which stops when every row has ended). Sampling is Gumbel-max over the Philox stream
(seed, step, "sample", row, vocabulary id), so that backends draw the same tokens and a row's draw does not depend on
the batch it is in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxbench import parameters, penalties, philox, prng, prompts
from jaxbench.prompts import LogitsProcessor, Programs, SamplingParams

NUM_CANDIDATES = 256  # top-p tries this many tokens before the whole vocabulary: a sort costs XLA:CPU 300x top_k

ARGMAX_BLOCK = 256  # values per block of the two-stage argmax in `_largest`

# Platforms where a single row's decode step reads kernels as (out, in): its products are then row sums that absorb the
# operations before them, 0.88 ms per token of SmolLM2-135M's shape on an H200 instead of 1.11 (docs/gpu.md).
TRANSPOSES_ON = ("gpu",)
TRANSPOSED = (".kernel", ".codes", ".scales", ".zeros")  # endings of (in, out) floats, and of integers with scales


class _Weights(NamedTuple):
    """Arrays that both programs read and neither changes."""

    leaves: list[Array]  # the model's
    shared: tuple  # the processors'


class DecodeState(NamedTuple):
    """Everything decoding carries from token to token."""

    cache: Any  # the model's KVCache
    tokens: Int[Array, "B W"]  # prompt and continuation of each row, from index 0
    lengths: Int[Array, " B"]  # tokens in each row
    finished: Bool[Array, " B"]
    step: Int[Array, ""]  # tokens generated
    slot: Int[Array, ""]  # the next free slot of the cache
    key: Array  # Philox key
    row_ids: Int[Array, " B"]
    processor_states: tuple


def filter_logits(logits: Float[Array, "B V"], sampling: SamplingParams) -> Float[Array, "B V"]:
    """Divide by the temperature and set tokens outside top-k, top-p (Holtzman et al. 2020) and min-p to -inf."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[1]:
        least = _most_probable(logits, sampling.top_k)[:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.top_p < 1.0:
        logits = jnp.where(logits >= _nucleus_threshold(logits, sampling.top_p), logits, -jnp.inf)
    if sampling.min_p > 0.0:
        least = jnp.max(logits, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


def _most_probable(logits: Float[Array, "B V"], count: int) -> Float[Array, "B M"]:
    """Largest `count` values of each row, in descending order.

    The barrier keeps XLA from moving a slice of the result into top_k, which XLA:CPU would then run as a sort of the
    whole vocabulary: 8 ms per row instead of 0.06 (docs/xla_cpu.md, rule 6).
    """
    return lax.optimization_barrier(lax.top_k(logits, count)[0])


def _nucleus_threshold(logits: Float[Array, "B V"], top_p: float) -> Float[Array, "B 1"]:
    """Least logit of the nucleus: the smallest set of most probable tokens, one at least, whose mass reaches top_p."""
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def sorted_threshold(count: int) -> tuple[Array, Array]:
        ordered = _most_probable(logits, count)
        probabilities = jnp.exp(ordered - log_total)
        mass_up_to = jnp.cumsum(probabilities, axis=-1)
        least = jnp.where(mass_up_to - probabilities < top_p, ordered, ordered[:, :1])
        return jnp.min(least, axis=-1, keepdims=True), mass_up_to[:, -1:]

    least, mass = sorted_threshold(min(NUM_CANDIDATES, logits.shape[1]))
    is_found = mass >= top_p
    if logits.shape[1] <= NUM_CANDIDATES:
        return least

    def of_all() -> Array:  # sums round otherwise there: a row is only found so if it has to be, whatever the others do
        is_float32 = logits.dtype == jnp.float32
        whole = _searched_threshold(logits, log_total, top_p) if is_float32 else sorted_threshold(logits.shape[1])[0]
        return jnp.where(is_found, least, whole)

    return lax.cond(jnp.all(is_found), lambda: least, of_all)


def _searched_threshold(
    logits: Float[Array, "B V"], log_total: Float[Array, "B 1"], top_p: float
) -> Float[Array, "B 1"]:
    """Find, bit by bit, the largest float32 such that the tokens at or above it have a mass of at least top_p.

    Takes 32 masked sums over the vocabulary: a thirtieth of the time of a sort on CPUs (docs/xla_cpu.md, rule 6).
    """
    sign = jnp.uint32(1 << 31)
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    keys = jnp.where(bits & sign, ~bits, bits | sign)  # unsigned integers in the order of the floats
    probabilities = jnp.exp(logits - log_total)

    def add_bit(i: Array, least: Array) -> Array:
        candidate = least | (sign >> i.astype(jnp.uint32))
        mass = jnp.sum(jnp.where(keys >= candidate, probabilities, 0.0), axis=-1, keepdims=True)
        return jnp.where(mass >= top_p, candidate, least)

    least = lax.fori_loop(0, 32, add_bit, jnp.zeros((logits.shape[0], 1), jnp.uint32))
    value = lax.bitcast_convert_type(jnp.where(least & sign, least ^ sign, ~least), jnp.float32)
    return jnp.where(least == 0, -jnp.inf, value)  # rounded sums may never reach a top_p close to 1


def draw(
    logits: Float[Array, "B V"],
    sampling: SamplingParams,
    *,
    key: Array,
    step: Int[Array, ""],
    row_ids: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Token of each row: the most probable one, or a Gumbel-max sample of the filtered distribution."""
    if sampling.temperature == 0.0:
        return _largest(logits)[1]
    return gumbel_max(filter_logits(logits, sampling), key=key, step=step, row_ids=row_ids)


def _largest(logits: Float[Array, "B V"]) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Largest value of each row and its lowest index: find the best block first, then the index within it.

    XLA:CPU's argmax over 49,152 values takes 222 us, its top_k 53, this 5 (docs/xla_cpu.md, rule 6).
    """
    rows, size = logits.shape
    short = -size % ARGMAX_BLOCK
    padded = jnp.pad(logits, ((0, 0), (0, short)), constant_values=-jnp.inf) if short else logits
    blocks = padded.reshape(rows, -1, ARGMAX_BLOCK)
    best = jnp.argmax(jnp.max(blocks, axis=2), axis=1)
    block = jnp.take_along_axis(blocks, best[:, None, None], axis=1)[:, 0]
    place = jnp.argmax(block, axis=1)
    value = jnp.take_along_axis(block, place[:, None], axis=1)[:, 0]
    return value, (best * ARGMAX_BLOCK + place).astype(jnp.int32)


def gumbel_max(
    logits: Float[Array, "B V"], *, key: Array, step: Int[Array, ""], row_ids: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Token of each row drawn from softmax(logits), as the largest sum of logit and Gumbel noise."""
    words = prng.lanes(key, step=step, site=philox.site_id("sample"), rows=row_ids, num_elements=logits.shape[1])
    return largest_sum(logits, [-jnp.log(prng.exponential(lane, dtype=str(logits.dtype))) for lane in words])


class OrdinaryDraw(NamedTuple):
    """The unwatermarked draw of a step: called with logits [B V], it returns one token per row."""

    key: Array  # Philox key
    step: Int[Array, ""]
    row_ids: Int[Array, " B"]

    def __call__(self, logits: Float[Array, "B V"]) -> Int[Array, " B"]:
        """Gumbel-max sample of each row."""
        return gumbel_max(logits, key=self.key, step=self.step, row_ids=self.row_ids)


def largest_sum(logits: Float[Array, "B V"], noise: Sequence[Float[Array, "B C"]]) -> Int[Array, " B"]:
    """Token of each row with the largest sum of logit and noise, the lowest id among equals.

    The noise comes in four lanes (prng.lanes): interleaved in one array, it would be computed four times.
    """
    size = logits.shape[1]
    short = 4 * noise[0].shape[1] - size
    blocks = jnp.pad(logits, ((0, 0), (0, short)), constant_values=-jnp.inf).reshape(logits.shape[0], -1, 4)
    best = [_largest(blocks[:, :, j] + lane) for j, lane in enumerate(noise)]
    sums = jnp.stack([value for value, _ in best], axis=1)
    tokens = jnp.stack([4 * place + j for j, (_, place) in enumerate(best)], axis=1)
    is_best = sums == jnp.max(sums, axis=1, keepdims=True)
    return jnp.min(jnp.where(is_best, tokens, size - 1), axis=1)


class Generator(prompts.GeneratorBase):
    """Generates from one model; programs are compiled once for each bucket and kept."""

    def __init__(
        self,
        model: Any,
        *,
        eos_id: int | Sequence[int] | None,
        sampling: SamplingParams,
        processors: Sequence[LogitsProcessor] = (),
    ):
        super().__init__(model, jax.default_backend(), eos_id=eos_id, sampling=sampling, processors=processors)
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(model)  # Flax and Equinox models are pytrees
        self._weights = _Weights([leaf for _, leaf in leaves], self._shared)
        self._is_transposable = [
            getattr(leaf, "ndim", 0) == 2 and parameters.dotted(path).endswith(TRANSPOSED) for path, leaf in leaves
        ]
        self._transposed_leaves: list[Array] | None = None
        self._has_room: bool | None = None  # for transposed kernels; checked once
        self._width: int | None = None  # of vectors, known from the first program that reads any

    def compile(
        self, batch_size: int, prompt_length: int, max_new_tokens: int, *, processor_states: Sequence | None = None,
        vectors: Float[np.ndarray, "M D"] | None = None,
    ) -> Programs:  # fmt: skip
        """Return the programs of these sizes' bucket, compiling those that are missing.

        A single new token needs no decoding: `decode` is then not compiled. Of states and vectors only shapes matter.
        """
        table = prompts.pad_vectors(vectors)
        bucket = prompts.bucket(batch_size, prompt_length, max_new_tokens)._replace(num_vectors=_length(table))
        states = self._padded_states(processor_states, batch_size, bucket.batch_size)
        return self._compile(bucket, states, table, decodes=max_new_tokens > 1)

    def _compile(
        self, bucket: prompts.Bucket, states: tuple, table: Float[np.ndarray, "M D"] | None, *, decodes: bool
    ) -> Programs:
        known, width = self.programs.get(bucket, Programs(None, None)), None if table is None else table.shape[1]
        if None not in (width, self._width) and width != self._width:
            raise ValueError(f"vectors: {width} wide, wanted the model's {self._width}")
        if known.prefill is not None and (known.decode is not None or not decodes):
            return known
        arguments, run = self._shapes(bucket, states, table), functools.partial(self._prefill, bucket.num_slots)
        place = self._place(lambda: jax.eval_shape(run, *arguments))
        prefill = jax.jit(run, out_shardings=place)
        decode = known.decode or self._decode_of(bucket.batch_size, bucket.num_slots)
        if decode is None and decodes:
            state, limit = jax.eval_shape(prefill, *arguments), jax.ShapeDtypeStruct((), jnp.int32)
            weights, is_transposed = self._decode_weights(bucket.batch_size), self._reads_transposed(bucket.batch_size)
            decode_fn = functools.partial(self._decode, is_transposed=is_transposed)
            program = jax.jit(decode_fn, donate_argnums=1, out_shardings=place)
            decode = program.lower(weights, state, limit).compile()
        self.programs[bucket] = Programs(known.prefill or prefill.lower(*arguments).compile(), decode)
        self._width = self._width or width
        return self.programs[bucket]

    def _place(self, shapes: Callable[[], DecodeState]) -> Any:
        """Shardings for a state's tree of shapes; None = the compiler's choice, as on one device."""
        return None

    def _reads_transposed(self, batch_size: int) -> bool:
        """True if a decode program reads transposed kernels: for a single row, if the device had memory for them."""
        if batch_size > 1 or jax.default_backend() not in TRANSPOSES_ON:
            return False
        if self._has_room is None:
            stats = jax.devices()[0].memory_stats() or {"bytes_limit": math.inf, "bytes_in_use": 0}
            size = sum(leaf.nbytes for leaf, swaps in zip(self._weights.leaves, self._is_transposable) if swaps)
            self._has_room = 2 * size < stats["bytes_limit"] - stats["bytes_in_use"]
        return self._has_room

    def _transpose(self, leaves: Sequence[Array]) -> list[Array]:
        """Swap the axes of the kernels."""
        return [jnp.swapaxes(leaf, 0, 1) if swaps else leaf for leaf, swaps in zip(leaves, self._is_transposable)]

    def _decode_weights(self, batch_size: int) -> _Weights:
        """Arrays that a decode program reads; for one row on a GPU, a second copy with kernels (out, in), made once."""
        if not self._reads_transposed(batch_size):
            return self._weights
        if self._transposed_leaves is None:
            self._transposed_leaves = jax.jit(self._transpose)(self._weights.leaves)
        return self._weights._replace(leaves=self._transposed_leaves)

    def _padded_states(self, processor_states: Sequence | None, num_rows: int, batch_size: int) -> tuple:
        """Copy the processors' states, padded with rows of zeros; None = the states that their `init` returns."""
        if processor_states is None:
            return jax.tree.map(np.array, tuple(processor.init(batch_size) for processor in self._processors))
        prompts.check_states(processor_states, self._processors)
        return jax.tree.map(lambda x: prompts.fill_rows(np.asarray(x), num_rows, batch_size), tuple(processor_states))

    def _shapes(self, bucket: prompts.Bucket, states: tuple, table: Float[np.ndarray, "M D"] | None) -> tuple:
        """Arguments of a bucket's prefill, with shapes instead of arrays for all but the weights."""
        tokens = jax.ShapeDtypeStruct((bucket.batch_size, bucket.prompt_length), jnp.int32)
        row = jax.ShapeDtypeStruct((bucket.batch_size,), jnp.int32)
        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        vectors = None if table is None else jax.ShapeDtypeStruct(table.shape, table.dtype)
        return self._weights, tokens, row, jax.ShapeDtypeStruct(row.shape, bool), key, row, states, vectors

    def prefill(
        self, prompt_tokens: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int,
        row_ids: Sequence[int] | None = None, processor_states: Sequence | None = None,
        vectors: Float[np.ndarray, "M D"] | None = None,
    ) -> DecodeState:  # fmt: skip
        """Run the prompts and draw the first token of each row; max_new_tokens decides the size of the cache."""
        table = prompts.pad_vectors(vectors)
        batch = self._pad(prompt_tokens, max_new_tokens, row_ids, 0 if vectors is None else len(vectors))
        states = self._padded_states(processor_states, len(prompt_tokens), len(batch.tokens))
        bucket = prompts.bucket(*batch.tokens.shape, max_new_tokens)._replace(num_vectors=_length(table))
        programs = self._compile(bucket, states, table, decodes=max_new_tokens > 1)
        arrays = (batch.tokens, batch.lengths, batch.is_padding, prng.key_from_seed(seed), batch.row_ids)
        return programs.prefill(self._weights, *arrays, states, table)

    def decode(self, state: DecodeState, max_new_tokens: int) -> DecodeState:
        """Draw tokens until each row has max_new_tokens or has ended; the state passed in must not be used again.

        Raises:
          ValueError: the state was prefilled for fewer new tokens.
        """
        if max_new_tokens <= 1:
            return state
        weights = self._decode_weights(len(state.tokens))
        return self._decode_program(state, max_new_tokens)(weights, state, jnp.int32(max_new_tokens))

    _to_host = staticmethod(np.asarray)

    def _prefill(self, num_slots, weights, tokens, lengths, finished, key, row_ids, states, vectors) -> DecodeState:
        model = jax.tree.unflatten(self._structure, weights.leaves)
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        positions = jnp.where(index < lengths[:, None], index, -1)
        # Padding follows a row's tokens, so a causal kernel hides it from them; the cache marks its slots as empty.
        given = None if getattr(model, "is_fused", False) else positions
        hidden, cache = model.features(tokens, given, **({} if vectors is None else {"vectors": vectors}))
        cache = cache._replace(positions=positions) if given is None else cache
        last = hidden[jnp.arange(tokens.shape[0]), lengths - 1]
        tokens = jnp.pad(tokens, ((0, 0), (0, num_slots - tokens.shape[1])))
        step, slot = jnp.int32(0), jnp.max(lengths)
        cache = cache.padded(num_slots, dtype=self._cache_dtype)
        state = DecodeState(cache, tokens, lengths, finished, step, slot, key, row_ids, states)
        return self._append(state, model.logits(last[:, None])[:, 0], weights.shared)

    def _decode(self, weights, state: DecodeState, limit, *, is_transposed: bool = False) -> DecodeState:
        rows = jnp.arange(state.tokens.shape[0])

        def step(state: DecodeState) -> DecodeState:  # transposed inside the loop: outside, XLA would copy them
            leaves = self._transpose(weights.leaves) if is_transposed else weights.leaves
            model = jax.tree.unflatten(self._structure, leaves)
            last = (state.lengths - 1)[:, None]
            tokens = state.tokens[rows[:, None], last]
            hidden, cache = model.features(tokens, last, cache=state.cache, slot=state.slot)
            state = state._replace(cache=cache, slot=state.slot + 1)
            return self._append(state, model.logits(hidden)[:, 0], weights.shared)

        return lax.while_loop(lambda s: (s.step < limit) & ~jnp.all(s.finished), step, state)

    def _append(self, state: DecodeState, logits: Float[Array, "B V"], shared: tuple) -> DecodeState:
        """Turn logits into the next token of every unfinished row."""
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        logits = penalties.penalize(logits, state.tokens, state.lengths, step=state.step, sampling=self._sampling)
        context = (state.tokens, state.lengths, state.step)
        states = list(state.processor_states)
        for i, processor in enumerate(self._processors):
            states[i], logits = processor.apply(self._seen(i, states, shared), logits, *context)
        where = {"key": state.key, "step": state.step, "row_ids": state.row_ids}
        if not self._drawing:
            token = (self._own_draw or draw)(logits, self._sampling, **where)
        else:
            logits, sample = filter_logits(logits, self._sampling), OrdinaryDraw(**where)
            token = jnp.full(logits.shape[:1], -1, jnp.int32)
            for i in self._drawing:
                given = (self._seen(i, states, shared), logits, *context, sample)
                states[i], drawn = self._processors[i].draw(*given)
                token = jnp.where(token < 0, drawn, token)
            token = _fill(token, state.finished, lambda: sample(logits))
        is_end = jnp.zeros_like(state.finished)
        for eos_id in self._eos_ids:
            is_end = is_end | (token == eos_id)
        return state._replace(
            tokens=state.tokens.at[jnp.arange(token.shape[0]), state.lengths].set(token.astype(jnp.int32)),
            lengths=state.lengths + ~state.finished,
            finished=state.finished | is_end,
            step=state.step + 1,
            processor_states=tuple(states),
        )


def _length(table: Float[np.ndarray, "M D"] | None) -> int:
    return 0 if table is None else len(table)


def _fill(token: Int[Array, " B"], finished: Bool[Array, " B"], sample: Callable[[], Array]) -> Int[Array, " B"]:
    """Draw for the unfinished rows that no processor drew; without such rows nothing is computed."""
    is_missing = (token < 0) & ~finished
    token = jnp.maximum(token, 0)

    def filled() -> Array:
        return jnp.where(is_missing, sample().astype(jnp.int32), token)

    return lax.cond(jnp.any(is_missing), filled, lambda: token)
