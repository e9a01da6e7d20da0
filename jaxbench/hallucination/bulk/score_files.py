"""Scores of the tokens or chunks of many answers: rows in, one line per unit out, as JSON lines or Parquet (S file).

Chunks of rows with `labels`, written as JSON lines, are the input of `hallucination.py redeep`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxbench import outputs
from jaxbench.hallucination import encoding, ragtruth, stored_scores, unit_scores
from jaxbench.hallucination.bulk import row_files
from jaxbench.hallucination.extract import Item, Store
from jaxbench.hallucination.unit_scores import UnitScores

if TYPE_CHECKING:
    import pyarrow as pa

Level = Literal["token", "chunk"]
KNOWN = ("id", "source_id")  # keys of a row that are copied to the lines of its units
COLUMNS = (*row_files.TEXTS, *KNOWN, "labels")


class Row(NamedTuple):
    """An answer whose units are scored."""

    place: str  # for errors
    item: Item
    known: dict[str, Any]  # its id and that of its source, if it has them
    marks: tuple[tuple[int, int], ...] | None  # labelled characters; None = the row has no labels


def of_file(path: str | Path) -> list[Row]:
    """Read rows with context, question and response; `id`, `source_id`, `labels` (of `start`, `end`) are optional.

    Raises:
      ValueError: as row_files.check; an id is not JSON, that of a source is neither text nor a whole number, or labels
        are not spans of the response.
    """
    found = []
    for place, row in row_files.numbered(path, COLUMNS, taken={}):
        known = {"id": outputs.finite(row["id"])} if "id" in row else {}
        if row.get("source_id") is not None:
            known["source_id"] = stored_scores.source_id(row["source_id"], place)
        try:
            json.dumps(known, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: {' or '.join(known)} cannot be written ({error})") from None
        found.append(Row(place, Item(*(row[name] for name in row_files.TEXTS)), known, _marks(row, place)))
    if not found:
        raise ValueError(f"--input={path} holds no row")
    return found


def of_folder(folder: str | Path) -> list[Row]:
    """Read the responses of a folder in RAGTruth's format.

    Raises:
      ValueError: as ragtruth.load.
    """
    data, found = ragtruth.load(folder), []
    for response in data.responses:
        source = data.source(response)
        item = Item(source.context, source.asked, response.response)
        marks = None if response.labels is None else tuple((label.start, label.end) for label in response.labels)
        known = {"id": response.id, "source_id": response.source_id}
        found.append(Row(f"response {response.id}", item, known, marks))
    return found


def _marks(row: Any, place: str) -> tuple[tuple[int, int], ...] | None:
    """Return the labelled characters of a row.

    Raises:
      ValueError: they are not a list of objects with start and end inside the response, or one has another text.
    """
    labels, length = row.get("labels"), len(row["response"])
    if labels is None:
        return None
    if not isinstance(labels, list):
        raise ValueError(f"{place}: labels is {str(labels)[:40]!r}, wanted a list of objects with start and end")
    found = []
    for label in labels:
        start, end = (label.get(name) if isinstance(label, dict) else None for name in ("start", "end"))
        if type(start) is not int or type(end) is not int or not 0 <= start < end <= length:
            raise ValueError(
                f"{place}: labels: {str(label)[:60]!r} is no part of the response's {length} characters, wanted start "
                "and end"
            )
        try:
            ragtruth.check_text(start, end, label.get("text"), row["response"])
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        found.append((start, end))
    return tuple(found)


def lines(
    rows: Iterable[Row], store: Store, tokenizer: Any, *, level: Level, chunk_tokens: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the units of rows whose features are in a store, as `write` takes them.

    Raises:
      ValueError: features are of other tokens than this tokenizer's, such as another tokenizer's; they are named.
    """
    for number, row in enumerate(rows, 1):
        key, encoded = store.key(row.item), encoding.encode_response(tokenizer, row.item.response)
        features = store.read(key)
        if features["offsets"].tolist() != [list(each) for each in encoded.offsets]:
            raise ValueError(
                f"{row.place}: {store.path(key)} holds {len(features['offsets'])} tokens, which are not the "
                f"{len(encoded.ids)} of this tokenizer; remove the file, and the response is read again"
            )
        found = unit_scores.of_tokens(features, encoded.ids)
        if level == "chunk":
            found = unit_scores.of_chunks(found, row.item.response, chunk_tokens=chunk_tokens)
        yield from _units(number, row, found, level)


def _units(number: int, row: Row, found: UnitScores, level: Level) -> Iterator[dict[str, Any]]:
    external, parametric = found.external.tolist(), found.parametric.tolist()
    own = ("num_tokens", found.num_tokens) if found.token_ids is None else ("token_id", found.token_ids)
    for i, ((start, end), text) in enumerate(zip(found.spans.tolist(), found.texts(row.item.response))):
        unit = {"response": number, **row.known, level: i, own[0]: int(own[1][i])}
        unit |= {"start": start, "end": end, "text": text}
        if row.marks is not None:
            unit[f"{level}_label"] = int(any(a < max(end, start + 1) and start < b for a, b in row.marks))
        yield unit | {"external": external[i], "parametric": outputs.finite(parametric[i]), "num_cut": found.num_cut}


def schema(rows: Sequence[Row], *, level: Level) -> pa.Schema:
    """Arrow types of a file of units.

    Raises:
      ValueError: ids have no type in common.
    """
    import pyarrow as pa

    scores = pa.list_(pa.float32())
    own = "token_id" if level == "token" else "num_tokens"
    fields = [("response", pa.int64()), *_known_fields(rows), (level, pa.int64()), (own, pa.int64())]
    fields += [("start", pa.int64()), ("end", pa.int64()), ("text", pa.string())]
    if any(row.marks is not None for row in rows):
        fields.append((f"{level}_label", pa.int64()))
    return pa.schema([*fields, ("external", pa.list_(scores)), ("parametric", scores), ("num_cut", pa.int64())])


def _known_fields(rows: Sequence[Row]) -> list[tuple[str, pa.DataType]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = []
    for name in KNOWN:
        if not any(name in row.known for row in rows):
            continue
        try:
            kind = pa.array([row.known.get(name) for row in rows]).type
            pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([(name, kind)])).close()  # no empty structs
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            place = f"{rows[0].place} and behind"
            raise ValueError(f"{place}: {name} is no one type ({error}); name a .jsonl output") from None
        fields.append((name, kind))
    return fields


def write(path: Path, units: Iterable[dict[str, Any]], types: pa.Schema | None) -> int:
    """Write units, atomically; return their number. types: from `schema` for Parquet; None = JSON lines."""
    count, units = 0, iter(units)
    if types is None:
        with outputs.whole(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            for unit in units:
                file.write(json.dumps(unit, ensure_ascii=False) + "\n")
                count += 1
        return count
    import pyarrow as pa
    import pyarrow.parquet as pq

    with outputs.whole(path) as temporary, pq.ParquetWriter(temporary, types) as writer:
        while batch := list(itertools.islice(units, row_files.BATCH_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, types))
            count += len(batch)
    return count
