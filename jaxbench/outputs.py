"""Output paths, checked before a command starts, and files written whole or not at all (S file).

An existing file is the user's. It is overwritten only with --overwrite, and never if it is an input of the same
command, under whatever name: paths are compared as files, so that links count.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import numpy as np

# numpy's messages for a full disk, in errors without an errno.
NUMPY_FULL = re.compile(r"Not enough free space to write \d+ bytes|\d+ requested and \d+ written")


def check_file(
    output: str | Path, inputs: Iterable[str | Path | None] = (), *, overwrite: bool = False, flag: str = "--output"
) -> Path:
    """Check that a file may be written and return its path; inputs: files that the command reads (None = no file).

    Raises:
      ValueError: it is one of the inputs, exists (without overwrite), is not a file, or its folder cannot be written.
    """
    path = Path(output)
    same = next((str(file) for file in inputs if file is not None and is_same(path, file)), None)
    if same is not None:
        raise ValueError(f"{flag}={path} is the input {same}, which would be lost; name another file")
    if path.is_dir():
        raise ValueError(f"{flag}={path} is a folder, wanted a file")
    if (path.exists() or path.is_symlink()) and not overwrite:
        raise ValueError(f"{flag}={path} exists; name another {flag}, or pass --overwrite")
    if path.exists() and not path.is_file():
        raise ValueError(f"{flag}={path} is no ordinary file, and writing would replace it; name another file")
    check_folder(path.absolute().parent, flag=flag)
    return path


def check_beside(
    output: str | Path, suffix: str, inputs: Iterable[str | Path | None] = (), *, overwrite: bool = False,
    flag: str = "--output",
) -> Path:  # fmt: skip
    """Path of a file written next to an output, under its name with another suffix, checked as by `check_file`.

    Raises:
      ValueError: it is the output itself, or may not be written.
    """
    path = Path(output).with_suffix(suffix)
    if path == Path(output):
        raise ValueError(f"{flag}={output} ends with {suffix}, as what is written beside it does; name it otherwise")
    if (path.exists() or path.is_symlink()) and not overwrite:
        raise ValueError(
            f"{flag}={output}: {path}, which is written beside it, exists; name another {flag}, or pass --overwrite"
        )
    return check_file(path, inputs, overwrite=True, flag=flag)


def check_folder(folder: str | Path, *, flag: str = "--workdir", is_written: bool = True) -> Path:
    """Check that a folder can be written or created, and return its path; leaves nothing behind.

    is_written: False if the command only reads there, which a disk without write access allows.

    Raises:
      ValueError: a file is at its path or above it, or nothing can be written there.
    """
    path = Path(folder)
    there = path.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not str(folder) or not there.is_dir():
        reason = f"{there} is a file" if str(folder) else "it is empty"
        raise ValueError(f"{flag}={folder} cannot be a folder: {reason}; name another with {flag}")
    if not is_written:
        return path
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(
            f"{flag}={folder}: nothing can be written in {there} ({error.strerror}); name another with {flag}"
        ) from error
    return path


def is_same(path: str | Path, other: str | Path) -> bool:
    """True if two paths lead to the same file, also through links; False if either does not exist."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


@contextlib.contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces `path` if the block ends without an error.

    A file is thus whole or as it was before, even if the process is killed; its folder is created.

    Raises:
      OSError: it cannot be written; `filename` is the file itself.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is None and NUMPY_FULL.search(str(error)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if isinstance(error, OSError) and error.errno and str(error.filename) in ("None", str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise


@contextlib.contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which becomes `folder` if the block ends without an error, and else is removed.

    Raises:
      OSError: by then, something other than an empty folder is at its path, or a file cannot be written; `filename` is
        the file's path in `folder`, or `folder` itself.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        try:
            yield made
        except OSError as error:
            if error.errno and (error.filename is None or Path(str(error.filename)).is_relative_to(made)):
                error.filename = str(folder / Path(str(error.filename or made)).relative_to(made))
            raise
        os.rename(made, folder)


def save_tensors(
    path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write contiguous arrays as a safetensors file, whole or not at all.

    Raises:
      OSError: it cannot be written, as on a full disk; `filename` is the file.
    """
    import safetensors
    import safetensors.numpy

    with whole(path) as temporary:
        try:
            safetensors.numpy.save_file(tensors, temporary, metadata=metadata)
        except safetensors.SafetensorError as error:  # not an OSError: the errno is only in its text
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def set_aside(path: Path) -> None:
    """Rename a file of an earlier run, if there is one, to NAME.1, .2, ..., the first name that is free."""
    if path.exists():
        names = (path.with_name(f"{path.stem}.{count}{path.suffix}") for count in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file, whole or not at all; numbers that are not finite become null, as `finite` says."""
    write_text(path, json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Replace NaN and infinities in a JSON value by None, at any depth: JSON cannot express them.

    NumPy's scalars become Python's.
    """
    numpy = sys.modules.get("numpy")  # not imported for this: commands that need none start faster
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


class CsvLines:
    """A file for csv.writer, whose rows end with a line feed; a carriage return in a value is quoted.

    With lineterminator="\\n" Python 3.11 leaves it bare, and a reader takes it for the end of the row.
    """

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, row: str) -> int:
        """Write a row, which comes with csv.writer's own line end."""
        return self._file.write(row.removesuffix("\r\n") + "\n")


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
    """Write rows as a CSV file, whole or not at all.

    Args:
      columns: their order; unset: every column in the order of first appearance. Values that a row lacks stay empty.
    """
    columns = columns or list(dict.fromkeys(name for row in rows for name in row))
    with whole(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(CsvLines(file), columns)
        writer.writeheader()
        writer.writerows(rows)


def read_json(path: Path) -> Any:
    """Value of a JSON file that an earlier run wrote.

    Raises:
      ValueError: it cannot be read; the message names the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); remove it, and the work is done again") from error
