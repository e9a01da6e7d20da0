"""A worker of the watermark benchmark: detection by one engine, or generation.

Started as `python -m jaxbench.bench.watermark_worker ENGINE THREADS`. Engines: numpy, jax and torch are jaxbench's own;
transformers is its WatermarkDetector; generation measures what a watermark adds to a decode step. The protocol is that
of bench/worker.py; detection runs on one core.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxbench.bench import worker

KEY = 0x6A617862656E6368  # any key: detection costs the same under all of them


def main() -> None:
    """Answer requests until stdin closes: argv is the engine and the number of threads."""
    worker.serve(_answers_of)


def _answers_of(engine: str, threads: int) -> Callable[[str, dict], dict]:
    session = session_of(engine)

    def answer(operation: str, request: dict) -> dict:
        if operation.startswith("_") or not hasattr(session, operation):
            raise ValueError(f"worker: unknown operation {operation!r} of {engine}")
        return getattr(session, operation)(**request)

    return answer


def session_of(engine: str) -> Any:
    """Return what answers the requests of an engine."""
    if engine == "generation":
        from jaxbench.bench.watermark_generation import Generation

        return Generation()
    if engine == "transformers":
        return Transformers()
    if engine not in ("numpy", "jax", "torch"):
        raise ValueError(f"worker: engine={engine!r} is unknown, wanted numpy, jax, torch, transformers or generation")
    return Ours(engine)


class Ours:
    """jaxbench's detection by one engine."""

    def __init__(self, engine: str):
        self.engine = engine

    def start(self, *, model: str, vocab_size: int, path: str | None = None) -> dict:
        """Import the engine, load the tokenizer and read the texts, if there are any."""
        from jaxbench.bench import environment
        from jaxbench.tokenizer import load_tokenizer
        from jaxbench.watermark import texts

        self.vocab_size = vocab_size
        self.encoder = texts.TextEncoder(load_tokenizer(model), vocab_size=vocab_size)
        self.plain_encoder = texts.TextEncoder(load_tokenizer(model), vocab_size=vocab_size, canonicalize=False)
        if path is not None:
            with open(path) as file:
                content = json.load(file)
            self.texts, self.ids = content["texts"], content["ids"]
        self.detectors: dict[str, Any] = {}
        return {"versions": environment.versions()}

    def measure(self, *, scheme: dict, part: str, count: int, batch_size: int, repeats: int, keys: int = 1) -> dict:
        """Time one part of detection over the first `count` texts in calls of `batch_size`.

        Parts: ids (evidence and statistics), text (all), tokenise (with canonicalisation), split (without), evidence,
        statistics, identify (which of `keys` keys), neural (evidence and the trained detector's network).
        """
        chunks = [slice(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
        call = getattr(self, f"_{part}")(scheme, chunks, keys)
        return {**worker.timed(call, repeats), "texts": count, "tokenizer": self.encoder.engine}

    def detect(self, *, scheme: dict, ids: list) -> dict:
        """Return p-values of texts given as ids, and what a detector that counts repeated positions too would say."""
        from jaxbench.watermark import detection, reference, statistics

        detector, texts = self._detector(scheme), self._ragged(ids)
        p_values, rows = detection.detect(detector, texts, self._key()).p_value, []
        for row, p_value in enumerate(p_values):
            tokens = texts.take(np.array([row]))
            found = reference.evidence(
                detector.scheme,
                self._key(),
                tokens,
                np.array([tokens.shape[1]]),
                vocab_size=self.vocab_size,
                green_lists=detector.green_lists,
                deduplicate=False,
            )
            all_of_it = statistics.score(detector.scheme, found, vocab_size=self.vocab_size)
            values = (all_of_it.score[0], all_of_it.num_green[0], all_of_it.num_scored[0], p_value)
            rows.append(dict(zip(("z", "green", "scored", "p_value"), map(float, values))))
        return {"detections": rows}

    def _ids(self, scheme: dict, chunks: list[slice], keys: int) -> Callable[[], Any]:
        from jaxbench.watermark import detection

        detector, parts = self._detector(scheme), [self._ragged(self.ids[chunk]) for chunk in chunks]
        return lambda: [detection.detect(detector, part, self._key()) for part in parts]

    def _text(self, scheme: dict, chunks: list[slice], keys: int) -> Callable[[], Any]:
        from jaxbench.watermark import detection

        detector, parts = self._detector(scheme), [self.texts[chunk] for chunk in chunks]
        return lambda: [detection.detect(detector, self.encoder.encode(part).ids, self._key()) for part in parts]

    def _tokenise(self, scheme: dict, chunks: list[slice], keys: int) -> Callable[[], Any]:
        return lambda: [self.encoder.encode(self.texts[chunk]) for chunk in chunks]

    def _split(self, scheme: dict, chunks: list[slice], keys: int) -> Callable[[], Any]:
        return lambda: [self.plain_encoder.encode(self.texts[chunk]) for chunk in chunks]

    def _evidence(self, scheme: dict, chunks: list[slice], keys: int) -> Callable[[], Any]:
        detector, batches = self._detector(scheme), self._batches(chunks)
        return lambda: [detector.evidence(tokens, lengths, self._key()) for tokens, lengths in batches]

    def _statistics(self, scheme: dict, chunks: list[slice], keys: int) -> Callable[[], Any]:
        from jaxbench.watermark import statistics

        detector = self._detector(scheme)
        found = [detector.evidence(tokens, lengths, self._key()) for tokens, lengths in self._batches(chunks)]
        return lambda: [statistics.score(detector.scheme, one, vocab_size=self.vocab_size) for one in found]

    def _identify(self, scheme: dict, chunks: list[slice], keys: int) -> Callable[[], Any]:
        from jaxbench.watermark import identify

        parsed, parts = self._detector(scheme).scheme, [self._ragged(self.ids[chunk]) for chunk in chunks]
        candidates = [identify.Candidate(f"key {number}", parsed, self._key(number)) for number in range(keys)]
        options = {"vocab_size": self.vocab_size, "make_detector": self._make()}
        return lambda: [identify.identify(candidates, part, **options) for part in parts]

    def _neural(self, scheme: dict, chunks: list[slice], keys: int) -> Callable[[], Any]:
        from jaxbench.watermark import features, train_detector

        shape = features.NeuralConfig()  # untrained: the weights' values do not change the work
        score = train_detector.Scorer(shape, features.initial_params(shape, seed=0))
        detector, batches = self._detector(scheme), self._batches(chunks)

        def call() -> None:
            for tokens, lengths in batches:
                found = detector.evidence(tokens, lengths, self._key())
                labels = np.zeros(len(tokens), np.float32)
                score(features.Arrays(tokens, features.evidence(detector.scheme, found), found.scored, labels))

        return call

    def _batches(self, chunks: list[slice]) -> list:
        from jaxbench.watermark import detection

        parts = [self._ragged(self.ids[chunk]) for chunk in chunks]
        return [(tokens, lengths) for part in parts for _, tokens, lengths in detection.batches(part)]

    def _detector(self, scheme: dict) -> Any:
        from jaxbench.watermark import config, green_lists

        name = json.dumps(scheme, sort_keys=True)
        if name not in self.detectors:
            parsed = config.parse_scheme(scheme)
            lists = green_lists.lists_of(parsed, vocab_size=self.vocab_size)
            if lists is not None:
                lists.bits()
            self.detectors[name] = self._make()(parsed, vocab_size=self.vocab_size, green_lists=lists)
        return self.detectors[name]

    def _make(self) -> Any:
        """Return the engine's class of detectors."""
        if self.engine == "numpy":
            from jaxbench.watermark.detection import NumpyDetector as Detector
        elif self.engine == "jax":
            from jaxbench.watermark.detect import Detector
        else:
            import torch

            from torch_ref.watermark.detect import Detector

            torch.set_num_threads(1)
        return Detector

    def _ragged(self, ids: list) -> Any:
        from jaxbench.watermark.texts import Ragged

        return Ragged.from_lists(ids)

    def _key(self, number: int = 0) -> Any:
        from jaxbench.watermark.keys import Key

        return Key(KEY + number)


class Transformers:
    """transformers' WatermarkDetector, lefthash, one text a call (it wants equal lengths in a batch)."""

    def start(self, *, model: str, vocab_size: int, path: str) -> dict:
        """Import transformers, load the tokenizer folder and read the texts."""
        import torch
        import transformers

        torch.set_num_threads(1)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self.vocab_size = vocab_size
        with open(path) as file:
            content = json.load(file)
        self.texts, self.ids = content["texts"], content["ids"]
        return {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}

    def measure(self, *, scheme: dict, part: str, count: int, repeats: int, **_: Any) -> dict:
        """Time the detector over the first `count` texts; part: text or ids."""
        import torch

        detector = self._detector(scheme)

        def of_texts() -> None:
            for text in self.texts[:count]:
                detector(self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"])

        rows = [torch.tensor([ids]) for ids in self.ids[:count]]
        call = of_texts if part == "text" else lambda: [detector(row) for row in rows]
        return {**worker.timed(call, repeats), "texts": count}

    def detect(self, *, scheme: dict, ids: list) -> dict:
        """Return z, green tokens and scored tokens of texts given as ids."""
        import torch

        detector, rows = self._detector(scheme), []
        for text in ids:
            found = detector(torch.tensor([text]), return_dict=True)
            values = (found.z_score, found.num_green_tokens, found.num_tokens_scored)
            rows.append(dict(zip(("z", "green", "scored"), (float(value[0]) for value in values))))
        return {"detections": rows}

    def _detector(self, scheme: dict) -> Any:
        from types import SimpleNamespace

        from transformers import WatermarkDetector, WatermarkingConfig

        names = ("greenlist_ratio", "bias", "hashing_key", "seeding_scheme", "context_width")
        watermarking = WatermarkingConfig(**{name: scheme[name] for name in names if name in scheme})
        model = SimpleNamespace(vocab_size=self.vocab_size, bos_token_id=-1, is_encoder_decoder=False)
        return WatermarkDetector(model, "cpu", watermarking)


if __name__ == "__main__":
    main()
