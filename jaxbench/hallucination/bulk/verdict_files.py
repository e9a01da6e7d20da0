"""Write verdicts as JSON lines or Parquet, one line per row or one per sentence (S file)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxbench import outputs
from jaxbench.hallucination.bulk import row_files

if TYPE_CHECKING:
    import pyarrow as pa


def schema() -> pa.Schema:
    """Arrow types of a verdict: the fields of verdict.Verdict."""
    import pyarrow as pa

    fields = [("probability", pa.float64()), ("is_hallucinated", pa.bool_())]
    parts = [("sentences", _sentence_fields()), ("spans", _span_fields())]
    fields += [(name, pa.list_(pa.struct(own))) for name, own in parts]
    return pa.schema([*fields, ("num_cut", pa.int64())])


def write(path: Path, source: str | Path, verdicts: Iterable[Mapping[str, Any]]) -> None:
    """Write what is kept of each row of `source` with its verdict, atomically, in the format of the suffix."""
    if row_files.kind_of(path, flag="--output") == "jsonl":
        pairs = zip(row_files.rows(source), verdicts, strict=True)
        _write_lines(path, (row_files.kept(row) | verdict for row, verdict in pairs))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    own, kept = schema(), row_files.kept_schema(source)
    found = iter(verdicts)
    with outputs.whole(path) as temporary, pq.ParquetWriter(temporary, pa.schema([*kept, *own])) as writer:
        for count, batch in row_files.kept_batches(source, kept):
            judged = pa.Table.from_pylist(list(itertools.islice(found, count)), own)
            writer.write_table(pa.table([*batch.columns, *judged.columns], pa.schema([*kept, *own])))


def write_sentences(path: Path, source: str | Path, verdicts: Iterable[Mapping[str, Any]]) -> None:
    """Write one line per sentence: the row's number from 1, its `id` if rows have one, and the sentence."""
    if row_files.kind_of(path, flag="--sentences") == "jsonl":
        _write_lines(path, _sentences(source, verdicts))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    kept = row_files.kept_schema(source)
    own = [kept.field("id")] if "id" in kept.names else []
    fields = pa.schema([("row", pa.int64()), *own, *_sentence_fields()])
    found = _sentences(source, verdicts)
    with outputs.whole(path) as temporary, pq.ParquetWriter(temporary, fields) as writer:
        while batch := list(itertools.islice(found, row_files.BATCH_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, fields))


def _sentence_fields() -> list[Any]:
    import pyarrow as pa

    return _fields(("is_flagged", pa.bool_()))


def _span_fields() -> list[Any]:
    import pyarrow as pa

    return _fields(("sentence", pa.int64()))


def _fields(own: tuple[str, Any]) -> list[Any]:
    """Arrow types of a part of a response, in the order of its fields; own: the field of this kind of part."""
    import pyarrow as pa

    place = [("start", pa.int64()), ("end", pa.int64()), ("text", pa.string())]
    return [pa.field(*field) for field in (*place, ("probability", pa.float64()), own, ("passage", pa.struct(place)))]


def _sentences(source: str | Path, verdicts: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    pairs = zip(row_files.rows(source, row_files.SHOWN), verdicts, strict=True)
    for number, (row, verdict) in enumerate(pairs, 1):
        known = {"row": number} | ({"id": row["id"]} if "id" in row else {})
        yield from (known | sentence for sentence in verdict["sentences"])


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write lines of JSON, atomically; numbers of a row that are not finite become null."""
    with outputs.whole(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(outputs.finite(line), ensure_ascii=False) + "\n" for line in lines)
