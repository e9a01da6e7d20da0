"""Evidence and detection in JAX, compiled for padded sizes; equal to reference.evidence, bit for bit.

Twin: torch_ref/watermark/detect.py. Internally, arrays are [T B]: each text is a column, so that shifting and comparing
positions works on whole rows, across the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, UInt32

from jaxbench import devices, libtpu
from jaxbench.watermark import detection, prf, reference
from jaxbench.watermark.device.marks import mark_of
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes.contract import SchemeLike
from jaxbench.watermark.significance import Detections

Words = tuple[Array, ...]  # uint32 [T B] each
SLABS, SLAB_TOKENS = 4, 2**14  # large batches compare the triangle of earlier positions in slabs: a third less work


def detect_batch(
    texts_or_ids: Any,
    scheme: SchemeLike,
    key: Key | Sequence[Key],
    *,
    vocab_size: int,
    tokenizer: Any = None,
    prompt_lengths: np.ndarray | int | None = None,
    payload: int | None = None,
    canonicalize: bool = True,
    green_lists: Any = None,
    device: str = "cpu",
) -> Detections:
    """Return scores and p-values of texts under one key, or one key per text.

    Args:
      texts_or_ids: strings, lists of ids, an array [B T] of ids, or texts.Ragged.
      scheme: a name, a mapping with the key `scheme`, or a scheme.
      tokenizer: turns strings into ids; needed only for strings. One of jaxbench, transformers or tokenizers.
      prompt_lengths: tokens at the beginning of each text that are not scored; one number, or one per text.
      payload: the message, if known; if unset, all are tried and the p-value is corrected (detection.detect).
      canonicalize: undo look-alikes and invisible characters before tokenising (canonical.py).
      green_lists: of kgw_markllm and kgw_transformers; if unset, they are made.

    Raises:
      ValueError: an unknown scheme, an absent device, strings without a tokenizer, a tokenizer of another vocabulary,
        a token outside the vocabulary, or as detection.detect.
    """
    detector = Detector(scheme, vocab_size=vocab_size, green_lists=green_lists, device=device)
    ids = detection.as_ids(texts_or_ids, tokenizer, vocab_size=vocab_size, canonicalize=canonicalize)
    return detection.detect(detector, ids, key, prompt_lengths=prompt_lengths, payload=payload)


class Detector(detection.NumpyDetector):
    """A scheme's evidence on one device. Detectors share compiled programs: keys and lengths are arguments."""

    def __init__(self, scheme: SchemeLike, *, vocab_size: int, green_lists: Any = None, device: str = "cpu"):
        super().__init__(scheme, vocab_size=vocab_size, green_lists=green_lists)
        libtpu.leave_out_if_absent()
        devices.check_device(device)
        self._device = jax.local_devices(backend={"cpu": "cpu", "gpu": "cuda"}.get(device, device))[0]

    def _compute(self, key: Any, tokens: Any, lengths: Any, prompt: Any, payload: Any) -> reference.Evidence:
        tokens, lengths, prompt = reference.checked(tokens, lengths, prompt, vocab_size=self.vocab_size)
        if self.scheme.key_field is not None or tokens.shape[1] > detection.MAX_DEVICE_LENGTH:
            return super()._compute(key, tokens, lengths, prompt, payload)
        rows, columns = tokens.shape
        extra = max(8, 1 << max(0, rows - 1).bit_length()) - rows  # pad rows to a power of two, at least 8
        wide = int(detection.padded_lengths(np.array([columns]))[0])
        payload = np.broadcast_to(np.asarray(payload % self.vocab_size, np.uint32), rows)
        tokens = np.pad(tokens, ((0, extra), (0, wide - columns)))
        arrays = [tokens, *(np.pad(x, (0, extra)) for x in (lengths, prompt, payload))]
        lists = self._lists_of(key, rows)
        lists = None if lists is None else (lists[0], np.pad(lists[1], (0, extra)))
        arguments = jax.device_put((*arrays, detection.key_arrays(self.scheme, key, rows, extra), lists), self._device)
        evidence = _evidence(*arguments, form=detection.compiled_form(self.scheme), vocab_size=self.vocab_size)
        found = (None if x is None else np.asarray(x)[:rows, :columns] for x in evidence)
        return reference.Evidence(*found, reference.inputs(self.scheme, key, tokens[:rows, :columns]))


@functools.partial(jax.jit, static_argnames=("form", "vocab_size"))
def _evidence(
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    prompt: Int[Array, " B"],
    payload: UInt32[Array, " B"],
    keys: UInt32[Array, "K 2 B"],
    fixed_lists: tuple[Bool[Array, "K V"], Int[Array, " B"]] | None,
    *,
    form: Any,
    vocab_size: int,
) -> tuple[UInt32[Array, "B T"], Bool[Array, "B T"], UInt32[Array, "B T"] | None]:
    tokens = tokens.T.astype(jnp.uint32)
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    in_text = place < lengths[None]
    tokens = jnp.where(in_text, tokens, 0)
    valid = in_text & (place >= jnp.maximum(prompt, form.context_length)[None])
    mark = mark_of(form, vocab_size=vocab_size)
    pairs = [(keys[i, 0][None], keys[i, 1][None]) for i in range(keys.shape[0])]
    text = prf.Text(tokens, prompt, payload[None], fixed_lists)
    words, seeds = mark.text_words(pairs[0], text)
    scored = valid & _is_first((*(seeds[..., i] for i in range(seeds.shape[-1])), tokens), valid)
    if len(pairs) == 1:
        return words.T, scored.T, None
    second_words, seeds = mark.text_words(pairs[1], text)
    if reference.has_seeds_of_each_key(form):
        scored &= _is_first((*(seeds[..., i] for i in range(seeds.shape[-1])), tokens), valid)
    return words.T, scored.T, second_words.T


def _is_first(inputs: Words, valid: Bool[Array, "T B"]) -> Bool[Array, "T B"]:
    """Return True where no earlier valid position of the column has equal inputs; compares every pair."""
    length = valid.shape[0]
    step = -(-length // SLABS) if valid.size >= SLAB_TOKENS else length
    repeated, found = jnp.zeros(valid.shape, bool), []
    for start in range(0, length, step):
        later = [x[start:] for x in inputs]
        place = jnp.arange(start, length, dtype=jnp.int32)[:, None]

        def compare(s: Array, repeated: Array, later=later, place=place) -> Array:
            same = (place > s) & valid[s][None]
            for x, rest in zip(inputs, later):
                same &= rest == x[s][None]
            return repeated | same

        repeated = jax.lax.fori_loop(start, min(start + step, length), compare, repeated)
        found.append(repeated[:step])
        repeated = repeated[step:]
    return ~jnp.concatenate(found)
