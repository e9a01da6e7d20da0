"""How much each token or chunk of an answer draws on its context and on the reader's own knowledge (S file).

scorer = Scorer()
tokens = scorer.tokens(context, question, response)
tokens.external[token, layer, head], tokens.parametric[token, layer], tokens.texts(response)

A unit is a token or a chunk. A chunk is a sentence of the answer or a fixed number of tokens; both of its scores are
the means over its tokens. Axis letters: U units, L layers, N heads.

Source: Sun et al. 2025, arXiv:2410.11414, equations 2, 3 and 5. Differs from the paper: there, the external score of
a chunk is the cosine of two embeddings by a separate model (BGE): of the chunk, and of the chunk of the prompt that a
head attends to most. Here the reader is the only model. The parametric score of a chunk is a mean as in the paper; the
paper's released code sums, so that long chunks score high.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from jaxbench.hallucination import encoding, extract, sentences
from jaxbench.hallucination.group import Group, LoadedReader, read_group
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.hallucination.response_features import ResponseFeatures
from jaxbench.hallucination.where import Where

EVERY_TOKEN = ReaderSettings(lens_tokens=None)  # the default reader, with parametric scores of every token


class UnitScores(NamedTuple):
    """Scores of one response's units, in the response's order."""

    external: Float32[np.ndarray, "U L N"]  # external context score of every head, -1 to 1
    parametric: Float32[np.ndarray, "U L"]  # parametric knowledge score of every layer, nats, 0 to ln 2; NaN = no lens
    spans: Int[np.ndarray, "U 2"]  # characters of the response, start and end
    num_tokens: Int[np.ndarray, " U"]  # of the unit
    token_ids: Int[np.ndarray, " U"] | None  # of tokens; None = chunks
    num_cut: int  # tokens of the context, from its end, that did not fit the reader's window

    def texts(self, response: str) -> list[str]:
        """Return the text of each unit; a character that several tokens share is in each of them."""
        return [response[start:end] for start, end in self.spans]


class Scorer:
    """A reader that scores one answer at a time."""

    def __init__(
        self, settings: ReaderSettings = EVERY_TOKEN, *, package: str = "jaxbench", where: Where | None = None
    ):
        """package: whose modules run, JAX's or PyTorch's; where: None = the backend's choice.

        Unless settings.lens_tokens is None, tokens without a lens have NaN as parametric scores.
        """
        self.settings, self._how = settings, {"package": package, "where": where}

    @functools.cached_property
    def reader(self) -> LoadedReader:
        """The reader, loaded at the first answer."""
        return extract.load_reader(self.settings, **self._how)

    def tokens(self, context: str, question: str, response: str) -> UnitScores:
        """Scores of every token of a response to a question about a context: external [U L N], parametric [U L].

        Raises:
          ValueError: context or response is empty, or the response has more tokens than half the window.
        """
        ((_, features),) = read_group(Group(context, question, (response,), ("",)), *self.reader, self.settings)
        return of_tokens(features, encoding.encode_response(self.reader.tokenizer, response).ids)

    def chunks(self, context: str, question: str, response: str, *, chunk_tokens: int | None = None) -> UnitScores:
        """Scores of every chunk of a response: external [U L N], parametric [U L].

        Raises:
          ValueError: as `tokens` and `of_chunks`.
        """
        return of_chunks(self.tokens(context, question, response), response, chunk_tokens=chunk_tokens)


def of_tokens(features: ResponseFeatures, token_ids: Sequence[int]) -> UnitScores:
    """Scores of a response's tokens.

    External scores are stored as float16, in steps of 0.0005 at most.
    """
    external = np.moveaxis(features["external"], -1, 0).astype(np.float32)
    parametric = np.full((len(external), features["parametric"].shape[1]), np.nan, np.float32)
    parametric[features["parametric_slots"]] = features["parametric"]
    ones = np.ones(len(external), np.int64)
    return UnitScores(
        external, parametric, features["offsets"], ones, np.array(token_ids, np.int64), features["num_cut"].item()
    )


def of_chunks(tokens: UnitScores, response: str, *, chunk_tokens: int | None = None) -> UnitScores:
    """Mean scores over the tokens of each chunk; a sentence without a token is left out.

    tokens: from `of_tokens`. chunk_tokens: tokens per chunk, the last one may have fewer; None = chunks are sentences.
    A chunk's parametric score is the mean over those of its tokens that have one, or NaN if none has.

    Raises:
      ValueError: the response has no letter and no digit, or chunk_tokens is not positive.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: wanted at least one token")
    if not any(letter.isalnum() for letter in response):
        raise ValueError(f"response: {response[:40]!r} has no letter and no digit; there is nothing to score")
    if chunk_tokens is None:
        spans = np.array(sentences.sentences(response))
        part = sentences.tokens_of(spans, tokens.spans)
    else:
        part = np.arange(len(tokens.spans)) // chunk_tokens
        ends = [tokens.spans[part == i] for i in range(part[-1] + 1)]
        spans = np.array([(each[:, 0].min(), each[:, 1].max()) for each in ends])
    kept = np.unique(part)
    mine = [part == i for i in kept]
    external = np.stack([tokens.external[here].mean(0, dtype=np.float64) for here in mine])
    parametric = np.stack([_mean_of_known(tokens.parametric[here]) for here in mine])
    count = np.array([here.sum() for here in mine])
    scores = (external.astype(np.float32), parametric.astype(np.float32))
    return UnitScores(*scores, spans[kept], count, None, tokens.num_cut)


def _mean_of_known(scores: Float32[np.ndarray, "U L"]) -> np.ndarray:
    """Mean over the tokens that have scores [L], NaN if none has."""
    known = scores[np.isfinite(scores).all(1)]
    return known.mean(0, dtype=np.float64) if len(known) else np.full(scores.shape[1], np.nan)
