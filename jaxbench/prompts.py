"""Prompts as padded arrays, the buckets of sizes that programs are compiled for, and what generators share (S file)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, Shaped

# Sizes that programs are compiled for (docs/xla_cpu.md, "Buckets"): prompts of at least 16 tokens, up to 64 in steps of
# 8, up to 256 in steps of 16; longer ones and cache slots in steps of 64; up to 8 rows exactly, more in steps of 4.
MIN_PROMPT, PROMPT_STEPS, LONG_STEP = 16, ((64, 8), (256, 16)), 64
EXACT_ROWS, ROW_STEP = 8, 4
# Float32 resolves logits to about a millionth of their size: below this a draw is the most probable token anyway, and
# far below, logits / temperature overflows and the token is meaningless.
MIN_TEMPERATURE = 1e-6
# Far outside this range a float32 logit that is divided or multiplied overflows too.
PENALTIES = 1e-6, 1e6
MOST_SUBTRACTED = 2.0  # a frequency or presence penalty's largest size, as in OpenAI's interface
MOST_BIAS = 100.0  # the same of a token's bias
MAX_PARTS, MIN_PART = 4, 128  # parts of ordered queries: more save little more and compile longer (docs/xla_cpu.md)


class SamplingParams(NamedTuple):
    """How a token is chosen; a temperature of 0 takes the most probable one."""

    temperature: float = 0.0  # >= 0
    # Tokens that tie with the least probable one a filter keeps are kept too, so that ties need no order. Differs from
    # transformers, whose top_p keeps only as many of them as it needs.
    top_k: int = 0  # keep this many most probable tokens; 0 = all
    top_p: float = 1.0  # keep the most probable tokens up to this mass, 0 < top_p <= 1
    min_p: float = 0.0  # drop tokens below this share of the most probable one, 0 <= min_p < 1
    repetition_penalty: float = 1.0  # in PENALTIES; 1 = none
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time that the answer has it, -2 to 2
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the answer has, -2 to 2
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit after the penalties, -100 to 100)


class Bucket(NamedTuple):
    """Padded sizes that one pair of compiled programs serves."""

    batch_size: int  # rows
    prompt_length: int  # tokens
    num_slots: int  # cache slots of each row
    num_vectors: int = 0  # in the table for tokens past the vocabulary


class Batch(NamedTuple):
    """Prompts padded on the right to the bucket's length, and with rows to its batch size."""

    tokens: Int32[np.ndarray, "B T"]
    lengths: Int32[np.ndarray, " B"]  # tokens
    is_padding: Bool[np.ndarray, " B"]  # rows that only fill the bucket
    row_ids: Int32[np.ndarray, " B"]  # of the random streams


@runtime_checkable
class LogitsProcessor(Protocol):
    """A pure change of logits during generation. Its state is a pytree of arrays whose first axis is the rows.

    `apply` sees the model's logits, before temperature and filters. A processor with a method `draw` also chooses
    tokens, unless its attribute `draws` is False: draw(state, logits [B V], tokens [B W], length [B], step, sample)
    returns the next state and tokens [B], -1 for a row it leaves to others. It sees logits after temperature and
    filters; `sample` is the step's OrdinaryDraw. Rows that no processor draws are drawn by it.

    An optional attribute `shared` of a processor is a pytree of arrays that every row reads, such as a table; `apply`
    and `draw` then get the pair (shared, state) instead of the state, and return the state alone.
    """

    def init(self, batch_size: int) -> Any:
        """State before the first token, a pytree of arrays."""

    def apply(self, state: Any, logits: Any, tokens: Any, length: Any, step: Any) -> tuple[Any, Any]:
        """Next state, and the changed logits; row b's context is tokens[b, :length[b]]."""


class Generation(NamedTuple):
    """Generated tokens [B M], -1 after a row's end, and how many each row has (its end-of-sequence token included)."""

    tokens: np.ndarray
    lengths: np.ndarray


class Programs(NamedTuple):
    """The two compiled programs of a bucket; None = not compiled."""

    prefill: Callable | None
    decode: Callable | None


def bucket(batch_size: int, prompt_length: int, max_new_tokens: int) -> Bucket:
    """Bucket of a batch: each size rounded up to one that programs are compiled for."""
    batch_size = batch_size if batch_size <= EXACT_ROWS else _round_up(batch_size, ROW_STEP)
    step = next((step for most, step in PROMPT_STEPS if prompt_length <= most), LONG_STEP)
    prompt_length = max(_round_up(prompt_length, step), MIN_PROMPT)
    return Bucket(batch_size, prompt_length, _round_up(prompt_length + max_new_tokens, LONG_STEP))


