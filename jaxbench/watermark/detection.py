"""Detection: texts or token ids to p-values, independent of the backend that computes the evidence (S file).

Axis letters: B texts of one batch, T tokens, N all texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxbench.watermark import reference, significance
from jaxbench.watermark.config import num_payloads, parse_scheme
from jaxbench.watermark.green_lists import lists_of
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes.contract import Scheme, SchemeLike
from jaxbench.watermark.texts import Ragged, TextEncoder

MAX_DEVICE_LENGTH = 4096  # tokens; longer texts are sorted on the host instead of comparing all pairs of positions
FEW_ROWS = 128
MANY_TEXTS = 2048  # from this many texts on, tighter padding is worth compiling more programs
BATCH_TOKENS = 2**18  # padded tokens per call: fits the cache and keeps the devices busy
MAX_VOCAB = 2**24  # tokens: sixteen times the largest vocabularies; unigram's list has one entry for each


class NumpyDetector:
    """A scheme's evidence by the numpy reference, without compilation or device. Device detectors derive from it."""

    def __init__(self, scheme: SchemeLike, *, vocab_size: int, green_lists: Any = None):
        self.scheme, self.vocab_size = checked_scheme(scheme, vocab_size), vocab_size
        self.green_lists = lists_of(self.scheme, vocab_size=vocab_size) if green_lists is None else green_lists
        self._fixed_lists: dict[Key, Bool[np.ndarray, " V"]] = {}

    def evidence(
        self,
        tokens: Int[np.ndarray, "B T"],
        lengths: Int[np.ndarray, " B"],
        key: Key | Sequence[Key],
        *,
        prompt_lengths: Int[np.ndarray, " B"] | int | None = None,
        payload: Int[np.ndarray, " B"] | int = 0,
    ) -> reference.Evidence:
        """Return the words of the tokens and which of them are scored; see reference.evidence.

        Raises:
          ValueError: a token lies outside the vocabulary.
        """
        return self._compute(key, tokens, lengths, prompt_lengths, payload)

    def _compute(self, key: Any, tokens: Any, lengths: Any, prompt: Any, payload: Any) -> reference.Evidence:
        return reference.evidence(
            self.scheme, key, tokens, lengths, vocab_size=self.vocab_size, prompt_lengths=prompt,
            payload=payload if isinstance(payload, int) else np.asarray(payload)[:, None],
            green_lists=self.green_lists,
        )  # fmt: skip

    def _lists_of(
        self, key: Key | Sequence[Key], rows: int
    ) -> tuple[Bool[np.ndarray, "K V"], Int[np.ndarray, " B"]] | None:
        """Return the distinct keys' lists and each row's index into them; None if the scheme has no fixed list."""
        if not self.scheme.has_fixed_list:
            return None
        keys = [key] if isinstance(key, Key) else list(key)
        distinct, lists = list(dict.fromkeys(keys)), self._fixed_lists
        lists |= {key: self.scheme.green_list(key, self.vocab_size) for key in distinct if key not in lists}
        index = np.array([distinct.index(key) for key in keys], np.int32)
        return np.stack([lists[key] for key in distinct]), np.resize(index, rows)


def compiled_form(scheme: Scheme) -> Any:
    """Return the scheme with all fields that its words do not depend on (biases, scores) at their defaults.

    Programs are compiled for this form, so that schemes that differ only in those fields share them.
    """
    return type(scheme)(**{name: getattr(scheme, name) for name in scheme.word_fields})


def as_ids(texts_or_ids: Any, tokenizer: Any, *, vocab_size: int, canonicalize: bool = True) -> Ragged:
    """Convert strings, lists of ids, an array [B T] of ids, or Ragged to Ragged.

    Raises:
      ValueError: strings without a tokenizer, a tokenizer whose vocabulary is larger than the detector's, or a text
        that is not a list of ids.
    """
    if isinstance(texts_or_ids, Ragged):
        return texts_or_ids
    if isinstance(texts_or_ids, str):
        raise ValueError(f"detect: got one string of {len(texts_or_ids)} characters, wanted a list of texts")
    if getattr(texts_or_ids, "ndim", 0) == 2:
        return Ragged.from_array(_whole(texts_or_ids, ndim=2))
    texts_or_ids = list(texts_or_ids)
    if any(isinstance(item, str) for item in texts_or_ids):
        if tokenizer is None:
            raise ValueError(
                f"detect: {len(texts_or_ids)} texts came without a tokenizer; pass tokenizer= or token ids"
            )
        if not all(isinstance(item, str) for item in texts_or_ids):
            kinds = sorted({type(item).__name__ for item in texts_or_ids})
            raise ValueError(f"detect: got {' and '.join(kinds)} in one list, wanted texts or lists of token ids")
        encoder = TextEncoder(tokenizer, vocab_size=vocab_size, canonicalize=canonicalize)
        return encoder.encode(texts_or_ids).ids
    return Ragged.from_lists([_whole(item) for item in texts_or_ids])


