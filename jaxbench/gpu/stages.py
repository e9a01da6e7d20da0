"""What is measured on a GPU, in order of worth: the model of configs/gpu/*.yaml (S file: neither JAX nor PyTorch)."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
from typing import Any

import pydantic

from jaxbench.config import Base

# Where a package is imported by another name than its own.
IMPORTED_AS = {"orbax-checkpoint": "orbax", "scikit-learn": "sklearn"}


class Stage(Base):
    """One command and what is kept of it."""

    name: str = pydantic.Field(pattern=r"^[a-z0-9_]+$")
    about: str  # the figures it gives
    # Words of a shell; {work} is its folder, {device} gpu, or cpu in a rehearsal, {data} the folder of --data.
    command: str
    rehearsal: str = ""  # words that make it tiny, behind the command
    limit_s: float = pydantic.Field(gt=0)  # it is ended behind so many seconds
    needs: tuple[str, ...] = ()  # packages beside those that every stage needs
    # Settings of its environment; words in values as in command.
    environment: dict[str, str] = {}
    repeats: bool = False  # a resumed call runs it again, as what it reads may be newer
    returned: tuple[str, ...] = ()  # files of its folder that come back beside its records

    @property
    def reads_data(self) -> bool:
        """True where it needs the folder of --data, which a rehearsal replaces."""
        return "{data}" in self.command

    def words(self, *, work: str, device: str, is_rehearsal: bool, python: str, data: str = "") -> list[str]:
        """Command line of the stage.

        Raises:
          ValueError: a place in braces that is not known.
        """
        text = f"{self.command} {self.rehearsal}" if is_rehearsal else self.command
        try:
            words = [self._filled(word, work=work, device=device, data=data) for word in shlex.split(text)]
        except ValueError as error:
            raise ValueError(f"stage {self.name}: command {text!r}: {error}") from error
        if not words:
            raise ValueError(f"stage {self.name}: command {text!r} has no words")
        return [python, *words[1:]] if words[0] == "python" else words

    def settings(self, *, work: str, device: str, data: str = "") -> dict[str, str]:
        """Settings of its environment.

        Raises:
          ValueError: a place in braces that is not known.
        """
        places = {"work": work, "device": device, "data": data}
        return {name: self._filled(value, **places) for name, value in self.environment.items()}

    def _filled(self, word: str, **places: str) -> str:
        try:
            return word.format(**places)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"stage {self.name}: {word!r}: {error} is no place; {{work}}, {{device}} and {{data}} are known"
            ) from error

    def missing(self) -> list[str]:
        """Packages it needs that are not installed."""
        return missing(self.needs)


class Stages(Base):
    """Stages in order of worth."""

    needs: tuple[str, ...] = ()  # packages that every stage needs
    stages: tuple[Stage, ...] = pydantic.Field(min_length=1)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Stages:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: a name stands twice among {', '.join(names)}")
        for stage in self.stages:
            stage.words(work="", device="", is_rehearsal=True, python="")
            stage.settings(work="", device="")
            for name in stage.returned:
                if not name or "/" in name or name.startswith("."):
                    raise ValueError(f"stage {stage.name}: returned: {name!r} is no name of a file of its folder")
        return self

    def chosen(self, names: Sequence[str] | None) -> list[Stage]:
        """Stages of these names, in the order of the file; None = all.

        Raises:
          ValueError: a name that no stage has, or no name.
        """
        known = [stage.name for stage in self.stages]
        for name in [""] if names is not None and not names else names or ():
            if name not in known:
                raise ValueError(f"--stage={name!r} is unknown, wanted some of {', '.join(known)}")
        return [stage for stage in self.stages if names is None or stage.name in names]


def missing(packages: Sequence[str]) -> list[str]:
    """Those of the packages that cannot be imported here."""

    def spec(name: str) -> Any:
        try:
            return importlib.util.find_spec(IMPORTED_AS.get(name, name.replace("-", "_")))
        except (ImportError, ValueError):  # no name of a module, or what holds it is missing
            return None

    return [name for name in packages if spec(name) is None]
