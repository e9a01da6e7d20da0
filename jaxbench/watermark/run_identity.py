"""The identity of a run, stored next to its output, so that a run never resumes from another run's work (S file)."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxbench import outputs
from jaxbench.watermark.keys import Key


def write(path: Path, wanted: Mapping[str, Any], keys: Iterable[Key] = ()) -> None:
    """Write the identity of a run.

    Args:
      wanted: everything that decides its results, as JSON values; messages name differences by these names.
      keys: of the run. The file holds a salted scrypt hash of them, which detects another key and reveals none.
    """
    salt = secrets.token_bytes(16)
    outputs.write_json(path, {**wanted, "salt": salt.hex(), "keys": digest(keys, salt)})


def differing(path: Path, wanted: Mapping[str, Any], keys: Iterable[Key] = ()) -> list[str]:
    """Return the names of what differs between the run that wrote `path` and this one; empty if they are the same.

    Raises:
      ValueError: the file is missing or damaged, or is not a record of a run.
    """
    held = outputs.read_json(path)
    try:
        salt = bytes.fromhex(held["salt"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no record of a run ({type(error).__name__}: {error}); name another file"
        ) from error
    plain = json.loads(json.dumps(dict(wanted)))  # tuples are lists in a file
    found = [name for name, value in plain.items() if held.get(name) != value]
    return found + (["keys"] if held.get("keys") != digest(keys, salt) else [])


def digest(keys: Iterable[Key], salt: bytes) -> str:
    """Return a salted scrypt hash of keys, which tells them from others and reveals none."""
    halves = np.array([key.halves for key in keys], np.uint32)
    return hashlib.scrypt(halves.tobytes(), salt=salt, n=2**14, r=8, p=1, dklen=16).hex()
