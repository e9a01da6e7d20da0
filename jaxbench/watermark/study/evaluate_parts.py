"""Shared by the stages of an evaluation: models, keys, detectors; models and detectors are made at first use.

Axis letters: N texts, L lengths, of which the last is the whole text. No twin: it calls the parts of one backend.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench import sample
from jaxbench.generation import decoder, flax_decoder
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.watermark import canonical, detect, reference, significance
from jaxbench.watermark.attack.rewrite import Rewriter
from jaxbench.watermark.keys import Key
from jaxbench.watermark.logits_processor import Watermark
from jaxbench.watermark.schemes.contract import Scheme
from jaxbench.watermark.study import evaluate_models, quality
from jaxbench.watermark.study.evaluate_config import UNMARKED, Evaluate
from jaxbench.watermark.texts import Ragged


class Choices(NamedTuple):
    """Kernels and number types for the two kinds of decoding in an evaluation."""

    generate: decoder.Choice = decoder.XLA
    rewriting: decoder.Choice = decoder.XLA

    def suffix(self, settings: Evaluate) -> str:
        """Return what the choices add to the configuration's id."""
        both = self.generate.suffix(settings.generate.dtype), self.rewriting.suffix(settings.rewriting.dtype)
        return "".join(dict.fromkeys(both))


def choose(settings: Evaluate, options: decoder.Options = decoder.Options("xla")) -> Choices:
    """Choose the kernels and number types for an evaluation's decoding.

    Raises:
      ValueError: they are not available, or do not support the model or the batch sizes.
    """
    found = []
    for place, own, model in (
        ("generate", settings.generate, settings.model),
        ("rewriting", settings.rewriting, settings.rewriting.model),
    ):
        read_config = functools.partial(evaluate_models.read_config, model)
        choice = decoder.choose(options, "cpu", dtype=own.dtype, config=read_config)
        decoder.check_rows(choice, own.batch_size, f"{place}.batch_size")
        found.append(choice)
    return Choices(*found)


class Parts:
    """The models, keys and detectors of one evaluation."""

    def __init__(self, settings: Evaluate, workdir: Path, *, choices: Choices | None = None):
        """Load the tokenizer and derive the keys; models are loaded later."""
        self.settings, self.workdir, self.choices = settings, workdir, choices or choose(settings)
        self.tokenizer = load_tokenizer(evaluate_models.resolve(settings.model, workdir))
        rewriting = settings.rewriting
        self.rewriter = Rewriter(
            evaluate_models.resolve(rewriting.model, workdir), choice=self.choices.rewriting,
            batch_size=rewriting.batch_size,
        )  # fmt: skip
        base, numbers = Key.from_passphrase(settings.passphrase), range(settings.num_keys)
        self.keys = {name: [base.derive(f"{name}/{i}") for i in numbers] for name in settings.schemes}
        self.bench, self.scorer = functools.cache(self._bench), functools.cache(self._scorer)

    def key(self, arm: str, row: int) -> Key:
        """Return the key of a row of an arm."""
        return self.keys[arm][row % self.settings.num_keys]

    def row_keys(self, arm: str, count: int) -> list[Key]:
        """Return the keys of the first `count` rows of an arm."""
        return [self.key(arm, row) for row in range(count)]

    @functools.cached_property
    def model(self) -> Any:
        """The generating model."""
        return self._load(self.settings.model, self.choices.generate)

    @functools.cached_property
    def own_scorer(self) -> quality.Scorer:
        """Scorer of quality under the generating model itself."""
        return quality.Scorer(self.model, batch_size=self.settings.quality.batch_size)

    @property
    def vocab_size(self) -> int:
        """Width of the generating model's logits."""
        return self.model.vocab_size

    def processor(self, arm: str) -> Watermark:
        """Return a scheme's logits processor."""
        return Watermark(self.settings.schemes[arm], vocab_size=self.vocab_size)

    def generator(self, arm: str) -> tuple[sample.Generator, Watermark | None]:
        """Return an arm's generator and its processor (None: unmarked)."""
        s = self.settings.generate
        processor = None if arm == UNMARKED else self.processor(arm)
        sampling = sample.SamplingParams(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p)
        chain = () if processor is None else (processor,)
        eos_id = self.tokenizer.end_ids
        return sample.Generator(self.model, eos_id=eos_id, sampling=sampling, processors=chain), processor

    def _bench(self, arm: str) -> Bench:
        scheme, canonicalize = self.settings.schemes[arm], self.settings.detect.canonicalize
        return Bench(scheme, tokenizer=self.tokenizer, vocab_size=self.vocab_size, canonicalize=canonicalize)

    def _scorer(self, model: str, dtype: str) -> quality.Scorer:
        judge = decoder.XLA._replace(weights=dtype)  # the judge scores and does not decode
        if (model, judge) == (self.settings.model, self.choices.generate):
            return self.own_scorer  # avoids loading a model twice
        return quality.Scorer(self._load(model, judge), batch_size=self.settings.quality.batch_size)

    def _load(self, spec: str, choice: decoder.Choice) -> Any:
        return flax_decoder.load(evaluate_models.resolve(spec, self.workdir), choice).model


