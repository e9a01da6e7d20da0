"""A worker of the watermark benchmark: detection by one engine, or generation.

Started as `python -m jaxbench.watermark.study.benchmark_worker ENGINE THREADS`. Engines: numpy, jax and torch, which
detect on one core; generation measures what a watermark adds to a decode step. The protocol: measure/worker.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxbench.measure import worker
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.watermark import config, detection, green_lists, identify, reference, significance, texts
from jaxbench.watermark.detector import features
from jaxbench.watermark.keys import Key
from jaxbench.watermark.texts import Ragged

NUMBER = 0x6A617862656E6368  # an arbitrary key: detection costs the same under every key
KEY = Key(NUMBER)


def session_of(engine: str, _: int) -> Any:
    """Return the session of an engine.

    Raises:
      ValueError: there is no such engine.
    """
    if engine == "generation":
        from jaxbench.watermark.study.decode_overhead import Generation

        return Generation()
    if engine not in ("numpy", "jax", "torch"):
        raise ValueError(f"worker: engine={engine!r} is unknown, wanted numpy, jax, torch or generation")
    return Ours(engine)


class Ours:
    """jaxbench's detection by one engine."""

    def __init__(self, engine: str):
        self.engine = engine

    def start(self, *, tokenizer: str, vocab_size: int, path: str | None = None) -> dict:
        """Load the tokenizer, and read the texts if a path is given."""
        self.vocab_size = vocab_size
        self.encoder = texts.TextEncoder(load_tokenizer(tokenizer), vocab_size=vocab_size)
        self.plain_encoder = texts.TextEncoder(load_tokenizer(tokenizer), vocab_size=vocab_size, canonicalize=False)
        if path is not None:
            with open(path) as file:
                content = json.load(file)
            self.texts, self.ids = content["texts"], content["ids"]
        self.detectors: dict[str, Any] = {}
        return {}

    def measure(self, *, scheme: dict, part: str, count: int, batch_size: int, repeats: int, keys: int = 1) -> dict:
        """Time one part of detection over the first `count` texts in calls of `batch_size`.

        Parts: ids (evidence and statistics), text (all), tokenise (with canonicalisation), split (without), evidence,
        statistics, identify (which of `keys` keys), neural (evidence and the trained detector's network).
        """
        chunks = [slice(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
        call = self._call(part, scheme, chunks, keys)
        return {**worker.timed(call, repeats), "texts": count, "tokenizer": self.encoder.engine}

    def memory(self, *, scheme: dict, part: str, texts: list, ids: list, keys: int = 1) -> dict:
        """Run one call of a detection over all texts twice in this fresh process; return its memory.

        held_bytes: resident with libraries, tokenizer and texts; peak_bytes: the highest of the process, compiling
        included; steady_bytes: the highest during the second call.
        """
        self.texts, self.ids = texts, ids
        self._make()  # imports the engine
        held = worker.resident_bytes()
        call = self._call(part, scheme, [slice(0, len(ids))], keys)
        return {"held_bytes": held, **worker.peaks(call)}

    def detect(self, *, scheme: dict, ids: list) -> dict:
        """Return p-values of texts given as ids, and z and counts of a detector that also counts repeated positions."""
        detector, rows = self._detector(scheme), []
        for text, p_value in zip(ids, detection.detect(detector, Ragged.from_lists(ids), KEY).p_value):
            tokens, length = np.array([text]), np.array([len(text)])
            evidence = reference.evidence(
                detector.scheme, KEY, tokens, length, vocab_size=self.vocab_size, green_lists=detector.green_lists,
                deduplicate=False,
            )  # fmt: skip
            repeated = significance.score(detector.scheme, evidence, vocab_size=self.vocab_size)
            values = (repeated.score[0], repeated.num_green[0], repeated.num_scored[0], p_value)
            rows.append(dict(zip(("z", "green", "scored", "p_value"), map(float, values))))
        return {"detections": rows}

    def _call(self, part: str, scheme: dict, chunks: list[slice], keys: int) -> Callable[[], Any]:
        """Return the call that is timed for a part."""
        detector, texts = self._detector(scheme), [self.texts[chunk] for chunk in chunks]
        ids = [Ragged.from_lists(self.ids[chunk]) for chunk in chunks]
        batches = [(tokens, lengths) for part in ids for _, tokens, lengths in detection.batches(part)]
        if part == "ids":
            return lambda: [detection.detect(detector, part, KEY) for part in ids]
        if part == "text":
            return lambda: [detection.detect(detector, self.encoder.encode(part).ids, KEY) for part in texts]
        if part in ("tokenise", "split"):
            encoder = self.encoder if part == "tokenise" else self.plain_encoder
            return lambda: [encoder.encode(part) for part in texts]
        if part == "evidence":
            return lambda: [detector.evidence(tokens, lengths, KEY) for tokens, lengths in batches]
        if part == "statistics":
            evidence = [detector.evidence(tokens, lengths, KEY) for tokens, lengths in batches]
            return lambda: [significance.score(detector.scheme, text, vocab_size=self.vocab_size) for text in evidence]
        if part == "identify":
            family = [identify.Candidate(f"key {i}", detector.scheme, Key(NUMBER + i)) for i in range(keys)]
            options = {"vocab_size": self.vocab_size, "make_detector": self._make()}
            return lambda: [identify.identify(family, part, **options) for part in ids]
        from jaxbench.watermark.detector import neural_detection

        shape = features.NeuralConfig()  # untrained: the weights' values do not change the work
        score = neural_detection.Scorer(shape, features.initial_params(shape, seed=0))

        def judge() -> None:
            for tokens, lengths in batches:
                evidence = detector.evidence(tokens, lengths, KEY)
                labels = np.zeros(len(tokens), np.float32)
                score(features.Arrays(tokens, features.evidence(detector.scheme, evidence), evidence.scored, labels))

        return judge

    def _detector(self, scheme: dict) -> Any:
        name = json.dumps(scheme, sort_keys=True)
        if name not in self.detectors:
            parsed = config.parse_scheme(scheme)
            lists = green_lists.lists_of(parsed, vocab_size=self.vocab_size)
            if lists is not None:
                lists.bits()
            self.detectors[name] = self._make()(parsed, vocab_size=self.vocab_size, green_lists=lists)
        return self.detectors[name]

    def _make(self) -> Any:
        """Return the engine's detector class."""
        if self.engine == "numpy":
            Detector = detection.NumpyDetector
        elif self.engine == "jax":
            from jaxbench.watermark.detect import Detector
        else:
            import torch

            from torch_ref.watermark.detect import Detector

            torch.set_num_threads(1)
        return Detector


if __name__ == "__main__":
    worker.serve(session_of)
