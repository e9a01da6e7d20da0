"""Human text cut into passages of equal length in tokens: null samples for calibration and training (S file)."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench.text import packing
from jaxbench.text.lines import has_surrogate

ENCODED = 64  # texts that are encoded together; those after the last passage are not


class Passages(NamedTuple):
    """Passages of equal length, and which document each one is from."""

    tokens: np.ndarray  # [N T] int32
    documents: np.ndarray  # [N] int32, so that a split can keep documents whole


def read_texts(path: str | Path | None = None, *, key: str = "text") -> list[str]:
    """Texts of a file, or of the packaged default text.

    Besides what packing.load_text reads: a .json or .json.gz file with a list of objects, each with a text at `key`.

    Raises:
      ValueError: no such file, damaged content, or an entry without text; the message names file and entry.
    """
    if path is None or not str(path).endswith((".json", ".json.gz")):
        return packing.load_text(path)
    path = Path(path).expanduser()
    try:
        content = path.read_bytes()
        entries = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"passages: cannot read {path} as JSON ({error})") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"passages: {path} holds {type(entries).__name__} {str(entries)[:40]}, wanted a list with entries"
        )
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
            raise ValueError(f"passages: {path} entry {i} has no {key!r} string: {str(entry)[:60]}")
        if has_surrogate(entry[key]):
            raise ValueError(
                f"passages: {path} entry {i}: {key!r} holds a lone surrogate, which is no Unicode text: "
                f"{entry[key][:60]!a}"
            )
    return [entry[key] for entry in entries]


def cut(
    tokenizer: Any, texts: Sequence[str], *, num_tokens: int, max_passages: int, per_text: int | None = None
) -> Passages:
    """Cut at most max_passages passages of num_tokens each, from the start of every text on.

    per_text limits the passages per text (1 = its beginning); texts that are too short give none.

    Raises:
      ValueError: no text is long enough.
    """
    if num_tokens < 1 or max_passages < 1:
        raise ValueError(f"passages: num_tokens={num_tokens} and max_passages={max_passages} must be at least 1")
    rows, documents = [], []
    for start in range(0, len(texts), ENCODED):
        if len(rows) >= max_passages:
            break
        group = tokenizer.encode_batch(list(texts[start : start + ENCODED]), add_special=False)
        for i, ids in enumerate(group, start):
            count = min(len(ids) // num_tokens, per_text or len(ids))
            rows += [ids[j * num_tokens : (j + 1) * num_tokens] for j in range(count)]
            documents += [i] * count
    if not rows:
        raise ValueError(f"passages: none of {len(texts)} texts has {num_tokens} tokens; ask for fewer tokens")
    return Passages(np.array(rows[:max_passages], np.int32), np.array(documents[:max_passages], np.int32))
