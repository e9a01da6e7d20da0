"""Load models for commands that decode with Flax only, with native kernels or with XLA's programs."""

from __future__ import annotations

from pathlib import Path

from jaxbench import sample, transformer
from jaxbench.generation import decoder
from jaxbench.native import model as native

BACKEND = decoder.Backend(transformer, sample, native)


def load(spec: str | Path | None, choice: decoder.Choice) -> decoder.Decoder:
    """Load a model, as decoder.load."""
    return decoder.load(spec, choice, BACKEND)
