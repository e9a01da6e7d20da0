"""Cache of detection scores of texts under a key and scheme, shared by all processes (S file).

The cache key of a score is a digest of everything that decides it: scheme, key, vocabulary, prompt, payload, token ids.
The evidence is bit-identical on every backend, so all backends share entries; only the last bit of a sum may come from
another batch's padding. N is the number of texts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import pydantic

from jaxbench.result_cache import ResultCache, ResultCacheConfig
from jaxbench.watermark import detection
from jaxbench.watermark.keys import Key
from jaxbench.watermark.significance import Detections
from jaxbench.watermark.texts import Ragged

FORMAT = 5  # version of entries and of the scores in them; a change of any score needs a new number
_NUMBERS = struct.Struct("<d3q4d")  # the fields of Detections except `reason`
_FLOATS = (0, 4, 5, 6, 7)  # indices of the float fields


def named(given: str | None) -> ResultCacheConfig | None:
    """Return the score cache that --score_cache names.

    Raises:
      ValueError: it is neither "local" nor a Redis address, or the package redis is missing.
    """
    if given is None:
        return None
    try:
        found = ResultCacheConfig() if given == "local" else ResultCacheConfig(url=given)
        found.open()
    except ValueError as error:
        said = error.errors()[0]["msg"] if isinstance(error, pydantic.ValidationError) else str(error)
        raise ValueError(f"--score_cache: {said.removeprefix('Value error, ')}; or `local`") from None
    return found


def detect(
    detector: detection.NumpyDetector,
    ids: Ragged,
    key: Key | Sequence[Key],
    cache: ResultCache | None,
    *,
    prompt_lengths: np.ndarray | int | None = None,
    payload: int | None = None,
) -> tuple[Detections, int]:
    """Return what detection.detect returns, and how many of the N texts were not computed (cached or duplicates).

    Args:
      cache: where scores are looked up and stored; None = every text is computed.

    Raises:
      ValueError: as detection.detect.
    """
    if cache is None or not len(ids):
        return detection.detect(detector, ids, key, prompt_lengths=prompt_lengths, payload=payload), 0
    keys = detection.checked_keys(key, len(ids))
    prompt = detection.checked_prompts(prompt_lengths, len(ids))
    names = _names(detector, ids, keys, prompt, payload)
    rows = [unpacked(entry) for entry in cache.read(names)]
    missing = list({name: i for i, (name, row) in enumerate(zip(names, rows, strict=True)) if row is None}.values())
    if missing:
        texts = Ragged.from_lists([ids.text(i) for i in missing])
        own = keys if isinstance(keys, Key) else [keys[i] for i in missing]
        new = detection.detect(detector, texts, own, prompt_lengths=prompt[missing], payload=payload)
        made = {names[i]: row for i, row in zip(missing, zip(*new, strict=True), strict=True)}
        cache.write({name: packed(row) for name, row in made.items()})
        rows = [made[name] if row is None else row for name, row in zip(names, rows, strict=True)]
    return _joined(rows), len(ids) - len(missing)


def _names(
    detector: detection.NumpyDetector, ids: Ragged, keys: Key | list[Key], prompt: np.ndarray, payload: int | None
) -> list[bytes]:
    """Return the digest of everything that decides each text's score."""
    common = f"{FORMAT} {detector.scheme.scheme} {detector.scheme.model_dump_json()} {detector.vocab_size} {payload}"
    begun = hashlib.blake2b(common.encode(), digest_size=16)
    names = []
    for i in range(len(ids)):
        digest, own = begun.copy(), keys if isinstance(keys, Key) else keys[i]
        digest.update(struct.pack("<2IQ", *own.halves, int(prompt[i])))
        digest.update(np.ascontiguousarray(ids.text(i), "<i4").tobytes())
        names.append(digest.digest())
    return names


def packed(row: Sequence) -> bytes:
    """Pack an entry: numbers in 8 bytes each, then the reason."""
    return _NUMBERS.pack(*(float(v) if i in _FLOATS else int(v) for i, v in enumerate(row[:8]))) + row[8].encode()


def unpacked(entry: bytes | None) -> tuple | None:
    """Unpack the fields of an entry; None if absent or invalid, as other programs may write to the same Redis."""
    if entry is None or len(entry) < _NUMBERS.size:
        return None
    numbers = _NUMBERS.unpack_from(entry)
    if not all(np.isfinite(numbers[i]) for i in _FLOATS) or not all(0 <= p <= 1 for p in numbers[5:]):
        return None
    try:
        return (*numbers, entry[_NUMBERS.size :].decode())
    except UnicodeDecodeError:
        return None


def _joined(rows: Sequence[tuple]) -> Detections:
    columns = list(zip(*rows, strict=True))
    kinds = [np.float64 if i in _FLOATS else np.int64 for i in range(8)]
    return Detections(*(np.array(c, kind) for c, kind in zip(columns, kinds)), np.array(columns[8], object))
