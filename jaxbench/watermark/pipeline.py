"""From texts or token ids to p-values, whatever computes the evidence (S file).

Axis letters: B texts of one batch, T tokens, N all texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxbench.watermark import definition, statistics
from jaxbench.watermark.config import context_length
from jaxbench.watermark.keys import Key
from jaxbench.watermark.texts import Ragged, TextEncoder

TABLE_SCHEMES = ("kgw_markllm", "kgw_transformers")  # their lists are read in numpy, on the host
MAX_DEVICE_LENGTH = 4096  # tokens; longer texts are sorted on the host instead of comparing all pairs
FEW_ROWS = 128
MANY_TEXTS = 2048  # from here on, tighter padding is worth more programs to compile
BATCH_TOKENS = 2**18  # padded tokens of one call: fits the cache, and keeps the devices busy


class Form(NamedTuple):
    """The part of a scheme that its programs are compiled for: shares, biases and scores have their defaults here."""

    scheme: Any
    rule: Any  # its context rule, None where it has none
    context: int  # tokens that must precede a scored position


class Evidencer(Protocol):
    """What detection needs of a backend: definition.evidence for one scheme and vocabulary."""

    scheme: Any
    vocab_size: int

    def evidence(self, tokens, lengths, key, *, prompt_lengths=None, payload=0) -> definition.Evidence:
        """Return the evidence of tokens [B T]."""
        ...


class NumpyDetector:
    """The reference as a detector: no compilation, no device."""

    def __init__(self, scheme: Any, *, vocab_size: int, tables: Any = None):
        self.scheme = scheme
        self.vocab_size = vocab_size
        self.tables = tables

    def evidence(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        key: Key | Sequence[Key],
        *,
        prompt_lengths: np.ndarray | int | None = None,
        payload: int | np.ndarray = 0,
    ) -> definition.Evidence:
        """Return definition.evidence."""
        return reference(self, key, tokens, lengths, prompt_lengths, payload)


def reference(detector: Any, key: Any, tokens: Any, lengths: Any, prompt: Any, payload: Any) -> definition.Evidence:
    """Return definition.evidence for a detector's scheme, vocabulary and tables; payload may be one for each text."""
    payload = payload if isinstance(payload, int) else np.asarray(payload)[:, None]
    fixed = {"vocab_size": detector.vocab_size, "tables": detector.tables}
    return definition.evidence(detector.scheme, key, tokens, lengths, prompt_lengths=prompt, payload=payload, **fixed)


def form(scheme: Any) -> Form:
    """Return what a scheme's programs are compiled for."""
    kept = {name: getattr(scheme, name) for name in ("context", "prf") if hasattr(scheme, name)}
    return Form(type(scheme)(**kept), kept.get("context"), context_length(scheme))


def as_ids(texts_or_ids: Any, tokenizer: Any, *, vocab_size: int, canonicalize: bool = True) -> Ragged:
    """Return strings, lists of ids, an array [B T] of ids, or Ragged as Ragged.

    Raises:
      ValueError: strings without a tokenizer, or a tokenizer whose vocabulary is larger than the detector's.
    """
    if isinstance(texts_or_ids, Ragged):
        return texts_or_ids
    if isinstance(texts_or_ids, str):
        raise ValueError(f"detect: got one string of {len(texts_or_ids)} characters, wanted a list of texts")
    if isinstance(texts_or_ids, np.ndarray) and texts_or_ids.ndim == 2:
        return Ragged.from_array(texts_or_ids)
    if len(texts_or_ids) and isinstance(texts_or_ids[0], str):
        if tokenizer is None:
            raise ValueError(
                f"detect: {len(texts_or_ids)} texts came without a tokenizer; pass tokenizer= or token ids"
            )
        encoder = TextEncoder(tokenizer, vocab_size=vocab_size, canonicalize=canonicalize)
        return encoder.encode(texts_or_ids).ids
    return Ragged.from_lists(texts_or_ids)


def detect(
    detector: Evidencer,
    ids: Ragged,
    key: Key | Sequence[Key],
    *,
    prompt_lengths: np.ndarray | int | None = None,
    payload: int = 0,
    dual_key_method: str = "exact",
) -> statistics.Detections:
    """Return scores and p-values of N texts under one key or one each; texts of similar length share a batch."""
    prompt = np.broadcast_to(np.asarray(0 if prompt_lengths is None else prompt_lengths, np.int32), len(ids))
    parts, places = [], []
    for rows, tokens, lengths in batches(ids):
        one = key if isinstance(key, Key) else [key[row] for row in rows]
        found = detector.evidence(tokens, lengths, one, prompt_lengths=prompt[rows], payload=payload)
        how = {"vocab_size": detector.vocab_size, "dual_key_method": dual_key_method}
        parts.append(statistics.score(detector.scheme, found, **how))
        places.append(rows)
    return join(parts, places)


