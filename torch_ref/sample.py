"""Logits to tokens: filters, draws, and the generator with its compiled programs.

Twin: jaxbench/sample.py.

Draws the same tokens as the twin: Gumbel-max over the Philox stream (seed, step, "sample", row, vocabulary id).

Eager code uses exact sizes: prompts are padded to the longest of them, the cache has as many slots as there will be
tokens, and rows of equal length need no attention mask. A model built with torch_compile has programs of fixed sizes,
so its batches are padded to buckets like the JAX twin's; "step" compiles the whole decode step, with CUDA graphs on a
GPU.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench import philox, prompts
from jaxbench.prompts import LogitsProcessor, Programs, SamplingParams
from torch_ref import penalties, prng
from torch_ref.attention import KVCache
from torch_ref.transformer import Transformer

NUM_CANDIDATES = 256  # top-p looks at this many tokens before it sorts the vocabulary


class DecodeState(NamedTuple):
    """Everything decoding carries from token to token."""

    cache: KVCache
    tokens: Int[Tensor, "B W"]  # prompt and continuation of each row, from index 0
    lengths: Int[Tensor, " B"]  # tokens in each row
    finished: Bool[Tensor, " B"]
    step: int | Int[Tensor, ""]  # tokens generated; a tensor inside compiled programs
    slot: int | Int[Tensor, ""]  # the next free slot of the cache
    key: Tensor  # Philox key
    row_ids: Int[Tensor, " B"]
    processor_states: tuple


def filter_logits(logits: Float[Tensor, "B V"], sampling: SamplingParams) -> Float[Tensor, "B V"]:
    """Divide by the temperature and set tokens outside top-k, top-p (Holtzman et al. 2020) and min-p to -inf."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[1]:
        least = torch.topk(logits, sampling.top_k).values[:, -1:]
        logits = torch.where(logits >= least, logits, -math.inf)
    if sampling.top_p < 1.0:
        logits = torch.where(logits >= _nucleus_threshold(logits, sampling.top_p), logits, -math.inf)
    if sampling.min_p > 0.0:
        least = torch.amax(logits, dim=-1, keepdim=True) + math.log(sampling.min_p)
        logits = torch.where(logits >= least, logits, -math.inf)
    return logits


def _nucleus_threshold(logits: Float[Tensor, "B V"], top_p: float) -> Float[Tensor, "B 1"]:
    """Least logit of the nucleus: the smallest set of most probable tokens, one at least, whose mass reaches top_p."""
    log_total = torch.logsumexp(logits, dim=-1, keepdim=True)

    def threshold(count: int) -> tuple[Tensor, Tensor]:
        ordered = torch.topk(logits, count).values
        probabilities = torch.exp(ordered - log_total)
        mass_up_to = torch.cumsum(probabilities, dim=-1)
        least = torch.where(mass_up_to - probabilities < top_p, ordered, ordered[:, :1])
        return torch.amin(least, dim=-1, keepdim=True), mass_up_to[:, -1:]

    least, mass = threshold(min(NUM_CANDIDATES, logits.shape[1]))
    is_found = mass >= top_p
    if logits.shape[1] <= NUM_CANDIDATES or is_found.all():
        return least
    return torch.where(is_found, least, threshold(logits.shape[1])[0])


def draw(
    logits: Float[Tensor, "B V"],
    sampling: SamplingParams,
    *,
    key: Tensor,
    step: int | Tensor,
    row_ids: Int[Tensor, " B"],
) -> Int[Tensor, " B"]:
    """Token of each row: the most probable one, or a Gumbel-max sample of the filtered distribution."""
    if sampling.temperature == 0.0:
        return torch.argmax(logits, dim=-1)
    return gumbel_max(filter_logits(logits, sampling), key=key, step=step, row_ids=row_ids)


def gumbel_max(
    logits: Float[Tensor, "B V"], *, key: Tensor, step: int | Tensor, row_ids: Int[Tensor, " B"]
) -> Int[Tensor, " B"]:
    """Token of each row drawn from softmax(logits), as the largest sum of logit and Gumbel noise."""
    words = prng.lanes(key, step=step, site=philox.site_id("sample"), rows=row_ids, num_elements=logits.shape[1])
    dtype = str(logits.dtype).removeprefix("torch.")
    return largest_sum(logits, [-torch.log(prng.exponential(lane, dtype=dtype)) for lane in words])


