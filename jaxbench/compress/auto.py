"""Compress texts with trained weights, at once or as a stream.

    compressor = AutoCompressor.from_pretrained("rfcc-base-8x")
    result = compressor.compress(text)

A text is read in chunks of 256 tokens, each by one call of the same program, so a text that arrives in pieces has
bit-identical vectors to the same text as a whole.
"""

from __future__ import annotations

import dataclasses
import re
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from jaxbench.compress import artifact
from jaxbench.compress.config import TAGS, CompressorConfig, group_positions
from jaxbench.compress.document import CompressionResult
from jaxbench.lora import config as lora
from jaxbench.pretrained import weights
from jaxbench.pretrained.tokenizer import Tokenizer, load_tokenizer

NAME = re.compile(r"rfcc-base-(\d+)x")


class Prompt(NamedTuple):
    """Inputs of a Generator: Generator(...)([ids], vectors=vectors, ...)."""

    ids: list[int]  # token ids; ids past the vocabulary are vectors
    vectors: Float32[np.ndarray, "M D"]


class Encoded(NamedTuple):
    """Tokens of a text."""

    ids: list[int]
    starts: list[int]  # index of each token's first character


class Chunk(NamedTuple):
    """A chunk of one of several texts."""

    text: int  # index of the text
    first: int  # index of the chunk's first token in the text


class Made(NamedTuple):
    """Vectors of a part of a text."""

    vectors: Float32[np.ndarray, "M D"]
    starts: Int64[np.ndarray, " M"]  # index of the first character that each stands for
    positions: Int32[np.ndarray, " M"]  # of each, in tokens of the text


