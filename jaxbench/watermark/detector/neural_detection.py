"""P-values of a trained detector, to be reported next to those of the exact test.

The p-value is conformal (Vovk et al. 2005, chapter 2): with n null scores, of held-out human passages of the text's
length under random keys, it is (1 + number of null scores >= the text's) / (n + 1), and hence at least 1 / (n + 1). Its
level holds on average over texts and keys; that of the exact test holds for every text, at any level. train-detector
saved the passages for this purpose (`calibration.npy`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from jaxbench import outputs, process_environment, prompts
from jaxbench.pretrained import assets
from jaxbench.watermark import config, detection
from jaxbench.watermark.detector import features, neural, training_data
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes.contract import Scheme
from jaxbench.watermark.texts import Ragged

NUM_NULL = 4000
VERSION = 1  # of cached null scores: a change of the network, the evidence or the draws needs a new number
SCORING_ROWS = 64  # texts per call, which fit the cache; fewer are padded
STEP = 32  # tokens: texts are padded to multiples, each of which is one program


class Scorer:
    """A trained detector with its compiled program."""

    def __init__(self, shape: features.NeuralConfig, params: Mapping[str, np.ndarray]):
        self.model = neural.build(shape, params)
        self._graph, self._state = nnx.split(self.model)
        self._program = jax.jit(self._predict)

    def _predict(self, state: Any, batch: neural.Batch) -> Any:
        return neural.predict(nnx.merge(self._graph, state), batch)

    def __call__(self, arrays: features.Arrays) -> np.ndarray:
        """Compute logits [N] (float64) of texts, SCORING_ROWS at a time."""
        arrays, found = arrays._replace(evidence=arrays.evidence.astype(np.float32)), [np.zeros(0)]
        for start in range(0, len(arrays.tokens), SCORING_ROWS):
            parts = [field[start : start + SCORING_ROWS] for field in arrays]
            count = len(parts[0])
            batch = neural.Batch(*(prompts.fill_rows(part, count, SCORING_ROWS) for part in parts))
            found.append(np.asarray(self._program(self._state, batch), np.float64)[:count])
        return np.concatenate(found)


def conformal_p(scores: np.ndarray, null: np.ndarray) -> np.ndarray:
    """Return (1 + #{null >= score}) / (n + 1) of each score [N] against n null scores."""
    ordered = np.sort(null)
    return (1.0 + len(ordered) - np.searchsorted(ordered, scores, side="left")) / (len(ordered) + 1.0)


def null_scores(
    scorer: Callable[[features.Arrays], np.ndarray],
    pool: training_data.Pool,
    *,
    length: int,
    count: int,
    seed: int,
    start: int = 0,
) -> np.ndarray:
    """Score `count` human passages, cut to `length` tokens from token `start`, under random keys of their scheme."""
    random, rows = np.random.default_rng((seed, length)), np.arange(count) % len(pool.tokens)
    return scorer(training_data.null_arrays(pool, rows, length, random, start=start))


class NeuralVerdicts(NamedTuple):
    """Results of the neural detector for N texts."""

    p_value: Float[np.ndarray, " N"]  # >= 1 / (num_null + 1)
    num_null: Int[np.ndarray, " N"]  # null scores that the text is ranked among; 0 = it has no scored token, p = 1
    num_tokens: Int[np.ndarray, " N"]  # tokens read after the prompt, at most as many as the human passages have


class NeuralTest:
    """A detector written by train-detector, with the human passages that calibrate it."""

    def __init__(self, folder: str | Path, *, vocab_size: int):
        """Read the detector.

        Raises:
          ValueError: a file is missing or damaged, or the detector was trained on another vocabulary.
        """
        shape, params, record = features.load(folder)
        if record.get("vocab_size") != vocab_size:
            trained = record.get("vocab_size")
            raise ValueError(f"detector: {folder} was trained on a vocabulary of {trained}, the text has {vocab_size}")
        self._vocab_size, self._scorer = vocab_size, Scorer(shape, params)
        self._human = features.load_calibration(folder)
        sums = record["sha256"], assets.sha256_file(features.calibration_file(folder))
        # what null scores depend on, besides scheme, length and start
        self._about = f"{VERSION} {NUM_NULL} {vocab_size} {' '.join(sums)}"
        self._pools: dict[str, training_data.Pool] = {}  # by scheme
        self._null: dict[tuple[str, int, int], np.ndarray] = {}  # scores by scheme, length and start

    def check(self, scheme: Scheme) -> None:
        """Raise if the detector cannot judge a scheme.

        Raises:
          ValueError: the scheme carries a payload: the likeliest of many messages has other evidence than a single one.
        """
        if config.num_payloads(scheme) > 1:
            raise ValueError(f"neural: scheme {scheme.scheme} has payload_bits={scheme.payload_bits}, wanted 0")

    def detect(
        self,
        detector: detection.NumpyDetector,
        ids: Ragged,
        key: Key | Sequence[Key],
        *,
        prompt_lengths: Int[np.ndarray, " N"] | int | None = None,
    ) -> NeuralVerdicts:
        """Judge N texts by the evidence that a Detector finds under one key, or one key per text.

        A text is read from the end of its prompt. The prompt serves as context, so that the first tokens are scored
        too; null passages then skip as many leading tokens, up to the context length. Each verdict is independent of
        the other texts.

        Raises:
          ValueError: as `check`, or keys or prompt lengths do not fit the texts.
        """
        self.check(detector.scheme)
        key, prompt = detection.checked_keys(key, len(ids)), detection.checked_prompts(prompt_lengths, len(ids))
        starts = np.minimum(prompt, detector.scheme.context_length)  # of the null passages
        counts = np.clip(np.minimum(ids.lengths - prompt, self._human.shape[1] - starts), 0, None)
        found = NeuralVerdicts(np.ones(len(ids)), np.zeros(len(ids), np.int64), counts)
        for rows, tokens, lengths in detection.batches(ids):
            if not counts[rows].any():
                continue
            keys = key if isinstance(key, Key) else [key[row] for row in rows]
            evidence = detector.evidence(tokens, lengths, keys, prompt_lengths=prompt[rows])
            value = features.evidence(detector.scheme, evidence).astype(np.float32)
            arrays = _behind(prompt[rows], counts[rows], features.Arrays(tokens, value, evidence.scored, rows))
            for width, kept in self._widths(counts[rows], arrays.scored.any(axis=1)):
                scores = self._scorer(features.Arrays(*(field[kept] for field in _cut(arrays, width))))
                kinds = np.stack([counts[rows[kept]], starts[rows[kept]]], axis=1)
                for length, start in np.unique(kinds, axis=0).tolist():
                    null = self._null_scores(detector, length, start, width)
                    alike = (kinds == (length, start)).all(axis=1)
                    found.p_value[rows[kept][alike]] = conformal_p(scores[alike], null)
                    found.num_null[rows[kept][alike]] = len(null)
        return found

    def _widths(self, counts: np.ndarray, is_scored: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (width, rows) of texts with scored tokens; few widths, so that few programs are compiled."""
        widths = np.minimum(-(-counts // STEP) * STEP, self._human.shape[1])
        for width in np.unique(widths[is_scored]):
            yield int(width), np.flatnonzero(is_scored & (widths == width))

    def _null_scores(self, detector: detection.NumpyDetector, length: int, start: int, width: int) -> np.ndarray:
        """Return the scores of NUM_NULL human passages of a length from token `start`, under the detector's scheme."""
        scheme = detector.scheme.model_dump_json()
        name = scheme, length, start
        if name not in self._null:
            digest = hashlib.sha256(f"{self._about} {detector.scheme.scheme} {name}".encode()).hexdigest()
            path = process_environment.cache_dir() / "watermark" / f"null-{digest[:16]}.npy"
            if (known := _read(path)) is None:
                if scheme not in self._pools:
                    about = {"vocab_size": self._vocab_size, "green_lists": detector.green_lists}
                    self._pools[scheme] = training_data.human_pool(detector.scheme, self._human, **about)
                scorer, pool = lambda arrays: self._scorer(_cut(arrays, width)), self._pools[scheme]
                known = null_scores(scorer, pool, length=length, count=NUM_NULL, seed=0, start=start)
                _write(path, known)
            self._null[name] = known
        return self._null[name]


def _read(path: Path) -> np.ndarray | None:
    """Read cached null scores; None if they are missing or damaged."""
    try:
        found = np.load(path, allow_pickle=False).astype(np.float64)
    except (OSError, EOFError, ValueError):
        return None
    return found if found.shape == (NUM_NULL,) and np.isfinite(found).all() else None


def _write(path: Path, scores: np.ndarray) -> None:
    """Cache null scores, which are float32, for other processes and runs; ignore a cache that cannot be written."""
    with contextlib.suppress(OSError), outputs.whole(path) as temporary, open(temporary, "wb") as file:
        np.save(file, scores.astype(np.float32))


def _behind(prompt: np.ndarray, counts: np.ndarray, arrays: features.Arrays) -> features.Arrays:
    """Take `counts` tokens of each row of arrays [B T] after its prompt; the rest is padding."""
    columns = np.arange(max(1, counts.max(initial=0)))
    inside, places = columns < counts[:, None], columns + prompt[:, None]
    fill = features.Arrays(-1, np.float32(features.NO_EVIDENCE), False, 0)
    taken = {
        name: np.where(inside, np.take_along_axis(getattr(arrays, name), np.where(inside, places, 0), axis=1), other)
        for name, other in fill._asdict().items() if name != "labels"
    }  # fmt: skip
    return features.Arrays(**taken, labels=np.zeros(len(counts), np.float32))


def _cut(arrays: features.Arrays, width: int) -> features.Arrays:
    """Cut or pad arrays to `width` columns."""
    short = max(0, width - arrays.tokens.shape[1])
    fill = {"tokens": -1, "evidence": features.NO_EVIDENCE, "scored": False}
    fields = {
        name: np.pad(getattr(arrays, name)[:, :width], ((0, 0), (0, short)), constant_values=value)
        for name, value in fill.items()
    }
    return arrays._replace(**fields)
