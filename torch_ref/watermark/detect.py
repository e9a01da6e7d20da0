"""Evidence and detection in PyTorch; equal to reference.evidence, bit for bit.

Twin: jaxbench/watermark/detect.py. Here arrays are [B T], and sorting finds repeated inputs.
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
from jaxbench.watermark.schemes.contract import SchemeLike
from jaxbench.watermark.significance import Detections
from torch_ref import devices
from torch_ref.watermark import prf
from torch_ref.watermark.device.marks import mark_of

Words = tuple[Tensor, ...]  # int64 [B T] each


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

    Arguments and errors are those of the twin.
    """
    detector = Detector(scheme, vocab_size=vocab_size, green_lists=green_lists, device=device)
    ids = detection.as_ids(texts_or_ids, tokenizer, vocab_size=vocab_size, canonicalize=canonicalize)
    return detection.detect(detector, ids, key, prompt_lengths=prompt_lengths, payload=payload)


class Detector(detection.NumpyDetector):
    """A scheme's evidence on one device."""

    def __init__(self, scheme: SchemeLike, *, vocab_size: int, green_lists: Any = None, device: str = "cpu"):
        super().__init__(scheme, vocab_size=vocab_size, green_lists=green_lists)
        devices.check_device(device)
        self._device = {"gpu": "cuda"}.get(device, device)

    @torch.no_grad()
    def _compute(self, key: Any, tokens: Any, lengths: Any, prompt: Any, payload: Any) -> reference.Evidence:
        tokens, lengths, prompt = reference.checked(tokens, lengths, prompt, vocab_size=self.vocab_size)
        if self.scheme.key_field is not None:
            return super()._compute(key, tokens, lengths, prompt, payload)
        keys = detection.key_arrays(self.scheme, key, len(tokens)).astype(np.int64)
        payload = np.broadcast_to(np.asarray(payload % self.vocab_size, np.int64), len(tokens))
        arrays = [torch.tensor(x, device=self._device) for x in (tokens, lengths, prompt, payload, keys)]
        lists = self._lists_of(key, len(tokens))
        lists = None if lists is None else tuple(torch.tensor(array, device=self._device) for array in lists)
        evidence = _evidence(*arrays, lists, form=detection.compiled_form(self.scheme), vocab_size=self.vocab_size)
        words, scored, second = (None if x is None else x.cpu().numpy() for x in evidence)
        second = None if second is None else second.astype(np.uint32)
        return reference.Evidence(words.astype(np.uint32), scored, second, reference.inputs(self.scheme, key, tokens))


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
    scored = valid & _is_first((*(seeds[..., i] for i in range(seeds.shape[-1])), tokens), valid)
    if len(pairs) == 1:
        return words, scored, None
    second_words, seeds = mark.text_words(pairs[1], text)
    if reference.has_seeds_of_each_key(form):
        scored &= _is_first((*(seeds[..., i] for i in range(seeds.shape[-1])), tokens), valid)
    return words, scored, second_words


def _is_first(inputs: Words, valid: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Return True where no earlier valid position of the row has equal inputs; sorts, then compares neighbours."""
    *seeds, tokens = inputs
    # two words per column; seeds have two words or four
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