class OrdinaryDraw(NamedTuple):
    """The unwatermarked draw of a step: called with logits [B V], it returns one token per row."""

    key: Tensor  # Philox key
    step: int | Tensor
    row_ids: Int[Tensor, " B"]

    def __call__(self, logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
        """Gumbel-max sample of each row."""
        return gumbel_max(logits, key=self.key, step=self.step, row_ids=self.row_ids)


def largest_sum(logits: Float[Tensor, "B V"], noise: Sequence[Float[Tensor, "B C"]]) -> Int[Tensor, " B"]:
    """Token of each row with the largest sum of logit and noise; the noise comes in lanes (prng.lanes)."""
    side_by_side = torch.stack(list(noise), dim=-1).reshape(logits.shape[0], -1)
    return torch.argmax(logits + side_by_side[:, : logits.shape[1]], dim=-1)


class Generator(prompts.GeneratorBase):
    """Generates from one model, on the model's device."""

    def __init__(
        self,
        model: Transformer,
        *,
        eos_id: int | Sequence[int] | None,
        sampling: SamplingParams,
        processors: Sequence[LogitsProcessor] = (),
    ):
        self._model, self._device = model, next(itertools.chain(model.parameters(), model.buffers())).device
        super().__init__(model, self._device.type, eos_id=eos_id, sampling=sampling, processors=processors)
        self._is_compiled, self._is_whole = bool(model.torch_compile), model.torch_compile == "step"
        self._sizes = prompts.bucket if self._is_compiled else prompts.exact
        self._caches: dict[tuple[int, int], KVCache] = {}  # of compiled whole steps, by rows and slots
        if self._is_whole:
            torch.compiler.assume_constant_result(philox.site_id)  # a checksum, which the compiler cannot trace
            mode = "reduce-overhead" if self._device.type == "cuda" else "default"  # CUDA graphs
            self._next = torch.compile(self._next, dynamic=False, mode=mode)

    def compile(
        self, batch_size: int, prompt_length: int, max_new_tokens: int, *, processor_states: Sequence | None = None,
        vectors: Float[np.ndarray, "M D"] | None = None,
    ) -> Programs:  # fmt: skip
        """Return the programs for these sizes; eager PyTorch compiles nothing, torch.compile does so when first called.

        A single new token needs no decoding: `decode` is then not added. States and vectors have no influence.
        """
        bucket = self._sizes(batch_size, prompt_length, max_new_tokens)
        known = self.programs.get(bucket, Programs(None, None))
        prefill = known.prefill or functools.partial(self._prefill, bucket.num_slots)
        self.programs[bucket] = Programs(prefill, self._decode if max_new_tokens > 1 else known.decode)
        return self.programs[bucket]

    def _padded_states(self, processor_states: Sequence | None, num_rows: int, batch_size: int) -> tuple:
        """Copy the processors' states, padded with rows of zeros; None = the states that their `init` returns."""
        if processor_states is None:
            return tuple(processor.init(batch_size) for processor in self._processors)
        prompts.check_states(processor_states, self._processors)

        def fill(leaf: Tensor) -> Tensor:
            return torch.from_numpy(prompts.fill_rows(leaf.cpu().numpy(), num_rows, batch_size)).to(self._device)

        return pytree.tree_map(fill, tuple(processor_states))

    @torch.inference_mode()
    def prefill(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        seed: int,
        row_ids: Sequence[int] | None = None,
        processor_states: Sequence | None = None,
        vectors: Float[np.ndarray, "M D"] | None = None,
    ) -> DecodeState:
        """Run the prompts and draw the first token of each row; max_new_tokens decides the size of the cache.

        With torch_compile="step" the program owns the cache: the next prefill of the same sizes invalidates the state.
        """
        table = prompts.pad_vectors(vectors)
        batch = self._pad(prompt_tokens, max_new_tokens, row_ids, 0 if vectors is None else len(vectors))
        programs = self.compile(*batch.tokens.shape, max_new_tokens)
        slot = int(batch.lengths.max())
        is_plain = not batch.is_padding.any() and bool((batch.lengths == batch.tokens.shape[1]).all())
        tokens, lengths, is_padding, row_ids = (torch.from_numpy(x).to(self._device) for x in batch)
        key = prng.key_from_seed(seed, device=str(self._device))
        states = self._padded_states(processor_states, len(prompt_tokens), len(tokens))
        lengths = lengths.to(torch.int64)
        table = None if table is None else torch.from_numpy(table).to(self._device)
        state = programs.prefill(tokens, lengths, is_padding, key, row_ids, states, table, is_plain=is_plain)
        if self._is_whole:
            state = state._replace(cache=self._own_cache(state.cache, tuple(state.tokens.shape)))
        return state._replace(slot=slot)

    @torch.inference_mode()
    def decode(self, state: DecodeState, max_new_tokens: int) -> DecodeState:
        """Draw tokens until each row has max_new_tokens or has ended; the state passed in must not be used again.

        Raises:
          ValueError: the state was prefilled for fewer new tokens.
        """
        if max_new_tokens <= 1:
            return state
        return self._decode_program(state, max_new_tokens)(state, max_new_tokens)

    def _to_host(self, x: Tensor) -> np.ndarray:
        return x.cpu().numpy()

    def _prefill(
        self, num_slots, tokens, lengths, finished, key, row_ids, states, vectors, *, is_plain: bool
    ) -> DecodeState:
        """First token of each row; is_plain: no row is padded, so attention needs no mask. `slot` is left unset."""
        index = torch.arange(tokens.shape[1], device=tokens.device)[None, :]
        positions = None if is_plain else torch.where(index < lengths[:, None], index, -1)
        hidden, cache = self._model.features(tokens, positions, **({} if vectors is None else {"vectors": vectors}))
        last = hidden[torch.arange(tokens.shape[0]), lengths - 1]
        tokens = F.pad(tokens, (0, num_slots - tokens.shape[1]))
        if is_plain and self._is_compiled:  # its decode program reads all slots, for any prompts
            cache = cache._replace(positions=index.expand(*lengths.shape, -1))
        cache = cache.padded(num_slots, dtype=self._cache_dtype)
        state = DecodeState(cache, tokens, lengths, finished, 0, 0, key, row_ids, states)
        return self._append(state, self._model.logits(last[:, None])[:, 0], self._shared)

    def _decode(self, state: DecodeState, limit: int) -> DecodeState:
        step, ahead = state.step, state.slot - state.step
        if self._is_compiled:  # tensors, so that one program serves every step
            step_and_slot = (torch.tensor(x, device=self._device) for x in (state.step, state.slot))
            state = state._replace(**dict(zip(("step", "slot"), step_and_slot)))
        # Without an end token no row ends, and checking at each step would only wait for the device.
        while step < limit and not (self._eos_ids and state.finished.all()):
            state, step = self._next(state), step + 1
            state = self._kept(state) if self._is_whole else state
        return state._replace(step=step, slot=ahead + step)

    def _own_cache(self, cache: KVCache, sizes: tuple[int, int]) -> KVCache:
        """Copy a prefill's cache into the one that the program of these sizes owns: a CUDA graph's stays in place."""
        own = self._caches.get(sizes)
        if own is None:
            own = self._caches[sizes] = pytree.tree_map(torch.clone, cache)
            pytree.tree_map(torch._dynamo.mark_static_address, own)
        else:
            pytree.tree_map(lambda mine, new: mine.copy_(new), own, cache)
        return own

    def _kept(self, state: DecodeState) -> DecodeState:
        """Copy the small tensors that the next run of a CUDA graph would overwrite; the cache is the program's."""
        if self._device.type != "cuda":
            return state
        kept = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state._replace(cache=None))
        torch.compiler.cudagraph_mark_step_begin()
        return kept._replace(cache=state.cache)

    def _next(self, state: DecodeState) -> DecodeState:
        """Run one step: read each row's last token, draw the next."""
        last = (state.lengths - 1)[:, None]
        positions = None if isinstance(state.cache, KVCache) and state.cache.positions is None else last
        tokens = torch.gather(state.tokens, 1, last)
        hidden, cache = self._model.features(tokens, positions, cache=state.cache, slot=state.slot)
        state = state._replace(cache=cache, slot=state.slot + 1)
        return self._append(state, self._model.logits(hidden)[:, 0], self._shared)

    def _append(self, state: DecodeState, logits: Float[Tensor, "B V"], shared: tuple) -> DecodeState:
        """Turn logits into the next token of every unfinished row."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
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
            token = torch.full_like(state.lengths, -1)
            for i in self._drawing:
                given = (self._seen(i, states, shared), logits, *context, sample)
                states[i], drawn = self._processors[i].draw(*given)
                token = torch.where(token < 0, drawn.to(token.dtype), token)
            token = _fill(token, state.finished, lambda: sample(logits))
        is_end = torch.zeros_like(state.finished)
        for eos_id in self._eos_ids:
            is_end = is_end | (token == eos_id)
        tokens = state.tokens.scatter(1, state.lengths[:, None], token[:, None].to(state.tokens.dtype))
        return state._replace(
            tokens=tokens,
            lengths=state.lengths + (~state.finished).to(state.lengths.dtype),
            finished=state.finished | is_end,
            step=state.step + 1,
            processor_states=tuple(states),
        )


def _fill(token: Int[Tensor, " B"], finished: Bool[Tensor, " B"], sample: Callable[[], Tensor]) -> Int[Tensor, " B"]:
    """Draw for the unfinished rows that no processor drew; without such rows nothing is computed."""
    is_missing = (token < 0) & ~finished
    token = torch.clamp(token, min=0)
    return torch.where(is_missing, sample().to(token.dtype), token) if is_missing.any() else token
