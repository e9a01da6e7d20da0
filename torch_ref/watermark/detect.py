"""Evidence and detection in PyTorch; equal to definition.evidence, bit for bit.

Twin: jaxbench/watermark/detect.py. Arrays are [B T] here, and repeated inputs are found by sorting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from jaxbench.watermark import definition, pipeline
from jaxbench.watermark.keys import Key
from jaxbench.watermark.statistics import Detections
from torch_ref import devices
from torch_ref.watermark import prf

Words = tuple[Tensor, ...]  # int64 [B T] each
MISSING = 0xFFFFFFFF  # vLLM's place before the text starts


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
    tables: Any = None,
    device: str = "cpu",
) -> Detections:
    """Return scores and p-values of texts under one key.

    Args:
      texts_or_ids: strings, lists of ids, an array [B T] of ids, or texts.Ragged.
      scheme: a name, a mapping with the key `scheme`, or a scheme.
      tokenizer: turns strings into ids; wanted for strings only. One of jaxbench, transformers or tokenizers.
      prompt_lengths: tokens at the beginning of each text that are not scored.
      payload: the message, where it is known; unset, all are tried and the p-value is corrected (pipeline.detect).
      canonicalize: undo look-alikes and invisible characters before tokenising (canonical.py).
      tables: green lists of kgw_markllm and kgw_transformers; unset, they are made.

    Raises:
      ValueError: an unknown scheme, a device that is not there, strings without a tokenizer, a tokenizer of another
        vocabulary, or a token outside the vocabulary.
    """
    detector = Detector(scheme, vocab_size=vocab_size, tables=tables, device=device)
    ids = pipeline.as_ids(texts_or_ids, tokenizer, vocab_size=vocab_size, canonicalize=canonicalize)
    return pipeline.detect(detector, ids, key, prompt_lengths=prompt_lengths, payload=payload)


class Detector:
    """A scheme's evidence on one device."""

    def __init__(self, scheme: Any, *, vocab_size: int, tables: Any = None, device: str = "cpu"):
        self.scheme = pipeline.checked_scheme(scheme, vocab_size)
        self.vocab_size = vocab_size
        self.tables = pipeline.own_tables(self.scheme, vocab_size, tables)
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
    ) -> definition.Evidence:
        """Return the words of tokens [B T] and which of them are scored; see definition.evidence.

        One payload, or one for each text.

        Raises:
          ValueError: a token lies outside the vocabulary.
        """
        tokens, lengths, prompt = pipeline.checked(tokens, lengths, prompt_lengths, vocab_size=self.vocab_size)
        if self.scheme.scheme in pipeline.TABLE_SCHEMES:
            return pipeline.reference(self, key, tokens, lengths, prompt, payload)
        keys = pipeline.key_arrays(self.scheme, key, len(tokens)).astype(np.int64)
        payload = np.broadcast_to(np.asarray(payload % self.vocab_size, np.int64), len(tokens))
        arrays = (torch.tensor(x, device=self._device) for x in (tokens, lengths, prompt, payload, keys))
        green = self._green(key, len(tokens))
        form = pipeline.form(self.scheme)
        found = _evidence(*arrays, green, form=form, vocab_size=self.vocab_size)
        words, scored, second = (None if x is None else x.cpu().numpy() for x in found)
        return definition.Evidence(
            words.astype(np.uint32), scored, None if second is None else second.astype(np.uint32)
        )

    def _green(self, key: Key | Sequence[Key], rows: int) -> Any:
        """Return unigram's lists [K V] and the list of each row [B], None for other schemes."""
        if self.scheme.scheme != "unigram":
            return None
        lists, index = pipeline.unigram_lists(self.scheme, key, rows, self._lists, vocab_size=self.vocab_size)
        return torch.tensor(lists, device=self._device), torch.tensor(index, device=self._device)


def _evidence(
    tokens: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    prompt: Int[Tensor, " B"],
    payload: Int64[Tensor, " B"],
    keys: Int64[Tensor, "K 2 B"],
    green: Any,
    *,
    form: pipeline.Form,
    vocab_size: int,
) -> tuple[Int64[Tensor, "B T"], Bool[Tensor, "B T"], Int64[Tensor, "B T"] | None]:
    tokens = tokens.to(torch.int64)
    place = torch.arange(tokens.shape[1], device=tokens.device)[None]
    valid = (place < lengths[:, None]) & (place >= torch.clamp(prompt, min=form.context)[:, None])
    pairs = [(pair[0][:, None], pair[1][:, None]) for pair in keys]
    if form.scheme.scheme == "unigram":
        lists, index = green
        words = torch.where(lists[index[:, None], tokens], 0, definition.RED)
        seeds: Words = ()
    else:
        words, seeds = _observed(form, pairs[0], tokens, prompt, payload[:, None], vocab_size)
    scored = valid & _is_first((*seeds, tokens), valid)
    second = _observed(form, pairs[1], tokens, prompt, payload[:, None], vocab_size)[0] if len(pairs) > 1 else None
    return words, scored, second


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


def _observed(form, pair, tokens, prompt, payload, vocab_size: int) -> tuple[Tensor, Words]:
    """Return words [B T] of the observed tokens, and the words of their seeds."""
    rule = form.rule
    if form.scheme.scheme == "gumbel" and form.scheme.prf == "vllm":
        place = torch.arange(tokens.shape[1], device=tokens.device)[None]
        inside = [place - distance >= torch.clamp(prompt, min=0)[:, None] for distance in range(rule.width, 0, -1)]
        context = [torch.where(i, c, MISSING) for i, c in zip(inside, _earlier(tokens, rule.width))]
        states = prf.vllm_state(torch.stack(context, dim=-1), pair)
        return prf.vllm_token_words(states, tokens, pair), _columns(states)
    context = _earlier(tokens, rule.length)
    contexts = torch.stack(context, dim=-1) if context else tokens.new_zeros((*tokens.shape, 0))
    seeds = prf.seeds_after(rule, pair, contexts, tokens)
    words = prf.token_words(form.scheme, pair, seeds, tokens, vocab_size=vocab_size, payload=payload)
    return words, _columns(seeds)


def _earlier(tokens: Int64[Tensor, "B T"], length: int) -> list[Int64[Tensor, "B T"]]:
    """Return the tokens `length`, .., 2, 1 places before each position, 0 where there is none."""
    padded = torch.nn.functional.pad(tokens, (length, 0))
    return [padded[:, i : i + tokens.shape[1]] for i in range(length)]


def _columns(seeds: Int64[Tensor, "B T S"]) -> Words:
    return tuple(seeds[..., i] for i in range(seeds.shape[-1]))
