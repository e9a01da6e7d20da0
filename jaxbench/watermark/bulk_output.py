"""Part files, their manifest, and the one file they become: .parquet, .jsonl or .csv (S file)."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxbench import outputs
from jaxbench.watermark import identity

KINDS = ("parquet", "jsonl", "csv")
LISTED = 100  # bad lines that a report spells out
MANIFEST = "manifest.json"
FORMAT = 2  # of the columns: parts of another one are not gone on with


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
    """Write the columns of one chunk, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    if kind == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(_table(columns), temporary)
    else:
        rows = zip(*(column.tolist() for column in columns.values()))
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            if kind == "csv":
                csv.writer(file, lineterminator="\n").writerows(rows)
            else:
                file.writelines(json.dumps(dict(zip(columns, row)), ensure_ascii=False) + "\n" for row in rows)
    if kind == "csv":
        _names(path.parent).write_text(json.dumps(list(columns)), encoding="utf-8")
    os.replace(temporary, path)


def finished(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the reports of the chunks that are done, by name."""
    found = (outputs.read_json(path) for path in sorted(folder.glob("[0-9]*.json")))
    return {report["name"]: report for report in found}


def merge(folder: Path, names: list[str], output: Path, kind: str) -> None:
    """Put the parts together in order, under a temporary name, and rename it."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        if kind == "parquet":
            _merge_parquet([folder / f"{name}.parquet" for name in names], temporary)
        else:
            with open(temporary, "wb") as file:
                if kind == "csv":
                    file.write((",".join(json.loads(_names(folder).read_text(encoding="utf-8"))) + "\n").encode())
                for name in names:
                    with open(folder / f"{name}.{kind}", "rb") as part:
                        shutil.copyfileobj(part, file)
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)


def open_parts(output: Path, paths: list[str], job: Any, *, overwrite: bool) -> Path:
    """Return the folder of the parts: a new one, or that of the same run, to go on with.

    Args:
      overwrite: drop the parts of another run; those of this one are gone on with all the same.

    Raises:
      ValueError: the folder belongs to a run with other files, settings or keys, or is no folder of parts.
    """
    from jaxbench.watermark import bulk

    folder = parts_of(output)
    manifest = folder / MANIFEST
    files = [[os.path.abspath(path), os.path.getsize(path), os.stat(path).st_mtime_ns] for path in paths]
    wanted = {"files": files, "job": bulk.describe(job), "kind": kind_of(output), "format": FORMAT}
    keys = [one.key for one in job.candidates]
    if manifest.is_file():
        differing = identity.differing(manifest, wanted, keys)
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
    identity.write(manifest, wanted, keys)
    return folder


def parts_of(output: Path) -> Path:
    """Return the folder beside an output that its parts lie in while the run lasts."""
    return Path(f"{output}.parts")


def _names(folder: Path) -> Path:
    return folder / "columns.names"


def _table(columns: dict[str, np.ndarray]) -> Any:
    import pyarrow as pa

    return pa.table({
        name: pa.array(column, type=pa.string()) if column.dtype == object else pa.array(column)
        for name, column in columns.items()
    })  # fmt: skip


def _merge_parquet(parts: list[Path], target: Path) -> None:
    import pyarrow.parquet as pq

    writer = None
    try:
        for part in parts:
            table = pq.read_table(part)
            writer = writer or pq.ParquetWriter(target, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
