"""Verdicts on answers: how likely each is to say what its context does not, and which sentences do (S file).

detector = HallucinationDetector("detector.safetensors")
verdict = detector.detect(context, question, response)
verdict.is_hallucinated, [sentence.text for sentence in verdict.sentences if sentence.is_flagged]
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxbench.hallucination import detector as detectors
from jaxbench.hallucination import (
    extract,
    lengths,
    lexical,
    pooled,
    portable,
    saved_detector,
    token_inputs,
    token_scoring,
    tuned_reading,
)
from jaxbench.hallucination.follow import Follower
from jaxbench.hallucination.group import Group, read_group
from jaxbench.hallucination.layout import PromptArrays
from jaxbench.hallucination.verdict import Passages, Sentence, Span, Verdict
from jaxbench.hallucination.where import Where


class HallucinationDetector:
    """A saved detector and its reader."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None = None,
        package: str = "jaxbench",
        where: Where | None = None,
    ):
        """path: what `hallucination.py fit` wrote, or the folder of `export`, which holds its reader; model: its reader
        (file, folder or hub id), None = the default one; package: whose modules read; where: the device, Where("gpu"),
        and blocks whose weights lie in the host's memory, None = the backend's own choice.

        Raises:
          ValueError: the file is no detector of this version, was fitted with another model, or has its own.
        """
        from jaxbench.pretrained import weights

        self._package, self._where = package, where
        self._folder, self._bundle = Path(path).absolute(), None
        if not self._folder.is_dir():
            self.saved = saved_detector.load(path)
            saved_detector.check_model(self.saved, weights.checksum(model), name=model or "the default model")
            self.settings = self.saved.settings.model_copy(update={"model": model})
            return
        if model is not None:
            raise ValueError(f"--model={model}: {path} holds its own reader; leave the model out")
        self._bundle = portable.load(self._folder)
        if self._is_program and where is not None and (where.device != "cpu" or where.offload_layers):
            raise ValueError(f"{where}: {path} holds programs, which run where their runtime puts them")
        self.saved = saved_detector.load(self._folder / portable.DETECTOR)
        self.settings = portable.settings(self._folder, self._bundle, self.saved)

    def __getstate__(self) -> dict[str, Any]:
        """What other processes are sent: each loads tokenizer and reader for itself."""
        loaded = ("limits", "reader", "token_reader")
        return {name: value for name, value in vars(self).items() if name not in loaded}

    @property
    def _is_program(self) -> bool:
        """Whether the reader is a program of fixed sizes, for a runtime of its own."""
        return self._bundle is not None and self._bundle.sizes is not None

    @functools.cached_property
    def limits(self) -> tuple[Any, int]:
        """The tokenizer and the window in tokens, without the model."""
        if not self._is_program:
            return lengths.limits(self.settings)
        from jaxbench.pretrained.tokenizer import load_tokenizer

        return load_tokenizer(str(self._folder / portable.TOKENIZER)), self._bundle.sizes.window

    @functools.cached_property
    def reader(self) -> tuple[Any, Any, int]:
        """Its model as a FeatureReader, the tokenizer, the window in tokens; loaded when they are first used.

        So a detector can be made, and refused, at once, and be sent to other processes.
        """
        if self._is_program:
            made, tokenizer, window = portable.load_reader(self._folder, self._bundle)
        else:
            made, tokenizer, window = extract.load_reader(self.settings, package=self._package, where=self._where)
        return RememberingReader(made), tokenizer, window

    @functools.cached_property
    def token_reader(self) -> Any:
        """The tuned reader of a detector that has one, from a group to log-odds of its responses' tokens; or None."""
        tuned = self.saved.detector.tuned
        if tuned is None:
            return None
        how = {"package": self._package, "where": self._where}
        return tuned_reading.load_reader(self.settings, tuned.config, tuned.trained, **how)

    def by_device(self) -> list[HallucinationDetector]:
        """A detector for each device of `where`, with equal verdicts; threads may use one each at once."""
        if self._where is None or self._where.devices == 1 or self._is_program:
            return [self]
        found = []
        for made, *rest in extract.load_readers(self.settings, package=self._package, where=self._where):
            found.append(copy.copy(self))
            found[-1].reader = (RememberingReader(made), *rest)
            found[-1].token_reader = self.token_reader
        return found

    def detect(self, context: str, question: str, response: str) -> Verdict:
        """Verdict on a response to a question about a context.

        Raises:
          ValueError: context is empty; the response has no letter and no digit, or more tokens than half the window.
        """
        (verdict,) = self.detect_group(context, question, (response,))
        return verdict

    def detect_group(self, context: str, question: str, responses: Sequence[str]) -> list[Verdict]:
        """Verdicts on responses to one prompt, which is read once for all of them.

        Raises:
          ValueError: as `detect`.
        """
        for response in responses:
            if response.strip() and not any(letter.isalnum() for letter in response):
                raise ValueError(f"response: {response[:40]!r} has no letter and no digit; there is nothing to judge")
        group = Group(context, question, tuple(responses), tuple(map(str, range(len(responses)))))
        read = read_group(group, *self.reader, self.settings)
        tuned = () if self.token_reader is None else self.token_reader(group)
        found = {}
        for key, features in read:
            number = int(key)
            found[key] = self._verdict(context, responses[number], features, tuned[number : number + 1])
        return [found[key] for key in group.keys]

    def follow(self, context: str, question: str) -> Follower:
        """What judges an answer while it is written, sentence by sentence."""
        return Follower(functools.partial(self.detect, context, question))

    def _verdict(
        self, context: str, response: str, features: dict[str, np.ndarray], tuned: Sequence[np.ndarray]
    ) -> Verdict:
        lexicon = lexical.Lexicon(context)
        read = tuple(pooled.pool(features, response, lexicon, by_sentence=by) for by in (False, True))
        tokens = token_inputs.tokens(features, response, lexicon)
        inputs = detectors.Inputs.join([read], [tokens])._replace(tuned=tuple(tuned))
        found = detectors.judge(self.saved.detector, inputs, package=self._package)
        passages = Passages(context)
        marked = tuple(
            Sentence(
                start, end, response[start:end], float(probability),
                bool(probability >= self.saved.detector.part_threshold), passages.nearest(response[start:end]),
            )
            for (start, end), probability in zip(read[1].spans, found.parts, strict=True)
        )  # fmt: skip
        probability = float(found.probability[0])
        is_hallucinated = probability >= self.saved.detector.threshold
        spans = self._spans(response, marked, tokens.offsets, found.tokens)
        return Verdict(probability, is_hallucinated, marked, spans, int(features["num_cut"]))

    def _spans(
        self, response: str, parts: tuple[Sentence, ...], offsets: np.ndarray, found: tuple[np.ndarray, ...]
    ) -> tuple[Span, ...]:
        """Characters that the token classifier marks."""
        spans = []
        for probability in found:  # of the one response, or of none
            for start, end in token_scoring.spans(offsets, probability, self.saved.detector.token_threshold, response):
                inside = (offsets[:, 0] < end) & (start < offsets[:, 1])
                number = max(i for i, part in enumerate(parts) if i == 0 or part.start <= start)
                passage, text = parts[number].passage, response[start:end]
                spans.append(Span(start, end, text, float(probability[inside].max()), number, passage))
        return tuple(spans)


class RememberingReader:
    """A FeatureReader that keeps the last prompts that it read, one with its context and one without."""

    def __init__(self, reader: Any):
        self.scores, self.surprise = reader.scores, reader.surprise
        self._reader = reader
        self._read: dict[tuple[bytes, ...], Any] = {}  # by the prompts' arrays, the last used one last

    def read_prompt(self, prompts: PromptArrays) -> Any:
        """What the reader made of prompts, now or before."""
        key = tuple(array.tobytes() for array in prompts)
        if key not in self._read and len(self._read) == 2:
            del self._read[next(iter(self._read))]  # in front of the reading: a prompt of 8,192 tokens is 190 MB
        self._read[key] = self._read.pop(key) if key in self._read else self._reader.read_prompt(prompts)
        return self._read[key]
