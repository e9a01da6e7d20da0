"""What the frameworks let one set for a kind of processor: the files of configs/presets/*.yaml (S file).

Every setting has its source and says where it was measured here, or that it was not. A preset is exported as variables
of the environment, which any command then runs under; what the user has set already wins.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pydantic

from jaxbench import config
from jaxbench.config import Base

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "presets"
FLAGS = {"xla": "XLA_FLAGS", "libtpu": "LIBTPU_INIT_ARGS"}  # variable that the flags of each kind stand in
TRIAL = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
TRIAL_S = 120.0


class Setting(Base):
    """One thing that can be set."""

    name: str = pydantic.Field(pattern=r"^[A-Za-z_][\w.]*$")  # of a variable, of a flag without its dashes, or a call
    kind: Literal["variable", "xla", "libtpu", "python"]  # python: a line of the program, which cannot be exported
    value: str
    framework: Literal["jax", "torch", "both"]
    about: str = pydantic.Field(min_length=1)  # what it does, and what it costs
    source: str = pydantic.Field(pattern=r"^(https://|docs/)\S+$")  # who says so
    measured: str = ""  # where in this project's docs its effect stands; "" = not measured here
    is_default: bool = True  # False: for some programs alone, exported with --all


class Preset(Base):
    """Settings of one kind of processor."""

    device: Literal["cpu", "gpu", "tpu"]
    about: str = pydantic.Field(min_length=1)
    settings: tuple[Setting, ...] = pydantic.Field(min_length=1)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Preset:
        names = [setting.name for setting in self.settings]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"preset: settings.name={twice[0]} is there twice")
        return self


def names() -> list[str]:
    """Names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Preset:
    """A preset by its name, or from a YAML file.

    Raises:
      ValueError: there is none.
    """
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"--name={name} is no preset; wanted one of {', '.join(names())}, or a YAML file")
    return config.load(path, [], Preset)


def variables(preset: Preset, *, everything: bool = False) -> dict[str, str]:
    """Variables of the environment that make a preset; the user's own values and flags stay and win.

    Args:
      everything: also settings that are for some programs alone.
    """
    found: dict[str, str] = {}
    flags: dict[str, list[str]] = {}
    for setting in preset.settings:
        if not (setting.is_default or everything):
            continue
        if setting.kind == "variable":
            found[setting.name] = os.environ.get(setting.name, setting.value)
        elif setting.kind in FLAGS:
            flags.setdefault(FLAGS[setting.kind], []).append(f"--{setting.name}={setting.value}")
    for variable, wanted in flags.items():
        own = os.environ.get(variable, "").split()
        known = {flag.partition("=")[0] for flag in own}
        found[variable] = " ".join([*own, *(flag for flag in wanted if flag.partition("=")[0] not in known)])
    return found


def exported(found: dict[str, str]) -> str:
    """Lines that a shell reads."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in found.items())


def unknown_flags(preset: Preset) -> list[str]:
    """XLA flags that the installed jaxlib does not know; it ends a process that is given one.

    Raises:
      ValueError: JAX does not start even without them.
    """
    wanted = [f"--{setting.name}={setting.value}" for setting in preset.settings if setting.kind == "xla"]
    if not _starts([]):
        raise ValueError(f"preset: JAX of {sys.executable} does not start without flags; mend that first")
    return [] if not wanted or _starts(wanted) else [flag for flag in wanted if not _starts([flag])]


def _starts(flags: Iterable[str]) -> bool:
    """True where a process with these flags makes JAX's CPU backend."""
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run([sys.executable, "-c", TRIAL], env=environment, capture_output=True, timeout=TRIAL_S)
    return done.returncode == 0
