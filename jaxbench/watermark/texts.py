"""Tokenise texts in bulk (S file).

`fastokens` (extra `fast`) is used if it is installed and agrees with `tokenizers` on probe texts; the ids are the same
either way. Axis letters: N texts, T tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.watermark import canonical

PROBES = (
    "The 12 quick foxes' jumps aren't over;  lazy\n\n\tdogs \u2014 na\u00efve caf\u00e9 \u00bd \u4e00 \U0001f600.",
    " \u00a0x\u200by\u2028z 3.14159  ''' <|im_start|>user\r\n",
    "",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """The ids of N texts, concatenated."""

    ids: np.ndarray  # int32
    offsets: np.ndarray  # int64 [N + 1]; text i is ids[offsets[i]:offsets[i + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text [N]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> Ragged:
        """Concatenate lists or arrays of ids."""
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(ids) for ids in lists], out=offsets[1:])
        parts = [np.asarray(ids, np.int32).reshape(-1) for ids in lists]
        return cls(np.concatenate(parts) if parts else np.zeros(0, np.int32), offsets)

    @classmethod
    def from_array(cls, tokens: np.ndarray) -> Ragged:
        """Take each row of tokens [N T] as a text."""
        rows, columns = tokens.shape
        return cls(np.ascontiguousarray(tokens, np.int32).reshape(-1), np.arange(rows + 1, dtype=np.int64) * columns)

    def text(self, row: int) -> np.ndarray:
        """Return the ids of one text."""
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the ids of some texts as [B T] int32, with zeros after each text's end."""
        lengths = self.lengths[rows]
        width = int(lengths.max(initial=0))
        starts = self.offsets[:-1][rows]
        if len(rows) and (lengths == width).all() and (np.diff(rows) == 1).all():
            return self.ids[starts[0] : starts[0] + width * len(rows)].reshape(len(rows), width)
        tokens = np.zeros((len(rows), width), np.int32)
        inside = np.arange(width) < lengths[:, None]
        places = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        tokens[inside] = self.ids[places]
        return tokens


class Encoded(NamedTuple):
    """Ids, and how many characters of each text canonicalisation changed."""

    ids: Ragged
    num_changed: np.ndarray  # int64 [N]


class TextEncoder:
    """Encodes texts for detection: canonicalised, without special tokens."""

    def __init__(self, tokenizer: Any, *, vocab_size: int | None = None, canonicalize: bool = True, fast: bool = True):
        """Keep the tokenizer: pretrained.tokenizer.Tokenizer, or one of transformers or tokenizers.

        Raises:
          ValueError: it is none of these, or it has more tokens than the detector's vocabulary.
        """
        self._encode_batch, size = _reader(tokenizer)
        if vocab_size is not None:
            check_sizes(size, vocab_size)
        self.canonicalize = canonicalize
        self._fast = _fast_tokenizer(tokenizer) if fast else None

    @property
    def engine(self) -> str:
        """The library that tokenises: fastokens or tokenizers."""
        return "tokenizers" if self._fast is None else "fastokens"

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Tokenise texts."""
        changed = np.zeros(len(texts), np.int64)
        if self.canonicalize:
            canonical_texts = [canonical.canonicalize(text) for text in texts]
            texts = [each.text for each in canonical_texts]
            changed[:] = [each.num_changed for each in canonical_texts]
        if self._fast is None:
            return Encoded(Ragged.from_lists(self._encode_batch(list(texts))), changed)
        return Encoded(_encode_fast(self._fast, texts), changed)


def _reader(tokenizer: Any) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    """Return a function from texts to ids without special tokens, and the vocabulary size with added tokens."""
    if hasattr(tokenizer, "encode_batch") and hasattr(
        tokenizer, "vocab_size"
    ):  # jaxbench.pretrained.tokenizer.Tokenizer
        return lambda texts: tokenizer.encode_batch(texts, add_special=False), tokenizer.vocab_size
    if hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "get_vocab_size"):  # tokenizers.Tokenizer
        core, size = _without_limits(tokenizer), tokenizer.get_vocab_size(with_added_tokens=True)
        return lambda texts: [one.ids for one in core.encode_batch(texts, add_special_tokens=False)], size
    if callable(tokenizer) and hasattr(tokenizer, "added_tokens_encoder"):  # transformers: vocab_size lacks added ones
        plain = functools.partial(
            tokenizer, add_special_tokens=False, padding=False, truncation=False, verbose=False,
            return_attention_mask=False, return_token_type_ids=False,
        )  # fmt: skip
        return lambda texts: plain(texts)["input_ids"] if texts else [], len(tokenizer)
    raise ValueError(
        f"detect: tokenizer is a {type(tokenizer).__name__}, wanted one of jaxbench, transformers or tokenizers; or "
        "pass token ids"
    )


def _without_limits(core: Any) -> Any:
    """Return a tokenizer of `tokenizers` that cuts no text and pads none, as files of tokenizers may ask for.

    The one that is given stays as it is.
    """
    if core.truncation is None and core.padding is None:
        return core
    found = copy.deepcopy(core)
    found.no_truncation()
    found.no_padding()
    if getattr(core, "encode_special_tokens", False):  # which copies lose
        found.encode_special_tokens = True
    return found


def check_sizes(tokenizer_size: int, vocab_size: int) -> None:
    """Raise a ValueError if a tokenizer has more tokens than the detector's vocabulary."""
    if tokenizer_size > vocab_size:
        raise ValueError(
            f"detect: the tokenizer has {tokenizer_size} tokens and the detector's vocabulary {vocab_size}; "
            "use the tokenizer and vocab_size of the model that wrote the texts"
        )


def _encode_fast(core: Any, texts: Sequence[str]) -> Ragged:
    ids, offsets = core.encode_batch_flat(list(texts))
    return Ragged(np.frombuffer(ids, np.uint32).astype(np.int32), np.frombuffer(offsets, np.uint64).astype(np.int64))


def _fast_tokenizer(tokenizer: Any) -> Any:
    """Return a fastokens tokenizer if it is installed, supports this vocabulary, and gives equal ids; else None."""
    core = getattr(tokenizer, "core", None)
    try:
        import fastokens
    except ImportError:
        return None
    if core is None:
        return None
    try:
        fast = fastokens.Tokenizer.from_json_str(core.to_str())
        found = _encode_fast(fast, PROBES)
    except Exception:  # fastokens raises bare exceptions for tokenizer types that it does not support
        return None
    wanted = Ragged.from_lists(tokenizer.encode_batch(PROBES, add_special=False))
    same = np.array_equal(found.ids, wanted.ids) and np.array_equal(found.offsets, wanted.offsets)
    return fast if same else None
