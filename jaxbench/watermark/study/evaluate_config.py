"""What an evaluation runs: prompts, schemes, attacks, lengths, quality (S file)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxbench.config import Base
from jaxbench.watermark.attack.attacks import Attack, parse_attack, slugs
from jaxbench.watermark.config import Scheme, check_generates, parse_scheme

UNMARKED, HUMAN, CLEAN = "unmarked", "human", "none"  # arms besides the schemes; the attack that does nothing
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class Generate(Base):
    """How the texts are generated."""

    prompts: int = Field(default=100, ge=1)  # texts per arm
    prompt_tokens: int = Field(default=32, ge=1)  # prompt length; a longer prompt keeps its last tokens
    new_tokens: int = Field(default=400, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_k: int = Field(default=0, ge=0)  # 0 = all
    top_p: float = Field(default=1.0, gt=0, le=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_size: int = Field(default=16, ge=1)


class Detect(Base):
    """How the texts are tested."""

    fprs: tuple[float, ...] = (1e-2, 1e-3, 1e-5)  # levels
    lengths: tuple[int, ...] = (25, 50, 100, 200, 400)  # tokens of the text that the detector sees
    human_texts: int = Field(default=1000, ge=1)  # maximum; each is tested under every key
    canonicalize: bool = True  # undo look-alikes and invisible characters before tokenising

    @pydantic.model_validator(mode="after")
    def _check(self) -> Detect:
        if list(self.lengths) != sorted(set(self.lengths)) or not self.lengths or self.lengths[0] < 1:
            raise ValueError(f"detect: lengths={list(self.lengths)}, wanted ascending numbers from 1 on")
        if not self.fprs or not all(0 < fpr < 1 for fpr in self.fprs):
            raise ValueError(f"detect: fprs={list(self.fprs)}, wanted numbers in (0, 1)")
        return self


class Quality(Base):
    """The second model setting, which judges texts without knowing how they were generated."""

    model: str = "default"
    dtype: Literal["float32", "bfloat16"] = "float32"
    context: Literal["none", "prompt"] = "none"  # none: the text alone; prompt: after its prompt
    batch_size: int = Field(default=8, ge=1)
    attacked: bool = True  # judge attacked texts too


class Rewriting(Base):
    """The model of paraphrase and back-translation."""

    model: str = "default"
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_size: int = Field(default=16, ge=1)


class Evaluate(Base):
    """One evaluation; every file of it is a function of this and of the data."""

    model: str = "default"
    data: str | None = None  # a text file, or a folder with *prompts*.json and *documents*.json.gz; null: packaged text
    seed: int = Field(default=0, ge=0, lt=2**32)
    passphrase: str = "jaxbench evaluation"  # derives the evaluation's keys, which protect nothing
    num_keys: int = Field(default=10, ge=1, le=1000)  # row i of an arm is marked with key i modulo this
    generate: Generate = Generate()
    schemes: dict[str, Annotated[Scheme, pydantic.BeforeValidator(parse_scheme)]] = Field(
        min_length=1
    )  # name in the report -> scheme
    attacks: tuple[Annotated[Attack, pydantic.BeforeValidator(parse_attack)], ...] = ()  # `delete:0.3` or a mapping
    attack_tokens: int = Field(default=200, ge=1)  # tokens of a text that attacks and quality see
    detect: Detect = Detect()
    quality: Quality = Quality()
    rewriting: Rewriting = Rewriting()
    spoofing: bool = True  # guess keys, and forge marked text from marked samples
    shown_texts: int = Field(default=3, ge=0, le=50)  # per scheme, in the report

    @pydantic.model_validator(mode="after")
    def _check(self) -> Evaluate:
        for scheme in self.schemes.values():
            check_generates(scheme, "schemes", lists=False)
        wrong = [name for name in self.schemes if not NAME.fullmatch(name) or name in (UNMARKED, HUMAN)]
        if wrong:
            raise ValueError(f"schemes: the name {wrong[0]!r} is taken or not made of a-z, 0-9, dot, dash, underscore")
        names = slugs(self.attacks)
        twice = [name for name in names if names.count(name) > 1 or name == CLEAN]
        if twice:
            raise ValueError(f"attacks: {twice[0]!r} is given twice")
        return self

    def named_attacks(self) -> dict[str, Any]:
        """Return the attacks by the name that their files and results have."""
        return dict(zip(slugs(self.attacks), self.attacks))

    def arms(self) -> list[str]:
        """Return the generated arms: unmarked text first, then the schemes."""
        return [UNMARKED, *self.schemes]
