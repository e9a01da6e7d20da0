"""Settings of one file of a model, checked as they are read (S file)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from jaxbench.config import TransformerConfig, shown

# A setting that no reader asks for and whose name contains one of these words changes what a model computes, or claims
# to: the words come from Granite, Gemma 2, Mixtral, DBRX, OLMo 2, GPT-NeoX, MPT, Qwen2-VL, SmolLM3 and GPT-OSS. Only
# these numbers leave the function unchanged.
NEUTRAL: dict[str, tuple[float, ...]] = {"multiplier": (1,), "scaling": (1,), "scale": (1,), "rotary": (1,)}
NEUTRAL |= {"expert": (0, 1), "moe": (0, 1)}
NEUTRAL |= dict.fromkeys(("softcap", "window", "clip", "norm", "interleaved", "mrope", "no_rope", "alibi", "sink"), ())
NEUTRAL |= dict.fromkeys(("parallel_attn", "parallel_residual", "layer_types"), ())
# Leftovers of training, epsilons of norms that the family lacks, and settings internal to transformers.
INERT = re.compile(r"^_|grad|loss|init|dropout|pdrop|eps(ilon)?$")


class Settings:
    """The settings of one file; a missing or unsupported one is an error that names the file."""

    def __init__(self, values: dict[str, Any], source: Path, prefix: str = ""):
        self.values, self.source, self.prefix = values, source, prefix
        self.asked: set[str] = set()  # keys that a reader has asked for; the others are judged by their names

    def need(self, key: str) -> Any:
        """Return a required setting."""
        if (value := self.given(key, None)) is None:
            raise ValueError(f"{self.source}: the setting {self.prefix + key!r} is missing")
        return value

    def count(self, key: str) -> int:
        """Return a setting that is an integer from 1."""
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
        """Return a setting, or the default if it is missing or null."""
        value = self.given(key, None)
        return default if value is None else value

    def given(self, key: str, default: Any) -> Any:
        """Return a setting, even null, or the default if it is missing."""
        self.asked.add(self.prefix + key)
        return self.values.get(self.prefix + key, default)

    def only(self, key: str, default: Any, *supported: Any) -> None:
        """Check that a setting, or its default, is one of the supported values."""
        value = self.get(key, default)
        if value not in supported:
            wanted = " or ".join(map(repr, supported))
            raise ValueError(f"{self.source}: {self.prefix + key}={shown(value)} is not supported, wanted {wanted}")


def build(read: Callable[[Settings], dict[str, Any]], s: Settings) -> TransformerConfig:
    """Make the configuration; whatever is wrong with a setting becomes one line that names the file."""
    try:
        config = TransformerConfig(**read(s))
    except pydantic.ValidationError as error:
        raise ValueError(f"{s.source}: {'; '.join(map(_said, error.errors()))}") from error
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{s.source}: a setting has the wrong type or is zero ({error})") from error
    return config


def _said(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors; a check of several fields names their values itself."""
    if not error["loc"]:
        return error["msg"].removeprefix("Value error, ").removeprefix("model: ")
    return f"{'.'.join(map(str, error['loc']))} {error['msg']}, got {shown(error['input'])}"


def refuse_other_functions(s: Settings, config: TransformerConfig) -> None:
    """Raise if a setting that no reader asked for says that the model computes something else.

    Raises:
      ValueError: there is such a setting; the message has its name and value.
    """
    for key, value in s.values.items():
        word = next((word for word in NEUTRAL if word in key.lower()), None)
        if word is None or key in s.asked or INERT.search(key.lower()) or _is_neutral(key, word, value, config):
            continue
        raise ValueError(
            f"{s.source}: {key}={shown(value)} is not supported in model_type {shown(s.values.get('model_type'))}: a "
            "model with it computes another function"
        )


def _is_neutral(key: str, word: str, value: Any, config: TransformerConfig) -> bool:
    """Return True if a setting of this name changes nothing."""
    if value is None or value is False or value in ({}, [], ""):
        return True
    if word == "layer_types":
        kind = "full_attention" if config.sliding_window is None else "sliding_attention"
        return isinstance(value, list) and all(each == kind for each in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if key == "attention_multiplier":  # Granite's replaces the root of a head's width
        return math.isclose(value, config.head_dim**-0.5)
    if word == "window":
        return value == config.sliding_window or (config.sliding_window is None and value >= config.max_seq_len)
    return value in NEUTRAL[word]


def shortest(value: float) -> float:
    """Shortest decimal that rounds to this float32: a file's 9.99999975e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
