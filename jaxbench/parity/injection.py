"""Replace one function or constant of unchanged code by a bug, and restore it (S file)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock


class Mutation(NamedTuple):
    """One bug and where it shows."""

    name: str
    case: str  # parity case it is injected into
    place: tuple[Any, str]  # module or class, and the name of its function or constant
    bug: Any  # called instead of the function, with the function itself and then its arguments; or another constant
    module: str | None = None  # module that teacher forcing must blame; None = not a module's output
    side: str = "torch"  # twin that has the bug; "shared": all twins, in a file that they share

    def injected(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the code has the bug."""
        return replaced(*self.place, self.bug)


def replaced(target: Any, name: str, bug: Callable[..., Any] | Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which target.name(...) calls bug(original, ...), or target.name is another constant."""
    original = getattr(target, name)
    wrong = (lambda *args, **options: bug(original, *args, **options)) if callable(bug) else bug
    return mock.patch.object(target, name, wrong)
