"""Verdicts on answers: how likely each is to say what its context does not, and which sentences do (S file).

detector = HallucinationDetector("detector.safetensors")
verdict = detector.detect(context, question, response)
verdict.is_hallucinated, [sentence.text for sentence in verdict.sentences if sentence.is_flagged]
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import outputs
from jaxbench.hallucination import detector as detectors
from jaxbench.hallucination import extract, lexical, pooled, saved_detector, sentences
from jaxbench.hallucination.group import Group, read_group

TEXTS = ("context", "question", "response")


class Passage(NamedTuple):
    """A sentence of the context."""

    start: int  # characters
    end: int
    text: str


class Sentence(NamedTuple):
    """A sentence of a response."""

    start: int  # characters
    end: int
    text: str
    probability: float  # that it says what the context does not
    is_flagged: bool
    passage: Passage | None  # what it should rest on: the sentence of the context that shares most with it


class Verdict(NamedTuple):
    """What a detector says of a response."""

    probability: float  # that some of it is hallucinated
    is_hallucinated: bool
    sentences: tuple[Sentence, ...]
    num_cut: int  # tokens of the context, from its end, that did not fit the reader's window

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON has it."""
        found = [
            each._asdict() | {"passage": None if each.passage is None else each.passage._asdict()}
            for each in self.sentences
        ]
        return self._asdict() | {"sentences": found}


class HallucinationDetector:
    """A saved detector and its reader."""

    def __init__(self, path: str | os.PathLike[str], *, model: str | None = None, package: str = "jaxbench"):
        """path: what `hallucination.py fit` wrote; model: its reader (file, folder or hub id), None = the default one;
        package: whose modules read.

        Raises:
          ValueError: the file is no detector of this version, or was fitted with another model.
        """
        from jaxbench.pretrained import weights

        self.saved = saved_detector.load(path)
        saved_detector.check_model(self.saved, weights.checksum(model), name=model or "the default model")
        self.settings = self.saved.settings.model_copy(update={"model": model})
        self._reader = extract.load_reader(self.settings, package=package)

    def detect(self, context: str, question: str, response: str) -> Verdict:
        """Verdict on a response to a question about a context.

        Raises:
          ValueError: context or response is empty, or the response is longer than half of the reader's window.
        """
        group = Group(context, question, (response,), ("",))
        ((_, features),) = read_group(group, *self._reader, self.settings)
        lexicon = lexical.Lexicon(context)
        read = tuple(pooled.pool(features, response, lexicon, by_sentence=by) for by in (False, True))
        found = detectors.judge(self.saved.detector, detectors.Inputs.join([read]))
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
        return Verdict(probability, is_hallucinated, marked, int(features["num_cut"]))


class Passages:
    """A context's sentences, by the words they are known by."""

    def __init__(self, context: str):
        self._spans = [Passage(a, b, context[a:b]) for a, b in sentences.sentences(context)]
        self._words = [_content(passage.text) for passage in self._spans]
        count = {word: sum(word in words for words in self._words) for word in set().union(*self._words)}
        self._weight = {word: math.log(1 + len(self._spans) / number) for word, number in count.items()}

    def nearest(self, text: str) -> Passage | None:
        """The sentence that shares most content words with a text, rare ones counting more; None where none does."""
        words = _content(text)
        shared = [sum(self._weight[word] for word in sorted(words & mine)) for mine in self._words]
        best = max(shared, default=0.0)
        return self._spans[shared.index(best)] if best > 0 else None


def _content(text: str) -> set[str]:
    return {token.key for token in lexical.tokens(text) if token.is_content}


def read_rows(path: str | Path, texts: Sequence[str] = TEXTS) -> Iterator[Mapping[str, Any]]:
    """Rows of a JSONL file with context, question and response, or the texts that are named, one at a time.

    Raises:
      ValueError: a line is no object with these texts, or one but the question is empty; it is named.
    """
    if not Path(path).is_file():
        raise ValueError(f"--input={path} is no file")
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number}: no JSON ({error})") from None
            wrong = [name for name in texts if not isinstance(row, dict) or not isinstance(row.get(name), str)]
            if wrong:
                raise ValueError(f"{path} line {number}: wanted an object with the text {wrong[0]}, got {line[:60]!r}")
            empty = [name for name in texts if name != "question" and not row[name].strip()]
            if empty:
                raise ValueError(f"{path} line {number}: {empty[0]} is empty")
            yield row


def part_file(output: Path, *inputs: str | Path, settings: str = "") -> Path:
    """Where finished lines are until all are: named by inputs and settings as they are now; no others' lines count."""
    stats = [Path(path).stat() for path in inputs]
    identity = [[str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in zip(inputs, stats)]
    identity += [settings] if settings else []
    return output.with_name(f"{output.name}.{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]}.part")


def detect_rows(
    detector: HallucinationDetector, rows: Iterator[Mapping[str, Any]], part: Path, output: Path
) -> Iterator[Verdict]:
    """Yield the verdict of each row; its line goes to `part`, which becomes `output` when all are done.

    A run that was killed goes on behind the last whole line.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    done = _whole_lines(part)
    with open(part, "a", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if number < done:
                continue
            try:
                verdict = detector.detect(*(row[name] for name in TEXTS))
            except ValueError as error:
                raise ValueError(f"row {number + 1}: {error}") from None
            kept = {name: value for name, value in row.items() if name not in TEXTS}
            file.write(json.dumps(kept | verdict.to_dict(), ensure_ascii=False) + "\n")
            file.flush()
            yield verdict
    os.replace(part, output)


def _whole_lines(part: Path) -> int:
    """Number of whole lines of a file; what a killed run left of another is taken off."""
    if not part.is_file():
        return 0
    content = part.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with outputs.whole(part) as temporary:
            temporary.write_bytes(content[:end])
    return content.count(b"\n", 0, end)