def exact(batch_size: int, prompt_length: int, max_new_tokens: int) -> Bucket:
    """Sizes of a batch, not rounded, for code that compiles nothing."""
    return Bucket(batch_size, prompt_length, prompt_length + max_new_tokens)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def query_parts(length: int) -> list[tuple[int, int]]:
    """(start, end) of the parts in which ordered queries attend: keys after a part's end are left out."""
    size = max(MIN_PART, -(-length // MAX_PARTS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def pad(
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_seq_len: int,
    vocab_size: int,
    row_ids: Sequence[int] | None,
    num_vectors: int = 0,
    sizes: Callable[[int, int, int], Bucket] = bucket,
) -> Batch:
    """Pad prompts to the sizes that `sizes` gives for the rows, the longest prompt and the new tokens.

    num_vectors: number of token ids past the vocabulary that stand for vectors.

    Raises:
      ValueError: there is no prompt; one is empty, has a token that is not a whole number or outside the vocabulary, or
        is too long for the context; max_new_tokens is not a whole number from 1; or row_ids are not one per prompt in
        [0, 2**31).
    """
    if len(prompts) == 0:
        raise ValueError(f"prompts: wanted at least one, got {list(prompts)}")
    if not is_number(max_new_tokens, whole=True) or max_new_tokens < 1:
        raise ValueError(f"prompts: max_new_tokens={max_new_tokens}, wanted a whole number, at least 1")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts: prompt {row} is empty, wanted at least one token")
        if (ids := np.asarray(prompt)).dtype.kind not in "iu" or ids.ndim != 1:
            raise ValueError(
                f"prompts: prompt {row} is {ids.dtype} of shape {ids.shape}, wanted a row of whole numbers"
            )
        if len(prompt) + max_new_tokens > max_seq_len:
            raise ValueError(
                f"prompts: prompt {row} has {len(prompt)} tokens and max_new_tokens={max_new_tokens}, "
                f"together more than the model's context of {max_seq_len}"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size + num_vectors:
            raise ValueError(
                f"prompts: prompt {row} has a token outside [0, {vocab_size + num_vectors}): {min(prompt)}, "
                f"{max(prompt)}"
            )
    if row_ids is not None and len(row_ids) != len(prompts):
        raise ValueError(f"prompts: {len(row_ids)} row_ids for {len(prompts)} prompts")
    for row, row_id in enumerate(() if row_ids is None else row_ids):
        if not (is_number(row_id, whole=True) and 0 <= row_id < 2**31):
            raise ValueError(f"prompts: row_ids[{row}]={row_id}, wanted one in [0, 2**31)")
    size = sizes(len(prompts), max(map(len, prompts)), max_new_tokens)
    tokens = np.zeros((size.batch_size, size.prompt_length), np.int32)
    lengths = np.ones(size.batch_size, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    ids = np.arange(size.batch_size, dtype=np.int32)
    ids[: len(prompts)] = ids[: len(prompts)] if row_ids is None else row_ids
    return Batch(tokens, lengths, np.arange(size.batch_size) >= len(prompts), ids)


def continuations(
    prompts: Sequence[Sequence[int]], tokens: Int32[np.ndarray, "B T"], lengths: Int32[np.ndarray, " B"]
) -> tuple[Int32[np.ndarray, "B new"], Int32[np.ndarray, " B"]]:
    """Tokens generated after each prompt, -1 after a row's end, and their counts; the arguments include the prompts."""
    counts = np.array([lengths[row] - len(prompt) for row, prompt in enumerate(prompts)])
    out = np.full((len(prompts), counts.max()), -1, np.int32)
    for row, prompt in enumerate(prompts):
        out[row, : counts[row]] = tokens[row, len(prompt) : lengths[row]]
    return out, counts


def pad_vectors(vectors: Float[np.ndarray, "M D"] | None) -> Float32[np.ndarray, "L D"] | None:
    """Pad the vectors for tokens past the vocabulary with zeros to a number that programs are compiled for.

    Raises:
      ValueError: they are not a finite matrix with at least one row.
    """
    if vectors is None:
        return None
    table = np.asarray(vectors, np.float32)
    if table.ndim != 2 or not len(table) or not np.isfinite(table).all():
        raise ValueError(f"prompts: vectors of shape {table.shape}, wanted finite ones [M D], M at least 1")
    return np.pad(table, ((0, -len(table) % LONG_STEP), (0, 0)))


def is_number(value: Any, *, whole: bool) -> bool:
    """True for a Python number or a scalar of an array library; booleans and strings do not count."""
    if isinstance(value, bool | str):
        return False
    try:
        (operator.index if whole else float)(value)
    except (TypeError, ValueError, OverflowError):  # an integer may be larger than every float
        return False
    return True


def check_sampling(sampling: SamplingParams) -> None:
    """Check the ranges of sampling parameters.

    Raises:
      ValueError: a field is not a number (top_k: a whole one; logit_bias: pairs) or is out of range; its value and
        range are named.
    """
    for field in SamplingParams._fields[:-1]:
        value, is_whole = getattr(sampling, field), field == "top_k"
        if not is_number(value, whole=is_whole):
            raise ValueError(f"sampling: {field}={value!r}, wanted a {'whole ' if is_whole else ''}number")
    ranges = {
        "temperature": (
            sampling.temperature == 0 or sampling.temperature >= MIN_TEMPERATURE,
            f"0 for the most probable token, or at least {MIN_TEMPERATURE}",
        ),
        "top_k": (sampling.top_k >= 0, "at least 0 (0 = all tokens)"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]"),
        "min_p": (0 <= sampling.min_p < 1, "in [0, 1)"),
        "repetition_penalty": (
            PENALTIES[0] <= sampling.repetition_penalty <= PENALTIES[1],
            f"from {PENALTIES[0]} to {PENALTIES[1]:.0f}",
        ),
        **{
            name: (abs(getattr(sampling, name)) <= MOST_SUBTRACTED, "from -2 to 2")
            for name in ("frequency_penalty", "presence_penalty")
        },
    }
    for field, (is_fine, wanted) in ranges.items():
        if not (is_fine and math.isfinite(getattr(sampling, field))):
            raise ValueError(f"sampling: {field}={getattr(sampling, field)}, wanted {wanted}")
    _check_biases(sampling.logit_bias)


def _check_biases(given: Any) -> None:
    is_pairs = isinstance(given, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in given)
    if not is_pairs:
        raise ValueError(f"sampling: logit_bias={given!r}, wanted a tuple of pairs, each of a token id and a number")
    ids = [token for token, _ in given]
    for token, value in given:
        is_token = is_number(token, whole=True) and token >= 0 and ids.count(token) == 1
        if not (is_token and is_number(value, whole=False) and abs(value) <= MOST_BIAS):
            raise ValueError(
                f"sampling: logit_bias of token {token!r} is {value!r}, wanted each id, a whole number from 0, once, "
                f"and a number from -{MOST_BIAS:.0f} to {MOST_BIAS:.0f}"
            )


def check_states(states: Sequence, processors: Sequence) -> None:
    """Check that there is one state per processor.

    Raises:
      ValueError: there are more or fewer.
    """
    if len(states) != len(processors):
        raise ValueError(f"processor_states: {len(states)} states for {len(processors)} processors")


def fill_rows(array: Shaped[np.ndarray, "rows ..."], num_rows: int, batch_size: int) -> Shaped[np.ndarray, "B ..."]:
    """Copy an array of a processor's state, of num_rows or batch_size rows, and pad it with zeros to batch_size.

    Raises:
      ValueError: its first axis is neither.
    """
    if array.ndim == 0 or array.shape[0] not in (num_rows, batch_size):
        raise ValueError(f"processor_states: an array has shape {array.shape}, wanted {num_rows} rows, one a prompt")
    filled = np.zeros((batch_size, *array.shape[1:]), array.dtype)
    filled[: array.shape[0]] = array
    return filled


class GeneratorBase:
    """What the generators of all backends share: settings, programs by bucket, and the path from prompts to tokens.

    eos_id: a row ends with this token, or with any of these; None = no end token.

    A backend adds `prefill` (its first program, which draws one token), `decode` (the second) and `_to_host`.
    """

    _sizes = staticmethod(bucket)  # of a batch; a backend without compiled programs takes `exact`

    def __init__(
        self,
        model: Any,
        platform: str,
        *,
        eos_id: int | Sequence[int] | None,
        sampling: SamplingParams,
        processors: Sequence,
    ):
        check_sampling(sampling)
        if not getattr(model, "is_causal", True):
            raise ValueError(f"generate: the model has is_causal={model.is_causal}; wanted a causal one")
        self._own_draw = getattr(model, "draw", None)  # native decoders have one
        # XLA:CPU widens a bfloat16 cache, updates it, and narrows all of it at every step (docs/xla_cpu.md, rule 4).
        # Float32 is faster for PyTorch on a CPU too: a layer of SmolLM2 writes and attends to 96 slots in 18 us instead
        # of 22, to 640 in 62 instead of 75 (batch 8: 80 vs 110, 416 vs 564; one core of an AMD EPYC).
        is_narrow_on_cpu = platform == "cpu" and model.dtype in ("bfloat16", "float16")
        self._cache_dtype = getattr(model, "cache_dtype", "float32" if is_narrow_on_cpu else model.dtype)
        self._max_seq_len, self._vocab_size = model.max_seq_len, model.vocab_size
        past = [token for token, _ in sampling.logit_bias if token >= self._vocab_size]
        if past:
            raise ValueError(f"sampling: logit_bias of token {past[0]}, wanted ids below {self._vocab_size}")
        self._eos_ids = () if eos_id is None else tuple(np.ravel(eos_id).tolist())
        odd = [each for each in self._eos_ids if not is_number(each, whole=True) or each < 0]
        if odd:  # no token equals it, so that no row would ever end
            raise ValueError(f"generate: eos_id has {odd[0]!r}, wanted ids of tokens: whole numbers from 0, or None")
        self._sampling, self._processors = sampling, tuple(processors)
        self._drawing = [i for i, p in enumerate(self._processors) if getattr(p, "draws", hasattr(p, "draw"))]
        if self._drawing and sampling.temperature == 0:
            names = ", ".join(type(self._processors[i]).__name__ for i in self._drawing)
            raise ValueError(
                f"sampling: temperature={sampling.temperature} with a processor that draws ({names}): greedy decoding "
                "leaves nothing to draw, so the text carries no mark; wanted a temperature above 0"
            )
        self._shared = tuple(getattr(processor, "shared", None) for processor in self._processors)
        self.programs: dict[Bucket, Programs] = {}

    def __call__(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        seed: int,
        row_ids: Sequence[int] | None = None,
        processor_states: Sequence | None = None,
        vectors: Float[np.ndarray, "M D"] | None = None,
    ) -> Generation:
        """Continue each prompt (token ids) by at most max_new_tokens.

        Token id vocab_size + m, past the vocabulary, stands for vectors[m] (see Transformer.features). Rows draw
        from the streams of their row_ids (0, 1, ... by default). Each processor starts from its state in
        processor_states, whose rows are the prompts; unset, from what its `init` returns.

        Raises:
          ValueError: a prompt is empty, has an unknown token, or does not fit the model's context; states or vectors do
            not fit; or row_ids are not one per prompt in [0, 2**31).
        """
        options = {"max_new_tokens": max_new_tokens, "row_ids": row_ids, "processor_states": processor_states}
        state = self.prefill(prompt_tokens, seed=seed, vectors=vectors, **options)
        state = self.decode(state, max_new_tokens)
        arrays = (self._to_host(state.tokens), self._to_host(state.lengths))
        return Generation(*continuations(prompt_tokens, *arrays))

    def _pad(
        self, prompt_tokens: Sequence[Sequence[int]], max_new_tokens: int, row_ids: Sequence[int] | None,
        num_vectors: int,
    ) -> Batch:  # fmt: skip
        limits = {"max_seq_len": self._max_seq_len, "vocab_size": self._vocab_size, "num_vectors": num_vectors}
        return pad(prompt_tokens, max_new_tokens=max_new_tokens, row_ids=row_ids, sizes=self._sizes, **limits)

    @staticmethod
    def _seen(i: int, states: Sequence, shared: Sequence) -> Any:
        """State argument of processor i: its state, or (shared, state) if it has shared arrays."""
        return states[i] if shared[i] is None else (shared[i], states[i])

    def _decode_of(self, batch_size: int, num_slots: int) -> Callable | None:
        """Decode program of these sizes, for any prompt length; None = there is none yet."""
        fitting = (p.decode for b, p in self.programs.items() if (b.batch_size, b.num_slots) == (batch_size, num_slots))
        return next(filter(None, fitting), None)

    def _decode_program(self, state: Any, max_new_tokens: int) -> Callable:
        """Program that continues a DecodeState; ValueError if there is none, or cache or context lack room."""
        sizes = tuple(state.tokens.shape)
        # slots are rounded up, so that the cache may have more of them than the model has positions
        room = min(sizes[1], self._max_seq_len) - int(state.slot) + int(state.step) - 1
        if max_new_tokens > room:
            raise ValueError(f"decode: max_new_tokens={max_new_tokens}, but prefill made room for {room}")
        program = self._decode_of(*sizes)
        if program is None:
            raise ValueError(f"decode: no program for a state of {sizes}: prefill it with max_new_tokens above 1")
        return program
