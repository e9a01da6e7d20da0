"""Sources, responses and labelled spans in RAGTruth's format (S file).

A folder holds `sources.jsonl[.gz]`, and `responses*.jsonl[.gz]` whose rows name their source. Six responses of six
generators share a source, so that every fit is split by source.

Source: Niu et al. 2024, arXiv:2401.00396.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic

from jaxbench.text.lines import has_surrogate

LABEL_TYPES = ("Evident Conflict", "Subtle Conflict", "Evident Baseless Info", "Subtle Baseless Info")
TASKS = ("QA", "Summary", "Data2txt")
# The generators' instructions where the data has no question (Niu et al. 2024, appendix).
QUESTIONS = {
    "Summary": "Summarize the following news:",
    "Data2txt": "Write an objective overview about the following local business based only on the provided structured "
    "data in the JSON format.",
}


class _Row(pydantic.BaseModel):
    """A row of a file; unknown keys are ignored."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", strict=True)

    @pydantic.field_validator("*")
    @classmethod
    def _check_unicode(cls, value: Any) -> Any:
        if isinstance(value, str) and has_surrogate(value):
            raise ValueError(f"{value[:40]!a} has a lone surrogate, which is no Unicode text")
        return value


class Label(_Row):
    """A hallucinated span of a response: characters start to end, end not included."""

    start: int
    end: int
    label_type: Literal["Evident Conflict", "Subtle Conflict", "Evident Baseless Info", "Subtle Baseless Info"]
    text: str | None = None  # these characters, where the data has them


class Source(_Row):
    """The context that should support a response, and its question."""

    source_id: str
    task: Literal["QA", "Summary", "Data2txt"]
    context: str
    question: str | None = None

    @pydantic.field_validator("context")
    @classmethod
    def _check_context(cls, context: str) -> str:
        if not context.strip():
            raise ValueError(f"{context[:40]!r} is empty; there is nothing that a response could rest on")
        return context

    @property
    def asked(self) -> str:
        """The question, or what the task asks."""
        return self.question or QUESTIONS.get(self.task, "")


class Response(_Row):
    """A generator's answer and its labels."""

    id: str
    source_id: str
    model: str  # the generator
    response: str
    labels: tuple[Label, ...] | None = pydantic.Field(default=None, strict=False)  # None: not annotated
    split: str = ""

    @pydantic.field_validator("response")
    @classmethod
    def _check_response(cls, response: str) -> str:
        if not any(letter.isalnum() for letter in response):  # no sentence, so that nothing could be fitted to it
            raise ValueError(f"{response[:40]!r} has no letter and no digit; there is nothing to judge")
        return response

    @pydantic.model_validator(mode="after")
    def _check_spans(self) -> Response:
        for label in self.labels or ():
            if not 0 <= label.start < label.end <= len(self.response):
                raise ValueError(
                    f"label {label.start}..{label.end} is outside the response of {len(self.response)} characters"
                )
            check_text(label.start, label.end, label.text, self.response)
        return self


class Data(pydantic.BaseModel):
    """Responses, and their sources by id."""

    model_config = pydantic.ConfigDict(frozen=True)
    sources: dict[str, Source]
    responses: tuple[Response, ...]

    def source(self, response: Response) -> Source:
        """Return the source of a response."""
        return self.sources[response.source_id]


def load(folder: str | Path) -> Data:
    """Load the sources and responses of a folder.

    Raises:
      ValueError: a file is missing, cut short or has a bad row, such as a response without a letter and a digit or a
        source without a context; two rows have the same id; a response's source is missing; there is no response.
    """
    sources, *files = _files(Path(folder))
    by_id = _by_id((row.source_id, row, place) for row, place in _rows(sources, Source))
    read = (pair for file in files for pair in _rows(file, Response))
    responses = _by_id((row.id, row, place) for row, place in _with_sources(read, by_id, sources))
    if not responses:
        raise ValueError(
            f"--data={folder}: {', '.join(file.name for file in files)}: {len(responses)} responses; wanted some"
        )
    return Data(sources=by_id, responses=tuple(responses.values()))


def check_text(start: int, end: int, text: str | None, response: str) -> None:
    """Check that a label's text, where it has one, is what a response has at its place.

    It is not if places were counted in bytes or UTF-16 units, or in a response that was stripped since.

    Raises:
      ValueError: it is not.
    """
    if text is not None and text != response[start:end]:
        raise ValueError(
            f"label {start}..{end} is on {response[start:end][:40]!r}, and its text is {str(text)[:40]!r}; wanted "
            "places in characters (code points) of the response, or labels without text"
        )


def check_labels(data: Data, folder: str | Path) -> None:
    """Check that every response was annotated, so that none counts as free of hallucinations by omission.

    Raises:
      ValueError: one has no `labels`.
    """
    bare = [row.id for row in data.responses if row.labels is None]
    if bare:
        raise ValueError(
            f"--data={folder}: {len(bare)} of {len(data.responses)} responses have no `labels`, first {bare[0]}; "
            "wanted a list each, [] where nothing is hallucinated"
        )


def sha256(folder: str | Path) -> str:
    """SHA-256 of the bytes of a folder's files: the sources, then the responses by name.

    Raises:
      ValueError: a file is missing.
    """
    made = hashlib.sha256()
    for path in _files(Path(folder)):
        made.update(path.read_bytes())
    return made.hexdigest()


def _files(folder: Path) -> list[Path]:
    """The file of the sources, then those of the responses by name."""
    files = sorted([*folder.glob("responses*.jsonl"), *folder.glob("responses*.jsonl.gz")])
    sources = sorted([*folder.glob("sources.jsonl"), *folder.glob("sources.jsonl.gz")])
    if not files or len(sources) != 1:
        raise ValueError(
            f"--data={folder}: {len(sources)} files sources.jsonl[.gz] and {len(files)} responses*.jsonl[.gz]; wanted "
            "one of the first and some of the second"
        )
    return [*sources, *files]


def _by_id(rows: Iterable[tuple[str, Any, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, row, place in rows:
        if name in found:
            raise ValueError(f"{place}: id {name} is there twice")
        found[name] = row
    return found


def _with_sources(
    rows: Iterable[tuple[Response, str]], sources: dict[str, Source], path: Path
) -> Iterator[tuple[Response, str]]:
    """Yield responses and where they are, checking that their sources exist; path: of the sources."""
    for row, place in rows:
        if row.source_id not in sources:
            raise ValueError(f"{place}: response {row.id} names source {row.source_id}, which is not in {path}")
        yield row, place


def _rows(path: Path, kind: type[_Row]) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file, and where they are."""
    number = 0
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield parse(line, kind, place=f"{path} line {number}"), f"{path} line {number}"
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read behind line {number} ({error}); is the file cut short?") from error


def parse(line: str, kind: type[_Row], *, place: str) -> Any:
    """Parse a line of JSON into a row.

    Raises:
      ValueError: it is not such a row; the message names the place, the field and the value.
    """
    try:
        return kind.model_validate(json.loads(line))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "row"
        raise ValueError(f"{place}: {field}: {first['msg']} (got {str(first.get('input'))[:80]!r})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no JSONDecodeError
        raise ValueError(f"{place}: no JSON ({error}): {line[:80]!r}") from error