def detect(
    detector: NumpyDetector,
    ids: Ragged,
    key: Key | Sequence[Key],
    *,
    prompt_lengths: np.ndarray | int | None = None,
    payload: int | None = None,
) -> significance.Detections:
    """Return scores and p-values of N texts under one key, or one key per text; texts of similar length share a batch.

    Args:
      payload: the message, if it is known before the texts are seen. If unset, every message that the scheme can carry
        is tried and the likeliest is returned, -1 for a text without a scored token. Its p-values are those of `some
        message is there`, corrected for all messages tried (significance.any_of); statistic and z-score are those of
        that message alone.

    Raises:
      ValueError: the scheme has no such payload, or keys or prompt lengths do not fit the texts.
    """
    limit = num_payloads(detector.scheme)
    if payload is not None and not (_is_whole_number(payload) and 0 <= payload < limit):
        raise ValueError(f"detect: payload={payload!r}, wanted 0 <= payload < {limit} for this scheme, a whole number")
    key, prompt = checked_keys(key, len(ids)), checked_prompts(prompt_lengths, len(ids))
    payload = payload if payload is None else int(payload)
    parts, places = [], []
    for rows, tokens, lengths in batches(ids):
        keys = key if isinstance(key, Key) else [key[row] for row in rows]
        if payload is None and limit > 1:
            parts.append(_any_payload(detector, keys, tokens, lengths, prompt[rows]))
        else:
            evidence = detector.evidence(tokens, lengths, keys, prompt_lengths=prompt[rows], payload=payload or 0)
            scores = significance.score(detector.scheme, evidence, vocab_size=detector.vocab_size)
            parts.append(scores if limit == 1 else scores._replace(payload=np.full(len(rows), payload, np.int64)))
        places.append(rows)
    return join(parts, places)


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def checked_keys(key: Any, num_texts: int) -> Key | list[Key]:
    """Check one key, or one key per text; the message never shows a wrong value, since it may be a secret.

    Raises:
      ValueError: it is neither.
    """
    if isinstance(key, Key):
        return key
    if not isinstance(key, Iterable) or isinstance(key, str | bytes):
        raise ValueError(f"detect: key is of type {type(key).__name__} (not shown), wanted a Key, or one for each text")
    keys = list(key)
    odd = next((i for i, each in enumerate(keys) if not isinstance(each, Key)), None)
    if odd is not None:
        raise ValueError(f"detect: key[{odd}] is of type {type(keys[odd]).__name__} (not shown), wanted a Key")
    if len(keys) != num_texts:
        raise ValueError(
            f"detect: key has {len(keys)} keys for {num_texts} texts, wanted one Key, or one for each text"
        )
    return keys


def checked_prompts(given: Any, num_texts: int) -> Int[np.ndarray, " N"]:
    """Return the number of unscored tokens of each text, from one number or one number per text.

    Raises:
      ValueError: not whole numbers from 0 to 2**31 - 1, or not one number or one per text.
    """
    try:
        lengths = np.asarray(0 if given is None else given)
    except (ValueError, OverflowError):  # a ragged list
        lengths = np.asarray(str(given))
    if lengths.ndim > 1 or (lengths.ndim == 1 and len(lengths) != num_texts):
        raise ValueError(
            f"detect: prompt_lengths of shape {lengths.shape} for {num_texts} texts, wanted one number of tokens, or "
            "one for each text"
        )
    if lengths.size and lengths.dtype.kind not in "iu":
        raise ValueError(f"detect: prompt_lengths={str(given)[:60]}, wanted whole numbers of tokens")
    odd = lengths[(lengths < 0) | (lengths >= 2**31)]
    if odd.size:
        raise ValueError(f"detect: prompt_lengths holds {odd.flat[0]}, wanted a number of tokens from 0 to {2**31 - 1}")
    return np.broadcast_to(lengths.astype(np.int32), num_texts)


