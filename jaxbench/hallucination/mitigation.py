"""Mitigation by AARF: recompute an answer's risky tokens with more attention and less feed-forward (S file).

A token is first read as usual and scored: H = (m p - alpha e + alpha) / (m + alpha), where e is the mean external score
of the copying heads and p the mean parametric score of the chosen layers, each scaled to 0..1 by its range on other
answers, and clipped. If H > tau, the token is read a second time: the heads' attention weights after the softmax (and
hence their outputs) are multiplied by `attention_factor`, the layers' feed-forward outputs by `feed_factor`. The cache
keeps the result of the second pass. The prompt is read as usual.

Source: Sun et al. 2025, arXiv:2410.11414, section 3.4 ("Add Attention Reduce FFN"); defaults of the released code.
Differs from the paper: H is scaled to 0..1, so that tau means the same for every model.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic
from jaxtyping import Bool, Float

from jaxbench import config, outputs, store
from jaxbench.config import TransformerConfig
from jaxbench.hallucination import encoding, layout

Range = tuple[float, float]
# Keys that answering adds to a row; none is a field of a verdict, so that `detect` accepts the file.
ADDED = ("response", "ended", "num_tokens", "num_reweighted", "num_prompt_cut")


class Mitigation(config.Base):
    """Which tokens of an answer are recomputed, and how."""

    heads: tuple[tuple[int, int], ...] = pydantic.Field(min_length=1)  # copying heads: layer and head, from 0
    layers: tuple[int, ...] = pydantic.Field(min_length=1)  # whose feed-forward outputs are scaled, from 0
    external_range: Range  # of the heads' mean external score, -1 to 1: what counts as 0 and as 1
    parametric_range: Range  # of the layers' mean parametric score, nats
    attention_factor: float = pydantic.Field(default=1.2, gt=0)  # the paper's alpha_2
    feed_factor: float = pydantic.Field(default=0.8, gt=0)  # the paper's beta_2
    tau: float | None = pydantic.Field(default=0.6, ge=0, le=1)  # recompute above it; 1 = no token, None = every token
    alpha: float = pydantic.Field(default=0.6, gt=0)  # weight of the external score
    m: float = pydantic.Field(default=1.0, gt=0)  # weight of the parametric score
    share: float = pydantic.Field(default=0.1, gt=0, le=1)  # of the context's tokens that counts as attended to
    style: Literal["plain", "chat"] = "chat"  # the text around the context
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # weights and products

    @pydantic.model_validator(mode="after")
    def _check(self) -> Mitigation:
        for name in ("external_range", "parametric_range"):
            low, high = getattr(self, name)
            if low >= high:
                raise ValueError(f"{name}={low}, {high}: wanted the lower end first")
        for name in ("heads", "layers"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: one is named twice")
        return self

    def score(self, external: Any, parametric: Any) -> Any:
        """Hallucination score of tokens, 0 to 1, from arrays of any framework."""
        scaled = [
            ((part - low) / (high - low)).clip(0, 1)
            for part, (low, high) in ((external, self.external_range), (parametric, self.parametric_range))
        ]
        return (self.m * scaled[1] - self.alpha * scaled[0] + self.alpha) / (self.m + self.alpha)


class Factors(NamedTuple):
    """Factors of heads' outputs and of layers' feed-forward outputs; 1 = unchanged."""

    heads: Float[np.ndarray, "L N"]
    layers: Float[np.ndarray, " L"]


def factors(settings: Mitigation, model: TransformerConfig) -> Factors:
    """Factors of a model's heads and layers.

    Raises:
      ValueError: the model has no such head or layer.
    """
    for layer, head in settings.heads:
        if not (0 <= layer < model.num_layers and 0 <= head < model.num_heads):
            raise ValueError(
                f"heads: [{layer}, {head}] is not in a model of {model.num_layers} layers of {model.num_heads} heads, "
                "both counted from 0"
            )
    for layer in settings.layers:
        if not 0 <= layer < model.num_layers:
            raise ValueError(f"layers: {layer} is not in a model of {model.num_layers} layers, counted from 0")
    made = Factors(np.ones((model.num_layers, model.num_heads)), np.ones(model.num_layers))
    made.heads[tuple(np.array(settings.heads).T)] = settings.attention_factor
    made.layers[list(settings.layers)] = settings.feed_factor
    return made


class Token(NamedTuple):
    """Result of one decoding step for each row."""

    ids: Any  # [B], the most probable token
    logits: Any  # [B V]
    external: Any  # [B], mean of the heads' external scores; 0 if no score is computed
    parametric: Any  # [B], mean of the layers' parametric scores, nats
    is_reweighted: Any  # [B]


class Answer(NamedTuple):
    """A greedy answer."""

    ids: list[int]  # without the end token
    ended: bool  # with an end token, not at the limit
    external: list[float]  # of every step, including the end token's
    parametric: list[float]
    is_reweighted: list[bool]


def generate(
    answerer: Any, texts: Sequence[layout.Text], *, new_tokens: int, end_ids: Iterable[int], share: float = 0.1
) -> list[Answer]:
    """Answer prompts, one per row, with a backend's Answerer; share: as ReaderSettings.share.

    Raises:
      ValueError: a prompt has no token before its last, or its context is not among the tokens before its last.
    """
    prompts = layout.prompt_arrays(texts, share=share)
    state = answerer.start(prompts, np.array([text.ids[-1] for text in texts], np.int32), new_tokens)
    answers = [Answer([], False, [], [], []) for _ in texts]
    is_open: Bool[np.ndarray, " B"] = np.ones(len(texts), bool)
    ends = list(end_ids)
    for _ in range(new_tokens):
        state, token = answerer.advance(state, is_open)
        for row in np.flatnonzero(is_open):
            answers[row].external.append(float(token.external[row]))
            answers[row].parametric.append(float(token.parametric[row]))
            answers[row].is_reweighted.append(bool(token.is_reweighted[row]))
            if (chosen := int(token.ids[row])) in ends:
                answers[row], is_open[row] = answers[row]._replace(ended=True), False
            else:
                answers[row].ids.append(chosen)
        if not is_open.any():
            break
    return answers


class Answering(NamedTuple):
    """A loaded model that answers."""

    answerer: Any
    tokenizer: Any
    window: int  # tokens of prompt and answer
    settings: Mitigation
    sha256: str  # of the model

    def __call__(self, asked: Sequence[tuple[str, str]], *, new_tokens: int) -> list[tuple[Answer, int]]:
        """Answer (context, question) pairs; return answers, and how many tokens of each context did not fit the window.

        Raises:
          ValueError: a context is empty, or the window has no room for any of it.
        """
        window = self.window - new_tokens
        made = [
            encoding.encode_prompt(self.tokenizer, *each, window=window, style=self.settings.style) for each in asked
        ]
        how = {"new_tokens": new_tokens, "end_ids": self.tokenizer.end_ids, "share": self.settings.share}
        answers = generate(self.answerer, [each.text for each in made], **how)
        return [(answer, each.num_cut) for answer, each in zip(answers, made)]


def load(model: str | None, settings: Mitigation, *, is_on: bool, package: str) -> Answering:
    """Load a model that answers; is_on: with mitigation. package: whose modules run, JAX's or PyTorch's.

    Raises:
      ValueError: the model has no such heads or layers, or is no decoder of plain attention.
    """
    from jaxbench.pretrained import weights
    from jaxbench.pretrained.tokenizer import load_tokenizer

    names = ("transformer", "hallucination.reader", "hallucination.reweighting")
    transformer, reader, reweighting = (importlib.import_module(f"{package}.{name}") for name in names)
    checkpoint = weights.load_checkpoint(model)
    reader.check(checkpoint.config)
    if is_on:
        factors(settings, checkpoint.config)  # reports a bad head before a model is built
    made = transformer.build(checkpoint.config, checkpoint.params, dtype=settings.dtype)
    answerer = reweighting.Answerer(made, settings if is_on else None, config=checkpoint.config)
    return Answering(answerer, load_tokenizer(model), checkpoint.config.max_seq_len, settings, checkpoint.sha256)


def part_file(output: Path, source: str | Path, chosen: Sequence[Any]) -> Path:
    """Path of the partial output, named by input and choices, so that no other run's lines are resumed."""
    stat = Path(source).stat()
    identity = json.dumps([str(Path(source).resolve()), stat.st_size, stat.st_mtime_ns, ADDED, *chosen])
    return output.with_name(f"{output.name}.{hashlib.sha256(identity.encode()).hexdigest()[:12]}.part")