class Bench:
    """One scheme's detector over texts or token ids."""

    def __init__(self, scheme: Scheme, *, tokenizer: Any, vocab_size: int, canonicalize: bool = True):
        """Make the detector."""
        self.scheme, self.vocab_size = scheme, vocab_size
        self._tokenizer, self._canonicalize = tokenizer, canonicalize
        self._detector = detect.Detector(scheme, vocab_size=vocab_size)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids that the detector sees: of canonical text (if set), without special tokens."""
        if self._canonicalize:
            texts = [canonical.canonicalize(text).text for text in texts]
        return self._tokenizer.encode_batch(list(texts), add_special=False)

    def evidence(self, token_ids: Sequence[Sequence[int]], key: Key | Sequence[Key]) -> reference.Evidence:
        """Return the evidence of texts under one key, or one key per text."""
        ids = Ragged.from_lists(token_ids)
        return self._detector.evidence(ids.take(np.arange(len(ids))), ids.lengths.astype(np.int32), key)

    def score(self, token_ids: Sequence[Sequence[int]], key: Key | Sequence[Key]) -> significance.Detections:
        """Return scores and p-values of texts under one key, or one key per text."""
        return significance.score(self.scheme, self.evidence(token_ids, key), vocab_size=self.vocab_size)

    def at_lengths(
        self,
        token_ids: Sequence[Sequence[int]],
        key: Key | Sequence[Key],
        lengths: Sequence[int],
        *,
        cut: int,
    ) -> dict[str, list[list[Any]]]:
        """Test the beginning of each text at each length, and, in a last column, all of it up to `cut` tokens.

        A position's evidence depends only on what precedes it, so that one pass serves every length. For a length that
        exceeds the text, p_values and mid_p [N L] are nan, and num_scored [N L] is 0.
        """
        sizes = np.array([len(ids) for ids in token_ids])
        missing = np.full((len(token_ids), len(lengths) + 1), np.nan)
        columns = {"p_values": missing, "mid_p": missing.copy(), "num_scored": np.zeros(missing.shape, np.int64)}
        if len(sizes):
            longest = max([cut, *lengths])
            whole = self.evidence([ids[:longest] for ids in token_ids], key)
            for column, length in enumerate([*lengths, cut]):
                part = reference.Evidence(*(None if x is None else x[:, :length] for x in whole))
                result = significance.score(self.scheme, part, vocab_size=self.vocab_size)
                kept = sizes >= (length if column < len(lengths) else 0)
                for values, new in zip(columns.values(), (result.p_value, result.mid_p, result.num_scored)):
                    values[kept, column] = new[kept]
        return {name: values.tolist() for name, values in columns.items()}