def _any_payload(detector: NumpyDetector, key: Any, tokens: Any, lengths: Any, prompt: Any) -> Any:
    """Return detections of the likeliest payload of each text [B T], with p-values corrected for all payloads.

    The randomised p-value is the smallest over all payloads, then corrected: where discrete p-values tie, that of the
    chosen payload alone would not be uniform.
    """
    limit, rows = num_payloads(detector.scheme), np.arange(len(tokens))
    # one call takes all payloads of few texts, or few payloads of many texts
    together = max(1, min(limit, BATCH_TOKENS // max(1, tokens.size)))
    candidates = []  # the likeliest payload of each text in each call
    for start in range(0, limit, together):
        payloads = np.arange(start, min(limit, start + together))
        size = len(payloads)
        evidence = detector.evidence(
            np.tile(tokens, (size, 1)), np.tile(lengths, size), key if isinstance(key, Key) else list(key) * size,
            prompt_lengths=np.tile(prompt, size), payload=np.repeat(payloads, len(rows)),
        )  # fmt: skip
        scores = significance.score(detector.scheme, evidence, vocab_size=detector.vocab_size)
        scores = scores._replace(payload=np.repeat(payloads, len(rows)))
        candidates.append(_likeliest(scores, size))
    best = _likeliest(significance.Detections(*map(np.concatenate, zip(*candidates))), len(candidates))
    names = ("p_value", "mid_p", "randomized_p")
    corrected = {name: significance.any_of(getattr(best, name), limit) for name in names}
    return best._replace(payload=np.where(best.num_scored > 0, best.payload, -1), **corrected)


def _likeliest(scores: significance.Detections, size: int) -> significance.Detections:
    """Return each text's detection with the smallest p (ties: the first) of `size` concatenated sets of the texts."""
    table = significance.Detections(*(column.reshape(size, -1) for column in scores))
    at = table.p_value.argmin(axis=0)
    best = significance.Detections(*(np.take_along_axis(column, at[None], axis=0)[0] for column in table))
    return best._replace(randomized_p=table.randomized_p.min(axis=0))


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
    """Yield (width, rows): fewer than FEW_ROWS rows join the next width, so that fewer programs are compiled."""
    held = np.zeros(0, np.int64)
    widths = np.unique(padded)
    for width in widths:
        held = np.concatenate([held, np.flatnonzero(padded == width)])
        if len(held) >= FEW_ROWS or width == widths[-1]:
            yield int(width), np.sort(held)
            held = np.zeros(0, np.int64)


def join(parts: Sequence[significance.Detections], places: Sequence[np.ndarray]) -> significance.Detections:
    """Concatenate parts into detections of all rows, in order; `places` has the row numbers of each part."""
    if not parts:
        none = np.zeros(0)
        whole = none.astype(np.int64)
        return significance.Detections(none, whole, whole, whole, none, none, none, none, none.astype(object))
    order = np.argsort(np.concatenate(places), kind="stable")
    return significance.Detections(*(np.concatenate(column)[order] for column in zip(*parts)))


# Shared by the backends


def checked_scheme(scheme: SchemeLike, vocab_size: int) -> Any:
    """Return the scheme that a name, a mapping or a scheme stands for, checked against a vocabulary size.

    Raises:
      ValueError: an unknown scheme, a vocabulary size outside 2..MAX_VOCAB, lists of no token, or more payloads than
        tokens.
    """
    scheme = parse_scheme(scheme)
    if not isinstance(vocab_size, (int, np.integer)) or not 2 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"detect: vocab_size={vocab_size!r}, wanted a whole number from 2 to {MAX_VOCAB:,}")
    if scheme.has_list_words and int(scheme.gamma * vocab_size) == 0:
        raise ValueError(
            f"detect: scheme {scheme.scheme} with gamma={scheme.gamma:g} has lists of none of {vocab_size} tokens, so "
            f"that p is 1 for every text; wanted at least {1 / vocab_size:.3g}"
        )
    if num_payloads(scheme) > vocab_size:
        raise ValueError(
            f"detect: scheme {scheme.scheme} with payload_bits={scheme.payload_bits} has more payloads than the "
            f"vocabulary of {vocab_size} has tokens; lower payload_bits"
        )
    return scheme


def _whole(ids: Any, ndim: int = 1) -> np.ndarray:
    """Return token ids as an int32 array of exactly `ndim` axes: a batch with one text is not a text."""
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):  # a list in the list
        array = np.asarray(str(ids))
    fits = array.dtype.kind in "iu" and -(2**31) <= array.min(initial=0) and array.max(initial=0) < 2**31
    if array.ndim != ndim or (array.size and not fits):
        shape = f" of shape {array.shape}" if array.ndim > 1 else ""
        raise ValueError(f"detect: got {str(ids)[:60]}{shape} as a text, wanted a list of token ids, or a string")
    return array.astype(np.int32, copy=False)


def padded_lengths(lengths: np.ndarray, *, steps: int = 8) -> np.ndarray:
    """Padded length of each text: `steps` sizes from each power of two to the next, at least 16 apart."""
    lengths = np.maximum(np.asarray(lengths, np.int64), 1)
    power = 2 ** np.ceil(np.log2(np.maximum(lengths, 32))).astype(np.int64)
    step = np.maximum(16, power // (2 * steps))
    return -(-lengths // step) * step


def key_arrays(scheme: Scheme, key: Key | Sequence[Key], rows: int, extra: int = 0) -> np.ndarray:
    """Return the halves of each row's key as uint32 [K 2 B], with `extra` zero rows appended; K = 2 for dual keys.

    Raises:
      ValueError: neither one key nor one for each row.
    """
    keys = [key] if isinstance(key, Key) else list(key)
    if len(keys) not in (1, rows):
        raise ValueError(f"evidence: {len(keys)} keys for {rows} texts, wanted one key or one for each text")
    is_dual = reference.is_dual_key(scheme)
    pairs = [reference.generation_keys(scheme, key) if is_dual else (key,) for key in keys]
    halves = np.array([[key.halves for key in pair] for pair in pairs], np.uint32).transpose(1, 2, 0)
    return np.pad(np.broadcast_to(halves, (*halves.shape[:2], rows)), ((0, 0), (0, 0), (0, extra)))
