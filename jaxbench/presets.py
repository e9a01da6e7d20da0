"""Framework settings for a kind of processor: the files of configs/presets/*.yaml (S file).

Every setting has its source and says where this project measured it, or that it did not. A preset is exported as
environment variables, under which any command then runs; what the user has set already takes precedence.
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
FLAGS = {"xla": "XLA_FLAGS", "libtpu": "LIBTPU_INIT_ARGS"}  # variable that holds the flags of each kind
TRIAL = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
TRIAL_S = 120.0


class Setting(Base):
    """One setting of a framework."""

    name: str = pydantic.Field(pattern=r"^[A-Za-z_][\w.]*$")  # of a variable, of a flag without its dashes, or a call
    kind: Literal["variable", "xla", "libtpu", "python"]  # python: a line of the program, which cannot be exported
    value: str
    framework: Literal["jax", "torch", "both"]
    about: str = pydantic.Field(min_length=1)  # what it does, and what it costs
    source: str = pydantic.Field(pattern=r"^(https://|docs/)\S+$")  # where it is documented
    measured: str = ""  # where this project's docs report its effect; "" = not measured here
    is_default: bool = True  # False: for some programs only, exported with --all


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
      ValueError: there is no such preset or file.
    """
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"--name={name} is no preset; wanted one of {', '.join(names())}, or a YAML file")
    return config.load(path, [], Preset)


def variables(preset: Preset, *, everything: bool = False) -> dict[str, str]:
    """Environment variables of a preset; the user's own values and flags are kept and take precedence.

    Args:
      everything: also settings that are for some programs only.
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
    """Shell lines that export the variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in found.items())


def unknown_flags(preset: Preset) -> list[str]:
    """XLA flags that the installed jaxlib does not know: it aborts a process that is given one.

    Raises:
      ValueError: JAX does not start even without them, or not in time.
    """
    wanted = [f"--{setting.name}={setting.value}" for setting in preset.settings if setting.kind == "xla"]
    if not _starts([]):
        raise ValueError(f"preset: JAX of {sys.executable} does not start without flags; mend that first")
    return [] if not wanted or _starts(wanted) else [flag for flag in wanted if not _starts([flag])]


def _starts(flags: Iterable[str]) -> bool:
    """True if JAX's CPU backend starts in a process with these flags."""
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    try:
        done = subprocess.run([sys.executable, "-c", TRIAL], env=environment, capture_output=True, timeout=TRIAL_S)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"preset: JAX did not start within {TRIAL_S:g} s; is the machine busy? try again") from error
    return done.returncode == 0
