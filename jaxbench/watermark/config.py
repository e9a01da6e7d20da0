"""The watermarking schemes as frozen configurations (S file: neither JAX nor PyTorch).

A scheme is told by its field `scheme`; `parse_scheme` reads a name, a mapping or a scheme. Keys are no part of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxbench.config import Base

MAX_WIDTH = 8  # tokens of context at most
Level = Annotated[float, Field(gt=0, lt=1)]  # a rate or a share
Count = Annotated[int, Field(ge=1, le=10**9)]
MAX_DEPTH = 30  # layers of a tournament at most: a word has 32 bits


class ContextRule(Base):
    """Which tokens before a position seed its pseudo-random function; definition.py has the mathematics."""

    kind: Literal["left", "skip", "min", "self"] = "left"
    width: int = Field(default=1, ge=1, le=MAX_WIDTH)  # h, tokens; `self` counts the candidate among them

    @property
    def length(self) -> int:
        """Return how many tokens must precede a position for it to be marked and scored."""
        return self.width - 1 if self.kind == "self" else self.width


class Kgw(Base):
    """Green lists and a bias on their logits (Kirchenbauer et al. 2023, arXiv:2301.10226), Bernoulli form."""

    scheme: Literal["kgw"] = "kgw"
    gamma: float = Field(default=0.25, gt=0, lt=1)  # expected share of green tokens
    delta: float = Field(default=2.0, ge=0)  # bias on green logits, nats
    context: ContextRule = ContextRule()
    payload_bits: int = Field(default=0, ge=0, le=16)  # a message of this many bits, 0 = none


class Unigram(Base):
    """One fixed green list (Zhao et al. 2023, arXiv:2306.17439)."""

    scheme: Literal["unigram"] = "unigram"
    gamma: float = Field(default=0.5, gt=0, lt=1)  # share of green tokens
    delta: float = Field(default=2.0, ge=0)  # bias on green logits, nats


class Gumbel(Base):
    """Keyed Gumbel noise in place of random noise (Aaronson 2022, "My AI safety lecture for UT Effective Altruism")."""

    scheme: Literal["gumbel"] = "gumbel"
    context: ContextRule = ContextRule(kind="left", width=4)
    prf: Literal["jaxbench", "vllm"] = "jaxbench"  # vllm: bit-compatible with vLLM's philox4x32-10-v1
    dual_key_alpha: float = Field(default=0.0, ge=0, le=1)  # share of steps that use the second key, 0 = one key
    deduplicate: bool = True  # a context used before in a row draws with ordinary randomness
    payload_bits: int = Field(default=0, ge=0, le=16)  # a message of this many bits, 0 = none

    @pydantic.model_validator(mode="after")
    def _check(self) -> Gumbel:
        _refuse_self(self.scheme, self.context)
        if self.prf == "vllm" and (self.context.kind != "left" or self.payload_bits):
            raise ValueError(
                f"gumbel: prf=vllm knows context.kind=left and payload_bits=0, got context.kind={self.context.kind}, "
                f"payload_bits={self.payload_bits}"
            )
        return self


class SynthId(Base):
    """Tournament sampling with two leaves (Dathathri et al. 2024, Nature 634, non-distortionary)."""

    scheme: Literal["synthid"] = "synthid"
    depth: int = Field(default=30, ge=1, le=MAX_DEPTH)  # layers of the tournament
    candidates: int | None = Field(
        default=4096, ge=32, multiple_of=32
    )  # who plays (definition.head); None = all tokens
    context: ContextRule = ContextRule(kind="left", width=4)
    score: Literal["weighted", "mean", "bayesian"] = "weighted"  # what detection adds up

    @pydantic.model_validator(mode="after")
    def _check(self) -> SynthId:
        _refuse_self(self.scheme, self.context)
        return self


class Dip(Base):
    """Distribution-preserving reweighting along a keyed permutation (Wu et al. 2023, arXiv:2310.07710)."""

    scheme: Literal["dip"] = "dip"
    alpha: float = Field(default=0.45, ge=0, le=0.5)  # mass taken from the front of the order; 0 marks nothing
    context: ContextRule = ContextRule(kind="left", width=4)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Dip:
        _refuse_self(self.scheme, self.context)
        return self


class MarkLlmKgw(Base):
    """KGW with the green lists of MarkLLM 0.1.5; field names and meanings are MarkLLM's own."""

    scheme: Literal["kgw_markllm"] = "kgw_markllm"
    gamma: float = Field(default=0.5, gt=0, lt=1)  # share of green tokens
    delta: float = Field(default=2.0, ge=0)  # bias on green logits, nats
    hash_key: int = Field(default=15485863, ge=1)
    prefix_length: int = Field(default=1, ge=1, le=MAX_WIDTH)  # tokens of context
    f_scheme: Literal["time", "additive", "skip", "min"] = "time"
    window_scheme: Literal["left", "self"] = "left"  # self: detection only