def batches(ids: Ragged) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (rows [B], tokens [B T] int32, lengths [B]) of all texts, grouped by padded length."""
    lengths = ids.lengths
    padded = padded_lengths(lengths, steps=8 if len(ids) >= MANY_TEXTS else 1)
    for width, rows in _groups(padded):
        size = 1 << max(0, int(np.log2(BATCH_TOKENS / width)))
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield part, ids.take(part), lengths[part].astype(np.int32)


def _groups(padded: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (width, rows) with at least FEW_ROWS rows: fewer join the next width, for fewer programs to compile."""
    held = np.zeros(0, np.int64)
    widths = np.unique(padded)
    for width in widths:
        held = np.concatenate([held, np.flatnonzero(padded == width)])
        if len(held) >= FEW_ROWS or width == widths[-1]:
            yield int(width), np.sort(held)
            held = np.zeros(0, np.int64)


def join(parts: Sequence[statistics.Detections], places: Sequence[np.ndarray]) -> statistics.Detections:
    """Return the detections of all rows in order; places are the rows of each part."""
    if not parts:
        none = np.zeros(0)
        whole = none.astype(np.int64)
        return statistics.Detections(none, whole, whole, none, none, none, none, none.astype(object))
    order = np.argsort(np.concatenate(places), kind="stable")
    return statistics.Detections(*(np.concatenate(column)[order] for column in zip(*parts)))


# What the backends share


def checked(tokens: Any, lengths: Any, prompt_lengths: Any, *, vocab_size: int) -> tuple[np.ndarray, ...]:
    """Return tokens [B T], lengths [B], prompt lengths [B] as int32, and zeros behind each text's end.

    Raises:
      ValueError: shapes do not fit, or a token lies outside the vocabulary.
    """
    tokens, lengths = np.asarray(tokens, np.int32), np.asarray(lengths, np.int32)
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise ValueError(f"evidence: tokens {tokens.shape} and lengths {lengths.shape}, wanted [B T] and [B]")
    if lengths.size and (lengths.min() < 0 or lengths.max() > tokens.shape[1]):
        raise ValueError(f"evidence: lengths {lengths.min()}..{lengths.max()} do not fit {tokens.shape[1]} columns")
    prompt = np.broadcast_to(np.asarray(0 if prompt_lengths is None else prompt_lengths, np.int32), lengths.shape)
    if lengths.size and lengths.min() < tokens.shape[1]:
        tokens = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    definition.check_tokens(tokens, vocab_size)
    return tokens, lengths, prompt


def padded_lengths(lengths: np.ndarray, *, steps: int = 8) -> np.ndarray:
    """Return the program length of each text: `steps` sizes from each power of two to the next, at least 16 apart."""
    lengths = np.maximum(np.asarray(lengths, np.int64), 1)
    power = 2 ** np.ceil(np.log2(np.maximum(lengths, 32))).astype(np.int64)
    step = np.maximum(16, power // (2 * steps))
    return -(-lengths // step) * step


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape that a batch is padded to: rows to a power of two, at least 8."""
    return max(8, 1 << max(0, rows - 1).bit_length()), int(padded_lengths(np.array([columns]))[0])


def key_arrays(scheme: Any, key: Key | Sequence[Key], rows: int, extra: int = 0) -> np.ndarray:
    """Return the halves of each row's key as uint32 [K 2 B], `extra` zero rows behind; K = 2 for a dual-key scheme.

    Raises:
      ValueError: neither one key nor one for each row.
    """
    keys = [key] if isinstance(key, Key) else list(key)
    if len(keys) not in (1, rows):
        raise ValueError(f"evidence: {len(keys)} keys for {rows} texts, wanted one key or one for each text")
    dual = getattr(scheme, "dual_key_alpha", 0.0) > 0
    pairs = [definition.generation_keys(scheme, one) if dual else (one,) for one in keys]
    halves = np.array([[one.halves for one in pair] for pair in pairs], np.uint32).transpose(1, 2, 0)
    return np.pad(np.broadcast_to(halves, (*halves.shape[:2], rows)), ((0, 0), (0, 0), (0, extra)))


def unigram_lists(
    scheme: Any, key: Key | Sequence[Key], rows: int, cache: dict[Key, np.ndarray], *, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the green lists bool [K V] of the distinct keys, and the list of each row int32 [B]; fill the cache."""
    keys = [key] if isinstance(key, Key) else list(key)
    for one in set(keys) - set(cache):
        cache[one] = definition.unigram_list(scheme.gamma, one, vocab_size)
    distinct = list(dict.fromkeys(keys))
    index = np.array([distinct.index(one) for one in keys], np.int32)
    return np.stack([cache[one] for one in distinct]), np.resize(index, rows)
