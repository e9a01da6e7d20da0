"""Load a Python file whose function `pair` takes no arguments and returns a jaxbench.Pair (S file)."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


def load(path: str | None) -> Any:
    """Load the pair that a file describes.

    Raises:
      ValueError: there is no such file, it or its function `pair` fails, or `pair` does not return a jaxbench.Pair.
    """
    if path is None:
        raise ValueError(f"--file={path}: name a Python file that defines pair()")
    if not Path(path).is_file():
        raise ValueError(f"--file={path}: no such file")
    try:
        names = vars(_imported(Path(path)))
    except ModuleNotFoundError as error:
        raise ValueError(f"--file={path}: needs the package of {error.name}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"--file={path}: {type(error).__name__}: {first_line(error)}") from error
    if not callable(names.get("pair")):
        raise ValueError(f"--file={path}: defines no function pair()")
    from jaxbench.pair.public_types import Pair

    try:
        pair = names["pair"]()
    except (Exception, SystemExit) as error:
        raise ValueError(f"--file={path}: pair() fails: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(pair, Pair):
        raise ValueError(f"--file={path}: pair() returns a {type(pair).__name__}, wanted jaxbench.Pair(...)")
    return pair


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    return next(iter(str(error).strip().splitlines()), "")


def _imported(path: Path) -> types.ModuleType:
    """Import a file as a module under its own name in sys.modules: torch.compile looks up a class's module there.

    Modules beside the file can be imported, from the file and later from its functions, after all others.
    """
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    name = f"jaxbench_pair_{path.stem}"
    spec = importlib.util.spec_from_loader(name, importlib.machinery.SourceFileLoader(name, str(path)))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
