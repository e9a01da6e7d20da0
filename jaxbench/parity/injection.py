"""A bug put in the place of one function or constant of unchanged code, and taken out again (S file)."""

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
    bug: Any  # called in the function's place, with the function itself and then its arguments; or another constant
    module: str | None = None  # module that teacher forcing must blame; None = not a module's output
    side: str = "torch"  # twin that has the bug; "shared": all have it, in a file that they share

    def injected(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the code has the bug."""
        return replaced(*self.place, self.bug)


def replaced(target: Any, name: str, bug: Callable[..., Any] | Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which a call of target.name is bug(original, the call's arguments), or target.name is a constant."""
    original = getattr(target, name)
    wrong = (lambda *args, **options: bug(original, *args, **options)) if callable(bug) else bug
    return mock.patch.object(target, name, wrong)