class TransformersKgw(Base):
    """KGW with the green lists of transformers' WatermarkingConfig; field names and meanings are its own."""

    scheme: Literal["kgw_transformers"] = "kgw_transformers"
    greenlist_ratio: float = Field(default=0.25, gt=0, lt=1)  # share of green tokens
    bias: float = Field(default=2.0, ge=0)  # bias on green logits, nats
    hashing_key: int = Field(default=15485863, ge=1)
    seeding_scheme: Literal["lefthash", "selfhash"] = "lefthash"  # selfhash: detection only
    context_width: int = Field(default=1, ge=1, le=MAX_WIDTH)  # tokens of context


Scheme = Annotated[Kgw | Unigram | Gumbel | SynthId | Dip | MarkLlmKgw | TransformersKgw, Field(discriminator="scheme")]
SCHEMES: dict[str, type[Base]] = {
    "kgw": Kgw,
    "unigram": Unigram,
    "gumbel": Gumbel,
    "synthid": SynthId,
    "dip": Dip,
    "kgw_markllm": MarkLlmKgw,
    "kgw_transformers": TransformersKgw,
}


def parse_scheme(given: str | Mapping[str, Any] | Base) -> Any:
    """Return the scheme that a name, a mapping with the key `scheme`, or a scheme stands for.

    Raises:
      ValueError: the scheme is unknown (the nearest name is given), or a field is unknown or out of range.
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


def context_length(scheme: Any) -> int:
    """Return how many tokens must precede a position for this scheme to mark and score it."""
    if scheme.scheme == "unigram" or (scheme.scheme == "gumbel" and scheme.prf == "vllm"):
        return 0
    if scheme.scheme == "kgw_markllm":
        return scheme.prefix_length
    if scheme.scheme == "kgw_transformers":
        return scheme.context_width - (scheme.seeding_scheme == "selfhash")
    return scheme.context.length


def num_payloads(scheme: Any) -> int:
    """Return how many payloads the scheme can carry; 1 = it carries none."""
    return 1 << getattr(scheme, "payload_bits", 0)


def check_generates(scheme: Any, place: str, *, lists: bool = True) -> None:
    """Raise a ValueError where no text can be marked with a scheme.

    Args:
      place: what the message begins with.
      lists: whether schemes of green lists, whose key is a field of theirs, are taken.
    """
    if "self" in (getattr(scheme, "window_scheme", ""), getattr(scheme, "seeding_scheme", "")[:4]):
        raise ValueError(f"{place}: scheme {scheme!r} has a list for each candidate token, which is for detection only")
    if not lists and scheme.scheme in ("kgw_markllm", "kgw_transformers"):
        raise ValueError(f"{place}: scheme {scheme.scheme} has one key, a field of its own, wanted one that takes keys")


def draws(scheme: Any) -> bool:
    """Return True where the scheme replaces the draw of a token (and so needs a temperature above 0)."""
    return scheme.scheme in ("gumbel", "synthid", "dip")


def _refuse_self(scheme: str, context: ContextRule) -> None:
    if context.kind == "self":
        raise ValueError(f"{scheme}: context.kind={context.kind} is for kgw only, wanted left, skip or min")


def _problem(name: str, problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, SCHEMES[name].model_fields, n=1, cutoff=0.0)
        return f"scheme {name}: field {key!r} is unknown, the nearest is {near[0]}"
    return f"scheme {name}: {key}={problem['input']!r}: {message[0].lower()}{message[1:]}" if key else message
