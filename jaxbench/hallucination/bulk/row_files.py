"""Read files of rows with context, question and response, JSON lines or Parquet, a batch at a time (S file)."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxbench.hallucination.verdict import Verdict

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS = ("context", "question", "response")
PROMPT = TEXTS[:2]
VERDICT = dict.fromkeys(Verdict._fields, "the verdict")  # names that a row may not have, and what is written there
SHOWN = (*TEXTS, "id")  # keys of a row that a page or a file of sentences shows
KINDS = ("jsonl", "parquet")
BATCH_ROWS = 1024


def kind_of(path: str | Path, *, flag: str) -> str:
    """Return the kind of a file by its suffix.

    Raises:
      ValueError: an unknown suffix.
    """
    kind = Path(path).suffix.lstrip(".")
    if kind not in KINDS:
        raise ValueError(f"{flag}={path} has an unknown suffix, wanted .jsonl or .parquet (a page: --page=FILE.html)")
    return kind


def check(path: str | Path, kinds: Collection[str]) -> int:
    """Read every row of a file, and check that outputs of `kinds` can hold it; return the number of rows.

    Raises:
      ValueError: the file or a row of it is bad; it is named.
    """
    count = 0
    for place, row in numbered(path, None if "jsonl" in kinds else TEXTS):
        count += 1
        if "jsonl" in kinds:
            _check_json(place, row, "name a .parquet output")
    if not count:
        raise ValueError(f"--input={path} holds no row")
    if "parquet" in kinds:
        _check_types(path)
    return count


def prompts(path: str | Path, taken: Mapping[str, str]) -> list[tuple[str, Mapping[str, Any]]]:
    """Read a file of rows with context and question to be answered; return each row, and where it is in the file.

    taken: names that no row may have, and what is written there.

    Raises:
      ValueError: the file or a row of it is bad, has a taken name, or cannot be a line of JSON; it is named.
    """
    found = list(numbered(path, texts=PROMPT, taken=taken))
    for place, row in found:
        _check_json(place, row, "make it a text, or leave it out")
    if not found:
        raise ValueError(f"--input={path} holds no row")
    return found


def _check_json(place: str, row: Mapping[str, Any], advice: str) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:  # such as a Parquet file's date, or a lone surrogate
        raise ValueError(f"{place} cannot be a line of JSON ({error}); {advice}") from None


def rows(
    path: str | Path, columns: Iterable[str] | None = None, *, texts: Collection[str] = TEXTS
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file in order.

    columns: to read, where leaving out others saves time; None = all. texts: columns that every row must have.

    Raises:
      ValueError: as `check`.
    """
    return (row for _, row in numbered(path, columns, texts))


def kept(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a row is written with its verdict: all but the texts."""
    return {name: value for name, value in row.items() if name not in TEXTS}


def kept_schema(path: str | Path) -> pa.Schema:
    """Arrow types of what is kept: those of a Parquet file, or the narrowest that hold all rows of a JSON lines file.

    Raises:
      ValueError: values under one key have no type in common, or one that Parquet does not have.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind_of(path, flag="--input") == "parquet":
        with _opened(path) as file:
            return pa.schema([field for field in file.schema_arrow if field.name not in TEXTS])
    schema, lines = pa.schema([]), numbered(path)
    while placed := list(itertools.islice(lines, BATCH_ROWS)):
        batch = [kept(row) for _, row in placed]
        names = dict.fromkeys(name for row in batch for name in row)
        name = ""
        try:
            for name in names:
                own = pa.schema([(name, pa.array([row.get(name) for row in batch]).type)])
                schema = pa.unify_schemas([schema, own], promote_options="permissive")
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            first, last = (place.rpartition(" ")[2] for place, _ in (placed[0], placed[-1]))
            place = f"{path} lines {first} to {last}: {name}"
            raise ValueError(f"{place} is no one type ({error}); name a .jsonl output") from None
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), schema).close()
    except pa.ArrowException as error:  # such as an object without keys in every row
        raise ValueError(f"{path}: {error}; name a .jsonl output") from None
    return schema


def kept_batches(path: str | Path, schema: pa.Schema) -> Iterator[tuple[int, pa.Table]]:
    """Yield what is kept of a file's rows in batches: the number of rows, and their table, which may have no column.

    schema: from kept_schema; a Parquet file's columns stay unchanged.
    """
    import pyarrow as pa

    if kind_of(path, flag="--input") == "parquet":
        with _opened(path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                yield batch.num_rows, pa.Table.from_batches([batch]).select(schema.names)
        return
    lines = map(kept, rows(path))
    while batch := list(itertools.islice(lines, BATCH_ROWS)):
        yield len(batch), pa.Table.from_pylist(batch, schema)


def _check_types(path: str | Path) -> None:
    """Check that what is kept of rows fits one table, before any row is judged."""
    import pyarrow as pa

    schema = kept_schema(path)
    if kind_of(path, flag="--input") == "jsonl":
        try:
            for _ in kept_batches(path, schema):
                pass
        except (pa.ArrowException, OverflowError) as error:  # such as 2 ** 60 + 1 among numbers with a fraction
            raise ValueError(f"{path}: values fit no one type ({error}); name a .jsonl output") from None


def numbered(
    path: str | Path,
    columns: Iterable[str] | None = None,
    texts: Collection[str] = TEXTS,
    taken: Mapping[str, str] = VERDICT,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each row is, for error messages, and the row; blank lines are skipped. Otherwise as `rows`.

    taken: names that no row may have, and what is written there.

    Raises:
      ValueError: as `check`.
    """
    kind = kind_of(path, flag="--input")
    if not Path(path).is_file():
        raise ValueError(f"--input={path} is no file")
    for place, row in _parquet(path, columns, texts, taken) if kind == "parquet" else _json_lines(path, taken):
        for name in texts:
            if not isinstance(row, dict) or not isinstance(row.get(name), str):
                raise ValueError(f"{place}: wanted an object with the text {name}, got {str(row)[:60]!r}")
            try:
                row[name].encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{place}: {name} is no Unicode text ({error})") from None
            if name != "question" and not row[name].strip():
                raise ValueError(f"{place}: {name} is empty")
        if "response" in texts and not any(letter.isalnum() for letter in row["response"]):
            raise ValueError(f"{place}: response {row['response'][:40]!r} has no letter and no digit")
        yield place, row


def _json_lines(path: str | Path, taken: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path} line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():  # blank lines between objects, or after the last one
                    continue
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: no JSON ({error})") from None
            if isinstance(row, dict):
                _check_names(place, list(row), taken)
            yield place, row


def _parquet(
    path: str | Path, columns: Iterable[str] | None, texts: Collection[str], taken: Mapping[str, str]
) -> Iterator[tuple[str, Any]]:
    with _opened(path) as file:
        names = file.schema_arrow.names
        _check_names(str(path), names, taken)
        if missing := [name for name in texts if name not in names]:
            raise ValueError(f"{path} has no column {missing[0]}; it has {', '.join(names)}")
        number = itertools.count(1)
        for batch in file.iter_batches(BATCH_ROWS, columns=None if columns is None else list(columns)):
            yield from ((f"{path} row {next(number)}", row) for row in batch.to_pylist())


def _check_names(place: str, names: list[str], taken: Mapping[str, str]) -> None:
    for name in names:
        if name in taken:
            raise ValueError(f"{place}: {name} is where {taken[name]} goes; rename it")
        if names.count(name) > 1:
            raise ValueError(f"{place}: there are {names.count(name)} columns {name}; rename them")


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    """Open a Parquet file.

    Raises:
      ValueError: it is not one, or is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet ({error})") from error
