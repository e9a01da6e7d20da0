"""The table of watermarking schemes, and how a configuration names one (S file: neither JAX nor PyTorch).

A scheme is a frozen configuration with the members of schemes/contract.py, in one file of schemes/; its field `scheme`
is its name. `parse_scheme` reads a name, a mapping or a scheme. Keys are not part of a scheme.
"""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic
from pydantic import Field

from jaxbench.config import Base
from jaxbench.watermark.schemes.dip import Dip
from jaxbench.watermark.schemes.gumbel import Gumbel
from jaxbench.watermark.schemes.kgw import Kgw
from jaxbench.watermark.schemes.kgw_markllm import MarkLlmKgw
from jaxbench.watermark.schemes.kgw_transformers import TransformersKgw
from jaxbench.watermark.schemes.morphmark import MorphMark
from jaxbench.watermark.schemes.synthid import SynthId
from jaxbench.watermark.schemes.unigram import Unigram

Level = Annotated[float, Field(gt=0, lt=1)]  # a rate or a share
Count = Annotated[int, Field(ge=1, le=10**9)]


SCHEMES: dict[str, type[Base]] = {
    "kgw": Kgw,
    "unigram": Unigram,
    "gumbel": Gumbel,
    "synthid": SynthId,
    "dip": Dip,
    "morphmark": MorphMark,
    "kgw_markllm": MarkLlmKgw,
    "kgw_transformers": TransformersKgw,
}
Scheme = Annotated[
    functools.reduce(operator.or_, SCHEMES.values()),
    Field(discriminator="scheme"),
    pydantic.BeforeValidator(lambda given: {"scheme": given} if isinstance(given, str) else given),  # a name alone
]


def parse_scheme(given: str | Mapping[str, Any] | Base) -> Any:
    """Return the scheme that a name, a mapping with the key `scheme`, or a scheme stands for.

    Raises:
      ValueError: the scheme is unknown (the message gives the nearest name), or a field is unknown or out of range.
    """
    if isinstance(given, tuple(SCHEMES.values())):
        return given
    fields = {"scheme": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else None
    if fields is None or not isinstance(fields.get("scheme"), str):
        known = ", ".join(SCHEMES)
        raise ValueError(f"scheme: {given!r} names none, wanted one of {known}, or a mapping with the key scheme")
    name = fields["scheme"]
    if name not in SCHEMES:
        near = difflib.get_close_matches(name.lower(), SCHEMES, n=1, cutoff=0.3)
        hint = f"the nearest is {near[0]}" if near else f"wanted one of {', '.join(SCHEMES)}"
        raise ValueError(f"scheme: {name!r} is unknown, {hint}")
    try:
        return SCHEMES[name].model_validate(fields)
    except pydantic.ValidationError as error:
        raise ValueError("; ".join(_problem(name, problem) for problem in error.errors(include_url=False))) from error


def num_payloads(scheme: Any) -> int:
    """Number of payloads that a scheme can carry; 1 means that it carries no payload."""
    return 1 << getattr(scheme, "payload_bits", 0)


def check_generates(scheme: Any, place: str, *, lists: bool = True) -> None:
    """Raise a ValueError if a scheme cannot mark text.

    Args:
      place: what the message begins with.
      lists: whether to accept schemes with a toolkit's green lists, whose key is one of their fields.
    """
    if scheme.is_detection_only:
        raise ValueError(f"{place}: scheme {scheme!r} has a list for each candidate token, which is for detection only")
    if scheme.key_field is not None and not lists:
        raise ValueError(f"{place}: scheme {scheme.scheme} has one key, a field of its own, wanted one that takes keys")


def _problem(name: str, problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, SCHEMES[name].model_fields, n=1, cutoff=0.0)
        return f"scheme {name}: field {key!r} is unknown, the nearest is {near[0]}"
    return f"scheme {name}: {key}={problem['input']!r}: {message[0].lower()}{message[1:]}" if key else message
