"""Evidence and detection in PyTorch; equal to reference.evidence, bit for bit.

Twin: jaxbench/watermark/detect.py. Arrays are [B T] here, and repeated inputs are found by sorting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from jaxbench.watermark import detection, reference
from jaxbench.watermark.keys import Key
from jaxbench.watermark.statistics import Detections
from torch_ref import devices
from torch_ref.watermark import prf
from torch_ref.watermark.device.marks import mark_of

Words = tuple[Tensor, ...]  # int64 [B T] each


def detect_batch(
    texts_or_ids: Any,
    scheme: Any,
    key: Key,
    *,
    vocab_size: int,
    tokenizer: Any = None,
    prompt_lengths: np.ndarray | int | None = None,
    payload: int | None = None,
    canonicalize: bool = True,
    green_lists: Any = None,
    device: str = "cpu",
) -> Detections:
    """Return scores and p-values of texts under one key.

    Args:
      texts_or_ids: strings, lists of ids, an array [B T] of ids, or texts.Ragged.
      scheme: a name, a mapping with the key `scheme`, or a scheme.
      tokenizer: turns strings into ids; wanted for strings only. One of jaxbench, transformers or tokenizers.
      prompt_lengths: tokens at the beginning of each text that are not scored.
      payload: the message, where it is known; unset, all are tried and the p-value is corrected (detection.detect).
      canonicalize: undo look-alikes and invisible characters before tokenising (canonical.py).
      green_lists: of kgw_markllm and kgw_transformers; unset, they are made.

    Raises:
      ValueError: an unknown scheme, a device that is not there, strings without a tokenizer, a tokenizer of another
        vocabulary, or a token outside the vocabulary.
    """
    detector = Detector(scheme, vocab_size=vocab_size, green_lists=green_lists, device=device)
    ids = detection.as_ids(texts_or_ids, tokenizer, vocab_size=vocab_size, canonicalize=canonicalize)
    return detection.detect(detector, ids, key, prompt_lengths=prompt_lengths, payload=payload)


class Detector:
    """A scheme's evidence on one device."""

    def __init__(self, scheme: Any, *, vocab_size: int, green_lists: Any = None, device: str = "cpu"):
        self.scheme = detection.checked_scheme(scheme, vocab_size)
        self.vocab_size = vocab_size
        self.green_lists = detection.own_lists(self.scheme, vocab_size, green_lists)
        devices.check_device(device)
        self._device = {"gpu": "cuda"}.get(device, device)
        self._lists: dict[Key, np.ndarray] = {}

    @torch.no_grad()
    def evidence(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        key: Key | Sequence[Key],
        *,
        prompt_lengths: np.ndarray | int | None = None,
        payload: int | np.ndarray = 0,
    ) -> reference.Evidence:
        """Return the words of tokens [B T] and which of them are scored; see reference.evidence.

        One payload, or one for each text.

        Raises:
          ValueError: a token lies outside the vocabulary.
        """
        tokens, lengths, prompt = detection.checked(tokens, lengths, prompt_lengths, vocab_size=self.vocab_size)
        if self.scheme.key_field is not None:
            return detection.host_evidence(self, key, tokens, lengths, prompt, payload)
        keys = detection.key_arrays(self.scheme, key, len(tokens)).astype(np.int64)
        payload = np.broadcast_to(np.asarray(payload % self.vocab_size, np.int64), len(tokens))
        arrays = (torch.tensor(x, device=self._device) for x in (tokens, lengths, prompt, payload, keys))
        lists, form = self._fixed_lists(key, len(tokens)), detection.compiled_form(self.scheme)
        found = _evidence(*arrays, lists, form=form, vocab_size=self.vocab_size)
        words, scored, second = (None if x is None else x.cpu().numpy() for x in found)
        return reference.Evidence(words.astype(np.uint32), scored, None if second is None else second.astype(np.uint32))

    def _fixed_lists(self, key: Key | Sequence[Key], rows: int) -> tuple[Tensor, Tensor] | None:
        """Return the lists [K V] of a scheme with one list a key, and the list of each row [B]; None for others."""
        found = detection.fixed_lists(self.scheme, key, rows, self._lists, vocab_size=self.vocab_size)
        return None if found is None else tuple(torch.tensor(array, device=self._device) for array in found)


def _evidence(
    tokens: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    prompt: Int[Tensor, " B"],
    payload: Int64[Tensor, " B"],
    keys: Int64[Tensor, "K 2 B"],
    fixed_lists: tuple[Bool[Tensor, "K V"], Int[Tensor, " B"]] | None,
    *,
    form: Any,
    vocab_size: int,
) -> tuple[Int64[Tensor, "B T"], Bool[Tensor, "B T"], Int64[Tensor, "B T"] | None]:
    tokens = tokens.to(torch.int64)
    place = torch.arange(tokens.shape[1], device=tokens.device)[None]
    valid = (place < lengths[:, None]) & (place >= torch.clamp(prompt, min=form.context_length)[:, None])
    pairs = [(pair[0][:, None], pair[1][:, None]) for pair in keys]
    mark = mark_of(form, vocab_size=vocab_size)
    text = prf.Text(tokens, prompt, payload[:, None], fixed_lists)
    words, seeds = mark.text_words(pairs[0], text)
    scored = valid & _is_first((*_columns(seeds), tokens), valid)
    if len(pairs) == 1:
        return words, scored, None
    return words, scored, mark.text_words(pairs[1], text)[0]


def _is_first(inputs: Words, valid: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Return True where no earlier valid position of the row has equal inputs: stable sorts, then neighbours."""
    *seeds, tokens = inputs
    # two words a column; seeds have two words or four
    columns = [tokens | (~valid).to(torch.int64) << 32]
    columns += [low << 32 | high for low, high in zip(seeds[0::2], seeds[1::2])]
    order = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    for column in columns:
        found = torch.sort(column.expand(tokens.shape).gather(1, order), dim=1, stable=True).indices
        order = order.gather(1, found)
    repeated = torch.ones_like(valid[:, 1:])
    for column in columns:
        ordered = column.expand(tokens.shape).gather(1, order)
        repeated &= ordered[:, 1:] == ordered[:, :-1]
    return torch.ones_like(valid).scatter(1, order[:, 1:], ~repeated)


def _columns(seeds: Int64[Tensor, "B T S"]) -> Words:
    return tuple(seeds[..., i] for i in range(seeds.shape[-1]))