@dataclasses.dataclass(frozen=True)
class AutoCompressor:
    """A trained encoder and its tokenizer, at one ratio."""

    config: CompressorConfig
    ratio: int  # tokens per vector
    tokenizer: Tokenizer
    model_sha256: str  # of the decoder
    id: str  # of the compressor's weights
    tags: Float32[np.ndarray, "tags D"]
    adapters: Mapping[str, np.ndarray]  # of the decoder, by its parameters' names; empty = the decoder is unchanged
    about: Mapping[str, Any]  # what the weights were trained with
    encode: Callable[[np.ndarray, np.ndarray], np.ndarray]  # tokens [B T], groups [B M] of chunks -> vectors [B M D]

    @classmethod
    def from_pretrained(
        cls, name: str = "rfcc-base-8x", *, file: str | Path | None = None, model: str | None = None,
        precision: str = "bfloat16", twin: types.ModuleType | None = None,
    ) -> AutoCompressor:  # fmt: skip
        """Load a compressor, rfcc-base-2x, -4x, -8x, -16x or -32x; all use one set of weights.

        Args:
          file: weights made by `compress.py train`; None = the shipped ones.
          model: the decoder that they were trained for; None = the default model.
          precision: of products, float32 or bfloat16.
          twin: torch_ref.compress.compressor, to compute in PyTorch; None = Flax.

        Raises:
          ValueError: the name is unknown, or the file is missing, damaged or for another decoder.
        """
        ratio = check_name(name, file)
        checkpoint = weights.load_checkpoint(model)
        trained = artifact.load(file, checkpoint)
        return cls.from_weights(trained, checkpoint, load_tokenizer(model), ratio, precision, twin)

    @classmethod
    def from_weights(
        cls, trained: artifact.Trained, checkpoint: weights.Checkpoint, tokenizer: Tokenizer, ratio: int,
        precision: str = "bfloat16", twin: types.ModuleType | None = None,
    ) -> AutoCompressor:  # fmt: skip
        """Make a compressor from loaded weights."""
        params = {name: value for name, value in trained.params.items() if name.startswith(("encoder.", "connector."))}
        params["embed.embedding"] = checkpoint.params["embed.embedding"]
        if twin is None:
            from jaxbench.compress import compressor as twin
        encode = twin.chunk_encoder(trained.config, params, dtype=precision)
        tags, decoder = trained.params["tags.embedding"], "decoder."
        adapters = {
            name.removeprefix(decoder): value for name, value in trained.params.items() if name.startswith(decoder)
        }
        return cls(
            trained.config, ratio, tokenizer, trained.model_sha256, trained.id, tags, adapters, trained.about, encode
        )  # fmt: skip

    def with_ratio(self, ratio: int) -> AutoCompressor:
        """Return the same weights at another ratio.

        Raises:
          ValueError: the ratio is not one of theirs.
        """
        self.config.check_ratio(ratio)
        return dataclasses.replace(self, ratio=ratio)

    def reader(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Parameters of the decoder that reads vectors: its own ones with the adapters merged."""
        if self.config.lora is None:
            return dict(params)
        return lora.merged(self.config.adapted, {**params, **self.adapters})

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.tokenizer.encode(text, add_special=False))

    def get_compression_ratio(self, text: str) -> float:
        """Tokens per vector that a text would have: the ratio, or less if the last group is not full."""
        count = self.count_tokens(text)
        return count / max(1, -(-count // self.ratio))

    def compress(self, text: str) -> CompressionResult:
        """Compress a text.

        Raises:
          ValueError: it has no tokens.
        """
        stream = StreamingCompressor(self)
        stream.add_chunk(text)
        return stream.finish()

    def check(self, result: CompressionResult) -> None:
        """Check that a compressed text was made with these weights, for this decoder.

        Raises:
          ValueError: it was not.
        """
        for what, theirs, own in (
            ("decoder", result.model_sha256, self.model_sha256), ("compressor", result.compressor_id, self.id),
        ):  # fmt: skip
            if theirs != own:
                raise ValueError(f"compressed text: made for {what} {theirs[:12]}, this is {own[:12]}; compress again")

    def prompt(self, result: CompressionResult, text: str, *, tag: str = "continue") -> Prompt:
        """Make one prompt of a compressed text, a tag and plain text.

        Args:
          tag: the decoder's task: reconstruct, continue or answer.

        Raises:
          ValueError: the vectors are for another decoder or from another compressor, or the tag is unknown.
        """
        if tag not in TAGS[:-1]:
            raise ValueError(f"compressor: tag={tag!r}; wanted one of {', '.join(TAGS[:-1])}")
        self.check(result)
        size, vectors = self.config.decoder.vocab_size, np.concatenate([result.vectors, self.tag(TAGS.index(tag))])
        ids = [*range(size, size + len(vectors)), *self.tokenizer.encode(text, add_special=False)]
        return Prompt(ids, vectors.astype(np.float32))

    def tag(self, index: int) -> Float32[np.ndarray, "P D"]:
        """Vectors of a tag, by its index in TAGS."""
        return self.tags[self.config.tag(index)]

    def inputs_embeds(self, prompt: Prompt, embedding: np.ndarray) -> Float32[np.ndarray, "T D"]:
        """A prompt as rows of embeddings, for a decoder that takes these: Hugging Face's generate(inputs_embeds=...).

        Args:
          embedding: the decoder's table of token embeddings as stored; Gemma's rows are scaled here, as vectors are.
        """
        scale = np.float32(self.config.decoder.embedding_scale)
        return np.concatenate([embedding * scale, prompt.vectors]).astype(np.float32)[prompt.ids]

    def chunk(self, ids: Int32[np.ndarray, " T"]) -> tuple[Float32[np.ndarray, "M D"], Int32[np.ndarray, " M"]]:
        """Vectors of at most a chunk of tokens, and the position of each in the chunk."""
        [made] = self.chunks([ids])
        return made

    def chunks(self, parts: Sequence[Int32[np.ndarray, " T"]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The same for several chunks in one call; vectors differ by rounding from those of each chunk alone."""
        groups = np.stack([group_positions(len(ids), self.ratio, self.config.chunk) for ids in parts])
        padded = np.full((len(parts), self.config.chunk), -1, np.int32)
        for i, ids in enumerate(parts):
            padded[i, : len(ids)] = ids
        found = self.encode(padded, groups)
        return [(vectors[own >= 0], own[own >= 0]) for vectors, own in zip(found, groups)]

    def compress_all(self, texts: Sequence[str], *, batch: int = 8) -> list[CompressionResult]:
        """Compress texts, `batch` chunks of any of them at once; `processing_time` is each text's share of the total.

        Raises:
          ValueError: a text has no tokens, or batch is below 1.
        """
        if batch < 1:
            raise ValueError(f"compress: batch={batch}; wanted 1 at least")
        started, size = time.perf_counter(), self.config.chunk
        encoded = [Encoded(*self.tokenizer.encode_with_places(text)) for text in texts]
        for i, each in enumerate(encoded):
            if not each.ids:
                raise ValueError(f"compress: text {i} has {len(each.ids)} tokens; wanted at least one")
        chunks = [Chunk(i, first) for i, each in enumerate(encoded) for first in range(0, len(each.ids), size)]
        made: list[list[Made]] = [[] for _ in texts]
        for start in range(0, len(chunks), batch):
            now = chunks[start : start + batch]
            parts = [np.array(encoded[chunk.text].ids[chunk.first : chunk.first + size], np.int32) for chunk in now]
            parts += [np.zeros(0, np.int32)] * (batch - len(now))  # one shape, one program
            for chunk, (vectors, own) in zip(now, self.chunks(parts)):
                starts = encoded[chunk.text].starts[chunk.first : chunk.first + size : self.ratio]
                made[chunk.text].append(Made(vectors, np.array(starts, np.int64), chunk.first + own))
        seconds, all_tokens = time.perf_counter() - started, sum(len(each.ids) for each in encoded)
        return [
            self.result(
                Made(*map(np.concatenate, zip(*own))), len(text), len(each.ids), seconds * len(each.ids) / all_tokens
            )
            for text, own, each in zip(texts, made, encoded)
        ]

    def result(self, made: Made, characters: int, tokens: int, seconds: float) -> CompressionResult:
        """Make the result of a text from its vectors and its numbers of characters and tokens."""
        spans = np.stack([made.starts, np.append(made.starts, characters)[1:]], axis=1)
        return CompressionResult(
            made.vectors, spans, made.positions, self.ratio, tokens, seconds, self.model_sha256, self.id
        )  # fmt: skip


def joined(prompts: Sequence[Prompt], vocab_size: int) -> tuple[list[list[int]], Float32[np.ndarray, "M D"] | None]:
    """Join prompts for one call of a Generator: their ids, and one table of all their vectors; None = no vectors."""
    ids, count = [], 0
    for prompt in prompts:
        ids.append([token + count if token >= vocab_size else token for token in prompt.ids])
        count += len(prompt.vectors)
    return ids, np.concatenate([prompt.vectors for prompt in prompts if len(prompt.vectors)]) if count else None


def check_name(name: str, file: str | Path | None = None) -> int:
    """Return the ratio in a compressor's name, which must be one of a weights file's (None = the shipped one).

    Raises:
      ValueError: the name is unknown, or the file is missing or damaged.
    """
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"compressor: {name!r}; wanted rfcc-base-Nx with N one of 2, 4, 8, 16, 32")
    ratio, known = int(found[1]), artifact.describe(file)["ratios"]
    if ratio not in known:
        raise ValueError(f"compressor: {name} has ratio={ratio}; wanted one of {', '.join(map(str, known))}")
    return ratio


