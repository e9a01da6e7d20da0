"""Read a folder's responses below the tuned blocks, one file per prompt, and tune a reader to some; resumable.

Data flow: texts -> LowerReading, in processes -> files named by the hash of what determines them -> tuning.fit on three
quarters of the sources -> the tuned reader's token log-odds of the last quarter, and of others as requested.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench.hallucination import detector, extract, linear, tuned_inputs, tuned_reading, tuning
from jaxbench.hallucination.detector import Heard, Labels
from jaxbench.hallucination.group import Group
from jaxbench.hallucination.ragtruth import Data
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.hallucination.tuning import Tuning
from jaxbench.pretrained import weights

Array = np.ndarray
INNER = 4  # folds of the sources: one weighs members, the others tune
CODE = ("encoding.py", "layout.py", "reader.py", "lower_reader.py", "tuned_reading.py")  # that determine a file


class Lower(NamedTuple):
    """The files written by the blocks below the tuned ones, one per prompt."""

    folder: Path
    settings: ReaderSettings
    tuning: Tuning
    blocks: range  # the tuned ones
    model_sha256: str
    code: str  # hash of the code that determines a file

    @classmethod
    def of(cls, folder: Path, settings: ReaderSettings, tuning: Tuning) -> Lower:
        """Return the files of a reader's model.

        Raises:
          ValueError: the reader's weights are integers, or it has no such blocks.
        """
        if settings.bits is not None:
            raise ValueError(f"bits={settings.bits}: a tuned reader stands on float weights; leave bits or --tuned out")
        decoder = weights.read_config(settings.model)
        tuning = tuning.model_copy(update={"dtype": settings.dtype})
        blocks, code = tuning.tuned(decoder).blocks, extract.code_version(CODE)
        return cls(folder, settings, tuning, blocks, weights.checksum(settings.model), code)

    def path(self, group: Group) -> Path:
        """Return the path of a group's file, which does not depend on the keys of its responses."""
        reads = self.settings.model_dump(include={"dtype", "style", "window", "row_tokens"})
        where = [reads, self.blocks.start, self.blocks.stop, self.model_sha256, self.code]
        texts = [group.context, group.question, *group.responses]
        name = hashlib.sha256(json.dumps([where, texts], sort_keys=True).encode()).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"

    def groups(self, data: Data) -> list[tuple[Path, Group, tuple[int, ...]]]:
        """Return for each source its file, its responses, and their indices; sources of the same texts share a file."""
        by_source: dict[str, list[int]] = {}
        for number, response in enumerate(data.responses):
            by_source.setdefault(response.source_id, []).append(number)
        found = []
        for name, numbers in by_source.items():
            source = data.sources[name]
            texts = tuple(data.responses[i].response for i in numbers)
            group = Group(source.context, source.asked, texts, tuple(map(str, numbers)))
            found.append((self.path(group), group, tuple(numbers)))
        return found

    def places(self, data: Data, wanted: Array) -> list[tuning.Place]:
        """Return the rows of those sources whose responses are all wanted."""
        kept = set(wanted.tolist())
        mine = [(path, each) for path, _, each in self.groups(data) if kept.issuperset(each)]
        return [row for path, numbers in mine for row in tuning.places(path, numbers, self.tuning)]


class LowerWorker:
    """A worker that writes groups' files; every process loads the model at its first group."""

    def __init__(self, lower: Lower):
        self._lower, self._reading = lower, None

    def __call__(self, work: tuple[Path, Group]) -> int:
        """Write a group's file; return the number of its responses."""
        path, mine = work
        settings, blocks = self._lower.settings, self._lower.blocks
        if self._reading is None:
            self._reading = tuned_reading.load_lower(settings, blocks.start, blocks.stop, package="jaxbench")
        tuning.write(path, self._reading.read(mine), self._lower.tuning)
        return len(mine.responses)


def read(lower: Lower, data: Data, *, processes: int, bar: Callable[[int], Any]) -> None:
    """Write the missing files, the longest context first; bar: returns a progress context for a number of responses."""
    missing = {path: group for path, group, _ in lower.groups(data) if not path.is_file()}
    work = list(missing.items())
    work.sort(key=lambda each: -len(each[1].context))
    worker = LowerWorker(lower)
    with bar(sum(len(group.responses) for _, group in work)) as advance:
        for count in extract.run(work, worker, processes=processes):
            advance(count)


class Split(NamedTuple):
    """Responses by index."""

    train: Array  # the reader is tuned to these
    weigh: Array  # and is weighed on these


def split(labels: Labels, among: Array) -> Split:
    """Return the inner split of some responses by source, which is always the same."""
    fold = linear.folds(labels.source[among], INNER, seed=0)
    return Split(among[fold != 0], among[fold == 0])


def tune(
    lower: Lower, data: Data, labels: Labels, parts: Split, others: Array, *, bar: Callable[[int], Any]
) -> tuple[Heard, dict[int, Array]]:
    """Tune a reader to parts.train; return its scores of parts.weigh, and token log-odds of `others` by index.

    Raises:
      ValueError: no token or every token is labelled, or as tuning.fit.
    """
    rate = float(np.concatenate([labels.tokens[i] for i in parts.train]).mean())
    if not 0 < rate < 1:
        raise ValueError(f"tuning: {rate:.0%} of the tokens are labelled; wanted both classes")
    checkpoint, settings = weights.load_checkpoint(lower.settings.model), lower.tuning
    shape = settings.tuned(checkpoint.config)
    start = tuned_inputs.starting_params(shape, checkpoint.params, seed=settings.seed, rate=rate)
    rows = lower.places(data, parts.train)
    with bar(tuning.num_steps(rows, settings)) as advance:
        trained = tuning.fit(shape, start, rows, labels.tokens, settings, progress=lambda: advance(1))
    params = start | trained
    said = tuning.logits(shape, params, lower.places(data, np.concatenate([parts.weigh, others])), settings)
    return Heard(shape, trained, parts.weigh, [said[i] for i in parts.weigh]), {i: said[i] for i in others.tolist()}


def said(lower: Lower, data: Data, tuned: detector.Tuned) -> tuple[Array, ...]:
    """Token log-odds of all responses by a tuned reader; `read` must have written the files."""
    params = tuned_inputs.with_trained(
        tuned.config, weights.load_checkpoint(lower.settings.model).params, tuned.trained
    )
    rows = lower.places(data, np.arange(len(data.responses)))
    found = tuning.logits(tuned.config, params, rows, lower.tuning)
    return tuple(found[i] for i in range(len(found)))


def of_detector(folder: Path, settings: ReaderSettings, tuned: detector.Tuned) -> Lower:
    """Return the files that a detector's tuned reader needs."""
    blocks = {"first": tuned.config.first, "num_blocks": tuned.config.num_blocks}
    return Lower.of(folder, settings, Tuning(lora=tuned.config.lora, **blocks))
