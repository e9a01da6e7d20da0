"""Settings of one file of a model, checked as they are read (S file)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from jaxbench.config import TransformerConfig, shown


class Settings:
    """The settings of one file; a missing or unsupported one is an error that names the file."""

    def __init__(self, values: dict[str, Any], source: Path, prefix: str = ""):
        self.values, self.source, self.prefix = values, source, prefix

    def need(self, key: str) -> Any:
        """Setting that must be there."""
        if self.values.get(self.prefix + key) is None:
            raise ValueError(f"{self.source}: the setting {self.prefix + key!r} is missing")
        return self.values[self.prefix + key]

    def count(self, key: str) -> int:
        """Setting that is a whole number from 1."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.source}: {self.prefix + key}={shown(value)} is no whole number from 1")
        return value

    def number(self, key: str, *default: Any) -> float:
        """Float32 setting, as the shortest decimal that rounds to it."""
        value = self.get(key, *default) if default else self.need(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.source}: {self.prefix + key}={shown(value)} is no number")
        return shortest(value)

    def get(self, key: str, default: Any) -> Any:
        """Setting, or the default where it is missing or null."""
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def only(self, key: str, default: Any, *supported: Any) -> None:
        """Check that a setting, or its default, is one of the supported values."""
        value = self.get(key, default)
        if value not in supported:
            wanted = " or ".join(map(repr, supported))
            raise ValueError(f"{self.source}: {self.prefix + key}={shown(value)} is not supported, wanted {wanted}")


def build(read: Callable[[Settings], dict[str, Any]], s: Settings) -> TransformerConfig:
    """Make the configuration; whatever is wrong with a setting becomes one line that names the file."""
    try:
        return TransformerConfig(**read(s))
    except pydantic.ValidationError as error:
        parts = [".".join(map(str, e["loc"])) + " " + e["msg"] + f", got {shown(e['input'])}" for e in error.errors()]
        raise ValueError(f"{s.source}: {'; '.join(parts)}") from error
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{s.source}: a setting has the wrong type or is zero ({error})") from error


def shortest(value: float) -> float:
    """Shortest decimal that rounds to this float32: a file's 9.99999975e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
