"""Names of jax.profiler's annotations while a profile is recorded (S file).

A profile holds them among spans of JAX's own runtime, from which nothing but the name tells them. JAX annotates
functions of its own by the same class, so what counts is whose code makes an annotation.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

MAKER = "jax._src.profiler"  # StepTraceAnnotation and annotate_function are there: the code that uses them is above


@contextlib.contextmanager
def collected(jax: Any) -> Iterator[set[str]]:
    """Yield the names of the annotations that other code than JAX's makes in the block: TraceAnnotation and its kin."""
    names: set[str] = set()
    annotation = jax.profiler.TraceAnnotation
    has_own, original = "__init__" in vars(annotation), annotation.__init__

    @functools.wraps(original)
    def noted(self: Any, name: str, *args: Any, **about: Any) -> None:
        if not _is_made_by_jax(sys._getframe(1)):
            names.add(str(name))
        original(self, name, *args, **about)

    annotation.__init__ = noted
    try:
        yield names
    finally:
        if has_own:
            annotation.__init__ = original
        else:
            del annotation.__init__


def _is_made_by_jax(frame: Any) -> bool:
    """Whether the first caller outside JAX's profiler is a module of JAX."""
    while frame is not None and frame.f_globals.get("__name__") == MAKER:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "jax"