def answer_rows(
    answering: Answering,
    rows: Sequence[Mapping[str, Any]],
    part: Path,
    output: Path,
    *,
    new_tokens: int,
    batch_size: int,
    overwrite: bool = False,
) -> Iterator[int]:
    """Answer rows with context and question, a batch at a time; yield how many rows each batch had.

    A row keeps its keys and gains those of ADDED, which no row should have before. Lines go to `part`, which is renamed
    to `output` when all are done; a killed run resumes after the last whole line.

    Raises:
      ValueError: a row does not fit the window, or something has appeared at the output's path.
    """
    store.cut_short(part)
    for start in range(len(store.rows(part)), len(rows), batch_size):
        batch = rows[start : start + batch_size]
        try:
            found = answering([(row["context"], row["question"]) for row in batch], new_tokens=new_tokens)
        except ValueError as error:
            raise ValueError(f"rows {start + 1} to {start + len(batch)}: {error}") from None
        store.append(part, [{**row, **_added(answering, *answered)} for row, answered in zip(batch, found)])
        yield len(batch)
    outputs.check_file(output, overwrite=overwrite)
    os.replace(part, output)


def _added(answering: Answering, answer: Answer, num_cut: int) -> dict[str, Any]:
    """Return the keys that answering adds to a row, with their values."""
    text, steps = answering.tokenizer.decode(answer.ids), answer.is_reweighted
    return dict(zip(ADDED, (text, answer.ended, len(steps), sum(steps), num_cut), strict=True))