COUNTS = ("characters", "tokens", "vectors", "seconds")  # of a stream


class StreamingCompressor:
    """Compress a text that arrives in pieces; text that has been compressed is no longer held."""

    def __init__(self, compressor: AutoCompressor):
        self.compressor = compressor
        self._can_cut = can_cut(compressor.tokenizer)
        self._pieces: list[str] = []  # text that is not tokenised yet
        self._ids: list[int] = []  # tokens that are not compressed yet
        self._starts: list[int] = []  # index in the whole text of each token's first character
        self.characters = self.tokens = self.vectors = 0  # characters tokenised, tokens compressed, vectors made
        self.seconds = 0.0  # spent so far
        self._parts: list[Made] = []

    def add_chunk(self, text: str) -> int:
        """Add text and return the number of vectors so far. A chunk is compressed once its 256 tokens are final."""
        started = time.perf_counter()
        last = "".join(self._pieces[-2:])[-2:]  # a cut behind them would have been made before
        if self._can_cut and (place := safe_cut(last + text)):
            whole = "".join([*self._pieces, text])
            cut = len(whole) - len(last + text) + place
            self._tokenise(whole[:cut])
            self._pieces = [whole[cut:]]
        elif text:
            self._pieces.append(text)
        self._compress(len(self._ids) // self.compressor.config.chunk * self.compressor.config.chunk)
        self.seconds += time.perf_counter() - started
        return self.vectors

    def finish(self) -> CompressionResult:
        """Compress the rest and return the vectors of all added text, except those already taken.

        Raises:
          ValueError: it has no tokens.
        """
        self.close()
        return self.compressor.result(self.take(), self.characters, self.tokens, self.seconds)

    def close(self) -> None:
        """Compress the rest of the text.

        Raises:
          ValueError: the whole text has no tokens.
        """
        started = time.perf_counter()
        self._tokenise("".join(self._pieces))
        self._pieces = []
        self._compress(len(self._ids))
        self.seconds += time.perf_counter() - started
        if not self.vectors:
            raise ValueError(f"compress: the text has {self.tokens} tokens; wanted at least one")

    def take(self) -> Made:
        """Return the vectors made since the last call; they are no longer held."""
        parts, self._parts = self._parts, []
        width = self.compressor.config.decoder.d_model
        none = Made(np.zeros((0, width), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int32))
        return Made(*map(np.concatenate, zip(none, *parts)))

    def state(self) -> dict[str, Any]:
        """Return all state but vectors as JSON values, from which `resumed` continues."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return counts | {"text": "".join(self._pieces), "ids": self._ids, "starts": self._starts}

    @classmethod
    def resumed(cls, compressor: AutoCompressor, state: Mapping[str, Any]) -> StreamingCompressor:
        """Make a stream that resumes from another's state."""
        stream = cls(compressor)
        for name in COUNTS:
            setattr(stream, name, state[name])
        stream._pieces = [state["text"]] if state["text"] else []
        stream._ids, stream._starts = list(state["ids"]), list(state["starts"])
        return stream

    def _tokenise(self, text: str) -> None:
        ids, starts = self.compressor.tokenizer.encode_with_places(text)
        self._ids += ids
        self._starts += [self.characters + start for start in starts]
        self.characters += len(text)

    def _compress(self, count: int) -> None:
        """Compress the first `count` tokens that are not compressed yet."""
        size, ratio = self.compressor.config.chunk, self.compressor.ratio
        for first in range(0, count, size):
            ids = np.array(self._ids[first : min(first + size, count)], np.int32)
            starts = np.array(self._starts[first : first + len(ids)], np.int64)
            vectors, places = self.compressor.chunk(ids)
            self._parts.append(Made(vectors, starts[::ratio], self.tokens + places))
            self.tokens += len(ids)
            self.vectors += len(vectors)
        del self._ids[:count], self._starts[:count]


def safe_cut(text: str) -> int:
    """Return the last index at which cutting a text does not change its tokens; 0 = none.

    That is before a single space between two non-space characters: tokenizers that `can_cut` start a word there.
    """
    at = len(text)
    while (at := text.rfind(" ", 0, at)) > 0:
        if at + 1 < len(text) and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return 0


def can_cut(tokenizer: Tokenizer) -> bool:
    """True if the two parts of a text cut at a `safe_cut` have the tokens of the whole.

    False for the SentencePiece kind that prepends a space to every text: a part would begin with two spaces. Also where
    an added token takes the space behind it (`rstrip`), or has one inside.
    """
    added = tokenizer.core.get_added_tokens_decoder().values()
    if any(token.rstrip or " " in token.content.strip() for token in added):
        return False
    whole, *parts = (tokenizer.encode(text, add_special=False) for text in ("a b", "a", " b"))
    return whole == sum(parts, [])
