"""Part files, their manifest, and the file that they are merged into: .parquet, .jsonl or .csv (S file)."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxbench import outputs
from jaxbench.watermark import run_identity
from jaxbench.watermark.keys import Key

KINDS = ("parquet", "jsonl", "csv")
LISTED = 100  # maximum bad lines in a report
MANIFEST = "manifest.json"
FORMAT = 8  # version of columns, reports and scores: a run does not resume from parts of another version


def kind_of(output: Path) -> str:
    """Return the kind of an output file by its suffix.

    Raises:
      ValueError: an unknown suffix.
    """
    kind = output.suffix.lstrip(".")
    if kind not in KINDS:
        raise ValueError(f"output: {output} has an unknown suffix, wanted one of {', '.join('.' + k for k in KINDS)}")
    return kind


def write_part(path: Path, columns: dict[str, np.ndarray], kind: str) -> None:
    """Write the columns of one chunk atomically."""
    with outputs.whole(path) as temporary:
        if kind == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            texts = {name: pa.array(column, pa.string()) for name, column in columns.items() if column.dtype == object}
            pq.write_table(pa.table(columns | texts), temporary)
            return
        rows = zip(*(column.tolist() for column in columns.values()))
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            if kind == "csv":
                csv.writer(outputs.CsvLines(file)).writerows(rows)
                outputs.write_text(_names(path.parent), json.dumps(list(columns)))
            else:
                file.writelines(json.dumps(dict(zip(columns, row)), ensure_ascii=False) + "\n" for row in rows)


def finished(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the reports of the finished chunks, by name."""
    found = (outputs.read_json(path) for path in sorted(folder.glob("[0-9]*.json")))
    return {report["name"]: report for report in found}


def merge(folder: Path, names: list[str], output: Path, kind: str) -> None:
    """Merge the parts in order into one file, atomically."""
    parts = [folder / f"{name}.{kind}" for name in names]
    with outputs.whole(output) as temporary:
        if kind == "parquet":
            import pyarrow.parquet as pq

            with pq.ParquetWriter(temporary, pq.read_schema(parts[0])) as writer:
                for part in parts:
                    writer.write_table(pq.read_table(part))
            return
        with open(temporary, "wb") as file:
            if kind == "csv":
                heading = io.StringIO()  # names of candidates may have commas and quotes
                csv.writer(outputs.CsvLines(heading)).writerow(outputs.read_json(_names(folder)))
                file.write(heading.getvalue().encode())
            for path in parts:
                with open(path, "rb") as part:
                    shutil.copyfileobj(part, file)


def open_parts(output: Path, paths: list[str], job: str, keys: Iterable[Key], *, overwrite: bool) -> Path:
    """Return the folder of the parts: a new one, or that of the same run, to resume from.

    Args:
      job: what decides the scores, except keys.
      overwrite: drop the parts of another run; those of this run are kept in any case.

    Raises:
      ValueError: the folder belongs to a run with other files, settings or keys, or is not a folder of parts.
    """
    folder = parts_of(output)
    manifest = folder / MANIFEST
    files = [[os.path.abspath(path), os.path.getsize(path), os.stat(path).st_mtime_ns] for path in paths]
    wanted = {"files": files, "job": job, "kind": kind_of(output), "format": FORMAT}
    if manifest.is_file():
        differing = run_identity.differing(manifest, wanted, keys)
        if not differing:
            return folder
        if not overwrite:
            raise ValueError(
                f"output: {folder} belongs to a run with other {' and '.join(differing)}; repeat that run's command to "
                "go on with it, or pass --overwrite to drop it"
            )
        shutil.rmtree(folder)
    elif folder.exists() and (not folder.is_dir() or any(not name.startswith(".") for name in os.listdir(folder))):
        raise ValueError(f"output: {folder} is in the way and was not made by this command; name another --output")
    folder.mkdir(parents=True, exist_ok=True)
    run_identity.write(manifest, wanted, keys)
    return folder


def parts_of(output: Path) -> Path:
    """Return the folder, next to an output, that holds its parts during the run."""
    return Path(f"{output}.parts")


def _names(folder: Path) -> Path:
    return folder / "columns.names"
