"""Tokenizers that need no vocabulary file: one id per byte, or one id per character (S file).

Both encode a text of any length to an array at once, and know how many UTF-8 bytes each id stands for, which converts
nats per token to bits per byte. Saved, they are Hugging Face tokenizers that give the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int, Int64, UInt8, UInt32

if TYPE_CHECKING:
    from jaxbench.pretrained.tokenizer import Tokenizer

BYTES = 256
END = "<|endoftext|>"  # of a saved byte tokenizer, whose id ends a document
KINDS = ("byte", "character")


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; 256 ends a document."""

    eos_id: int | None = BYTES
    vocab_size = BYTES + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of a text: its UTF-8 bytes."""
        return list(text.encode())

    def encode_array(self, text: str) -> UInt8[np.ndarray, " T"]:
        """Token ids of a text: its UTF-8 bytes."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; end tokens are dropped, invalid UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids if int(i) != BYTES).decode(errors="replace")

    def byte_lengths(self) -> Int64[np.ndarray, " V"]:
        """Number of UTF-8 bytes of each token id."""
        return np.array([1] * BYTES + [0], np.int64)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json: a byte-level BPE (Radford et al. 2019) without merges."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Core

        core = Core(models.BPE({name: i for i, name in enumerate(_byte_names())}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([AddedToken(END, special=True)])
        _save(core, self.eos_id, folder)


class CharacterTokenizer:
    """One id per character, in order of code points; no end token (nanoGPT's data/shakespeare_char/prepare.py)."""

    eos_id: int | None = None

    def __init__(self, characters: str):
        """Keep the vocabulary: every character once, sorted.

        Raises:
          ValueError: characters are repeated, not sorted, or none.
        """
        if not characters or list(characters) != sorted(set(characters)):
            raise ValueError(
                f"tokenizer: {len(characters)} characters must be distinct and sorted: {characters[:40]!r}"
            )
        self.characters = characters
        self.vocab_size = len(characters)
        self._codes = _codes(characters)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> Int64[np.ndarray, " T"]:
        """Token ids of a text.

        Raises:
          ValueError: a character is not in the vocabulary; the message gives its position.
        """
        codes = _codes(text)
        ids = np.minimum(np.searchsorted(self._codes, codes), self.vocab_size - 1)
        wrong = np.flatnonzero(self._codes[ids] != codes)
        if len(wrong):
            raise ValueError(
                f"tokenizer: character {text[wrong[0]]!r} at place {wrong[0]} is none of the {self.vocab_size} known "
                "ones; build the vocabulary from all texts, or use the byte tokenizer"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return "".join(self.characters[int(i)] for i in ids)

    def byte_lengths(self) -> Int64[np.ndarray, " V"]:
        """Number of UTF-8 bytes of each token id."""
        return np.array([len(c.encode()) for c in self.characters], np.int64)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json: one word per character."""
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Core

        core = Core(models.WordLevel({character: i for i, character in enumerate(self.characters)}))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        core.decoder = decoders.Fuse()
        _save(core, self.eos_id, folder)


def encode_array(tokenizer: Any, text: str) -> Int[np.ndarray, " T"]:
    """Token ids of a text by any tokenizer, without the end token."""
    if hasattr(tokenizer, "encode_array"):
        return tokenizer.encode_array(text)
    return np.asarray(tokenizer.encode(text), np.int64)


def byte_lengths(tokenizer: ByteTokenizer | CharacterTokenizer | Tokenizer) -> Int64[np.ndarray, " V"] | None:
    """Number of UTF-8 bytes of each token id; None if this kind of tokenizer does not determine it.

    A byte-level BPE writes one printable character per byte; control tokens stand for no text.
    """
    if hasattr(tokenizer, "byte_lengths"):
        return tokenizer.byte_lengths()
    from tokenizers import decoders

    if not isinstance(tokenizer.core.decoder, decoders.ByteLevel):
        return None
    special = tokenizer.core.get_added_tokens_decoder()
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for token, index in tokenizer.core.get_vocab(with_added_tokens=True).items():
        if index not in special:
            lengths[index] = len(token)
        elif not special[index].special:
            lengths[index] = len(token.encode())
    return lengths


def _byte_names() -> list[str]:
    """Printable character that byte-level BPE writes for each byte, in the order of bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def _save(core: Any, eos_id: int | None, folder: str | Path) -> None:
    from jaxbench.pretrained.tokenizer import Tokenizer

    Tokenizer(core, eos_id=eos_id, bos_id=None, chat_template=None).save(folder)


def _codes(text: str) -> UInt32[np.ndarray, " T"]:
    """Code points of a text."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
