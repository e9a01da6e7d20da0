"""Detect hallucinations: how likely an answer is to say what its context does not, and which sentences do (S file).

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
    voting,
)
from jaxbench.hallucination.follow import Follower
from jaxbench.hallucination.group import Group, LoadedReader, read_group
from jaxbench.hallucination.layout import PromptArrays
from jaxbench.hallucination.response_features import ResponseFeatures
from jaxbench.hallucination.verdict import Passages, Sentence, Span, Verdict
from jaxbench.hallucination.where import Where
from jaxbench.text.lines import has_surrogate


class HallucinationDetector:
    """A saved detector and its reader."""

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        model: str | None = None,
        package: str = "jaxbench",
        where: Where | None = None,
    ):
        """path: what `hallucination.py fit` or `vote` wrote, several such files of `fit` (a verdict is then that of
        their majority), or the folder of `export`, which holds its reader; model: the reader (file, folder or hub
        id), None = the default one; package: whose modules run, JAX's or PyTorch's; where: the device, such as
        Where("gpu"), and the blocks whose weights stay in host memory, None = the backend's choice.

        Raises:
          ValueError: the file is not a detector of this version, or was fitted with another model; several files
            cannot vote (voting.check, saved_detector.joined); or, for a folder of `export`, a model is named, or it
            holds programs and `where` is not a plain CPU.
        """
        from jaxbench.pretrained import weights

        self._package, self._where = package, where
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        self._folder, self._bundle = Path(paths[0]).absolute(), None
        if len(paths) > 1 or not self._folder.is_dir():
            self.saved = saved_detector.load_several(paths)
            saved_detector.check_model(self.saved, weights.checksum(model), name=model or "the default model")
            self.settings = self.saved.settings.model_copy(update={"model": model})
            return
        if model is not None:
            raise ValueError(f"--model={model}: {paths[0]} holds its own reader; leave the model out")
        self._bundle = portable.load(self._folder)
        if self._is_program and where is not None and (where.device != "cpu" or where.offload_layers):
            raise ValueError(f"{where}: {paths[0]} holds programs, which run where their runtime puts them")
        self.saved = saved_detector.load(self._folder / portable.DETECTOR)
        self.settings = portable.settings(self._folder, self._bundle, self.saved)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: every process loads tokenizer and reader for itself."""
        loaded = ("limits", "reader", "token_reader")
        return {name: value for name, value in vars(self).items() if name not in loaded}

    @property
    def _is_program(self) -> bool:
        """Whether the reader is exported programs of fixed sizes."""
        return self._bundle is not None and self._bundle.sizes is not None

    @functools.cached_property
    def limits(self) -> lengths.ReaderLimits:
        """The reader's limits, without loading the model."""
        if not self._is_program:
            return lengths.limits(self.settings)
        from jaxbench.pretrained.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(str(self._folder / portable.TOKENIZER))
        return lengths.ReaderLimits(tokenizer, self._bundle.sizes.window)

    @functools.cached_property
    def reader(self) -> LoadedReader:
        """The reader, loaded on first use.

        So a detector is built, or rejected, at once, and can be sent to other processes.
        """
        if self._is_program:
            loaded = portable.load_reader(self._folder, self._bundle)
        else:
            loaded = extract.load_reader(self.settings, package=self._package, where=self._where)
        return _remembering(loaded)

    @functools.cached_property
    def token_reader(self) -> Any:
        """The detector's tuned reader, a function from a group to its responses' token log-odds; None without one."""
        tuned = self.saved.detector.tuned
        if tuned is None:
            return None
        how = {"package": self._package, "where": self._where}
        return tuned_reading.load_reader(self.settings, tuned.config, tuned.trained, **how)

    def by_device(self) -> list[HallucinationDetector]:
        """Return a detector for each device of `where`, with equal verdicts; threads may use one each concurrently."""
        if self._where is None or self._where.devices == 1 or self._is_program:
            return [self]
        found = []
        for loaded in extract.load_readers(self.settings, package=self._package, where=self._where):
            found.append(copy.copy(self))
            found[-1].reader = _remembering(loaded)
            found[-1].token_reader = self.token_reader
        return found

    def detect(self, context: str, question: str, response: str) -> Verdict:
        """Verdict on a response to a question about a context.

        Raises:
          ValueError: context is empty; the response has no letter and no digit, or more tokens than half the window; a
            text has a lone surrogate.
        """
        (verdict,) = self.detect_group(context, question, (response,))
        return verdict

    def detect_group(self, context: str, question: str, responses: Sequence[str]) -> list[Verdict]:
        """Verdicts on responses to one prompt, which is read once for all of them.

        Raises:
          ValueError: as `detect`.
        """
        for response in responses:
            for name, text in (("context", context), ("question", question), ("response", response)):
                if has_surrogate(text):
                    raise ValueError(f"{name}: {text[:40]!a} has a lone surrogate, which is no Unicode text")
            if response.strip() and not any(letter.isalnum() for letter in response):
                raise ValueError(f"response: {response[:40]!r} has no letter and no digit; there is nothing to judge")
        group = Group(context, question, tuple(responses), tuple(map(str, range(len(responses)))))
        read = read_group(group, *self.reader, self.settings)
        tuned = () if self.token_reader is None else self.token_reader(group)
        found, lexicon, passages = {}, lexical.Lexicon(context), Passages(context)
        for key, features in read:
            number = int(key)
            found[key] = self._verdict(responses[number], lexicon, passages, features, tuned[number : number + 1])
        return [found[key] for key in group.keys]

    def follow(self, context: str, question: str) -> Follower:
        """Return a Follower, which judges an answer sentence by sentence while it is written."""
        return Follower(functools.partial(self.detect, context, question))

    def _verdict(
        self, response: str, lexicon: lexical.Lexicon, passages: Passages, features: ResponseFeatures,
        tuned: Sequence[np.ndarray],
    ) -> Verdict:  # fmt: skip
        read = tuple(pooled.pool(features, response, lexicon, by_sentence=by) for by in (False, True))
        tokens = token_inputs.tokens(features, response, lexicon)
        inputs = detectors.Inputs.join([read], [tokens])._replace(tuned=tuple(tuned))
        found = voting.judge(self.saved.detector, inputs, package=self._package)
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
        """Return the character spans that the token classifier marks."""
        spans = []
        for probability in found:  # the one response's; none without a token classifier
            for start, end in token_scoring.spans(offsets, probability, self.saved.detector.token_threshold, response):
                inside = (offsets[:, 0] < end) & (start < offsets[:, 1])
                number = max(i for i, part in enumerate(parts) if i == 0 or part.start <= start)
                passage, text = parts[number].passage, response[start:end]
                spans.append(Span(start, end, text, float(probability[inside].max()), number, passage))
        return tuple(spans)


class RememberingReader:
    """A FeatureReader that caches the last two prompts it read, one with its context and one without."""

    def __init__(self, reader: Any):
        self.scores, self.surprise = reader.scores, reader.surprise
        self._reader = reader
        self._read: dict[tuple[bytes, ...], Any] = {}  # by the prompts' arrays, most recently used last

    def read_prompt(self, prompts: PromptArrays) -> Any:
        """Read prompts, or return the cached result."""
        key = tuple(array.tobytes() for array in prompts)
        if key not in self._read and len(self._read) == 2:
            del self._read[next(iter(self._read))]  # before reading: a prompt of 8,192 tokens takes 190 MB
        self._read[key] = self._read.pop(key) if key in self._read else self._reader.read_prompt(prompts)
        return self._read[key]


def _remembering(loaded: LoadedReader) -> LoadedReader:
    """Return the same reader with a cache of prompts."""
    return loaded._replace(feature_reader=RememberingReader(loaded.feature_reader))
