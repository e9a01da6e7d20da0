"""Attacks on watermarked text: seeded, composable, each with a strength (S file).

An attack is a frozen configuration; `apply` runs it on texts. Its random numbers are Philox of (seed, index of the
text, place in a chain), independent of the batch. word_level.py, character_level.py and document_level.py have the
edits; rewriting by a language model is a callable in `Tools` (rewrite.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import pydantic
from pydantic import Field

from jaxbench.config import Base
from jaxbench.watermark.attack import character_level, document_level, word_level
from jaxbench.watermark.attack.random_draws import Draws

SITE = "watermark/attack/"
# fields that a name gives where they are not the default
DETAILS = {"side": "{}", "temperature": "temperature {:g}", "block_words": "blocks of {} words"}


class WordEdit(Base):
    """Edits of words or tokens at random places."""

    attack: Literal["delete", "insert", "substitute", "swap"]
    strength: float = Field(ge=0, le=1)  # probability per word; swap: per pair of neighbours
    unit: Literal["word", "token"] = "word"


class Synonym(Base):
    """Replaces words by WordNet synonyms, in the same inflection and case."""

    attack: Literal["synonym"] = "synonym"
    strength: float = Field(ge=0, le=1)  # probability per word that has a synonym


class CharacterEdit(Base):
    """Edits of characters: typos, case and emoji per word, look-alikes and invisible characters per character."""

    attack: Literal["typo", "case", "homoglyph", "zero_width", "emoji"]
    strength: float = Field(ge=0, le=1)  # probability per place where the edit is possible


class Truncate(Base):
    """Cuts off words."""

    attack: Literal["truncate"] = "truncate"
    strength: float = Field(ge=0, le=1)  # share of the words cut off
    side: Literal["end", "start", "both"] = "end"  # both: keep a window at a random place


class CopyPaste(Base):
    """Hides the whole marked text in human text."""

    attack: Literal["copy_paste"] = "copy_paste"
    strength: float = Field(ge=0, lt=1)  # share of human words in the result: 0.9 leaves 10 % marked
    spans: int = Field(default=1, ge=1, le=16)  # pieces that the marked text is cut into


class Rewrite(Base):
    """Rewrites by a language model, block by block."""

    attack: Literal["paraphrase", "back_translate"]
    strength: float = Field(default=1.0, ge=0, le=1)  # probability per block of sentences
    pivot: str = "French"  # back_translate: the language in between
    temperature: float = Field(default=0.7, ge=0)
    block_words: int = Field(default=48, ge=8, le=400)  # words rewritten at once


Step = Annotated[WordEdit | Synonym | CharacterEdit | Truncate | CopyPaste | Rewrite, Field(discriminator="attack")]


class Chain(Base):
    """Several attacks in sequence; not nested, so that a configuration has finitely many keys."""

    attack: Literal["chain"] = "chain"
    steps: tuple[Step, ...] = Field(min_length=1)

    @property
    def strength(self) -> float:
        """Greatest strength of a step."""
        return max(step.strength for step in self.steps)


Attack = Annotated[
    WordEdit | Synonym | CharacterEdit | Truncate | CopyPaste | Rewrite | Chain, Field(discriminator="attack")
]
_ADAPTER: pydantic.TypeAdapter = pydantic.TypeAdapter(Attack)
KINDS = (WordEdit, Synonym, CharacterEdit, Truncate, CopyPaste, Rewrite, Chain)
NAMES = tuple(name for kind in KINDS for name in get_args(kind.model_fields["attack"].annotation))


class Tools(NamedTuple):
    """What some attacks need besides the text."""

    tokenizer: Any = None  # unit="token": encode(text, add_special=...) -> ids, decode(ids) -> text, vocab_size
    human: Sequence[str] = ()  # carriers of copy_paste; words to insert
    rewrite: Callable[..., list[str]] | None = None  # rewrite(attack, texts, seed=, indices=) -> texts


class Attacked(NamedTuple):
    """Attacked texts and the realised edit rates [N]: edit distance over the original's length."""

    texts: list[str]
    word_edits: np.ndarray
    character_edits: np.ndarray  # nan if not counted


def parse_attack(value: str | Mapping[str, Any] | Base) -> Any:
    """Parse an attack from a name with its strength (`delete:0.3`), a mapping or an attack.

    Raises:
      ValueError: unknown attack (the message gives the nearest name), a strength outside its range, or an unknown key.
    """
    if isinstance(value, KINDS):
        return value
    if isinstance(value, str):
        name, colon, strength = value.partition(":")
        try:
            value = {"attack": name} | ({"strength": float(strength)} if colon else {})
        except ValueError as error:
            raise ValueError(f"attack {name!r}: strength {strength!r} is not a number") from error
    name = value.get("attack") if isinstance(value, Mapping) else value
    if name not in NAMES:
        close = difflib.get_close_matches(str(name), NAMES, n=1, cutoff=0.5)
        hint = f"the nearest is {close[0]}" if close else f"wanted one of {', '.join(NAMES)}"
        raise ValueError(f"attack {name!r} is unknown, {hint}")
    try:
        return _ADAPTER.validate_python(dict(value))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"] if part != name)
        raise ValueError(f"attack {name!r}: {key} is {first['input']!r}: {first['msg'].lower()}") from error


def compose(attacks: Sequence[Any]) -> Chain:
    """Return one attack that runs several in order (each as parse_attack takes it; a chain contributes its steps).

    Raises:
      ValueError: as parse_attack, or there is no attack.
    """
    steps: list[Any] = []
    for attack in map(parse_attack, attacks):
        steps += attack.steps if isinstance(attack, Chain) else (attack,)
    if not steps:
        raise ValueError(f"compose: wanted at least one attack, got {list(attacks)}")
    return Chain(steps=tuple(steps))


def rewrites(attack: Any) -> bool:
    """Return whether an attack needs a language model."""
    steps = attack.steps if isinstance(attack, Chain) else (attack,)
    return any(isinstance(step, Rewrite) for step in steps)


def label(attack: Any) -> str:
    """Return an attack's name in reports, e.g. `delete 30 %`, `copy paste, 25 % marked` or `truncate 50 %, start`."""
    if isinstance(attack, Chain):
        return " + ".join(label(step) for step in attack.steps)
    return ", ".join([_short(attack), *_details(attack)])


def _short(attack: Any) -> str:
    """Return an attack's name without its details."""
    if isinstance(attack, Chain):
        return " + ".join(_short(step) for step in attack.steps)
    name = attack.attack.replace("_", " ")
    if isinstance(attack, CopyPaste):
        pieces = f" in {attack.spans} spans" if attack.spans > 1 else ""
        return f"{name}, {100 * (1 - attack.strength):.3g} % marked{pieces}"
    unit = " tokens" if getattr(attack, "unit", "word") == "token" else ""
    language = f" via {attack.pivot}" if name == "back translate" else ""
    return f"{name}{unit}{language} {100 * attack.strength:.3g} %"


def _details(attack: Any) -> list[str]:
    """Return what is unusual about an attack and not in its short name."""
    found = []
    for field, form in DETAILS.items():
        kind = type(attack).model_fields.get(field)
        if kind is not None and getattr(attack, field) != kind.default:
            found.append(form.format(getattr(attack, field)))
    return found


def apply(
    attack: Any, texts: Sequence[str], *, seed: int, tools: Tools | None = None, indices: Sequence[int] | None = None,
    counts_characters: bool = True,
) -> Attacked:  # fmt: skip
    """Run one attack (as parse_attack takes it) on every text and measure what changed; empty texts stay.

    Args:
      tools: tokenizer, human texts and rewriter, if the attack needs them.
      indices: the texts' numbers in the random stream, 0, 1, ... by default.
      counts_characters: also measure character edits, in time quadratic in the length of a text.

    Raises:
      ValueError: the attack needs a tool that is not given, or indices do not fit.
    """
    attack, tools = parse_attack(attack), tools or Tools()
    numbers = list(range(len(texts))) if indices is None else list(indices)
    if len(numbers) != len(texts):
        raise ValueError(f"attacks: {len(numbers)} indices for {len(texts)} texts")
    steps = attack.steps if isinstance(attack, Chain) else (attack,)
    changed = list(texts)
    for place, step in enumerate(steps):
        changed = _step(step, changed, numbers, seed=seed, place=place, tools=tools)
    words = [edit_rate(text.split(), other.split()) for text, other in zip(texts, changed)]
    characters = [edit_rate(text, other) if counts_characters else np.nan for text, other in zip(texts, changed)]
    return Attacked(changed, np.array(words), np.array(characters))


def _step(attack: Any, texts: list[str], numbers: list[int], *, seed: int, place: int, tools: Tools) -> list[str]:
    """Run one step of a chain."""
    if isinstance(attack, Rewrite):
        if tools.rewrite is None:
            raise ValueError(f"attack {attack.attack!r} needs a language model: give Tools(rewrite=Rewriter(...))")
        own = (seed + (place << 32)) % 2**64  # 2**32 apart: a rewriter adds its own step numbers to the seed
        return tools.rewrite(attack, texts, seed=own, indices=numbers)
    out = []
    for text, row in zip(texts, numbers):
        draws = Draws(seed, step=place, site=SITE + attack.attack, row=row)
        out.append(_edit(attack, text, draws, tools) if text.strip() else text)
    return out


def _edit(attack: Any, text: str, draws: Draws, tools: Tools) -> str:
    if isinstance(attack, WordEdit) and attack.unit == "token":
        if tools.tokenizer is None:
            raise ValueError(f"attack {attack.attack!r} with unit='token' needs Tools(tokenizer=...)")
        ids = tools.tokenizer.encode(text, add_special=False)
        pool = range(tools.tokenizer.vocab_size)
        return tools.tokenizer.decode(word_level.edit(attack.attack, ids, attack.strength, draws, pool=pool))
    if isinstance(attack, WordEdit):
        return word_level.edit_text(attack.attack, text, attack.strength, draws, human=tools.human)
    if isinstance(attack, Synonym):
        return word_level.synonyms_for(text, attack.strength, draws)
    if isinstance(attack, CharacterEdit):
        return character_level.EDITS[attack.attack](text, attack.strength, draws)
    if isinstance(attack, Truncate):
        return document_level.truncate(text, attack.strength, draws, side=attack.side)
    return document_level.copy_paste(text, attack.strength, draws, human=tools.human, spans=attack.spans)


def edit_rate(original: Sequence, changed: Sequence) -> float:
    """Return the Levenshtein distance over the original's length; no dependency has it (difflib's is not a distance).

    0 for an empty original. Source: Wagner and Fischer 1974, one row at a time.
    """
    if not len(original):
        return 0.0
    codes: dict = {}
    codes_before, codes_after = (np.array([codes.setdefault(item, len(codes)) for item in items], np.int64)
                  for items in (original, changed))  # fmt: skip
    start = _common(codes_before, codes_after)
    codes_before, codes_after = codes_before[start:], codes_after[start:]
    end = _common(codes_before[::-1], codes_after[::-1])
    codes_before, codes_after = codes_before[: len(codes_before) - end], codes_after[: len(codes_after) - end]
    ramp = np.arange(len(codes_after) + 1)
    row = ramp.copy()
    for item in codes_before:
        best = np.minimum(row + 1, np.concatenate([row[:1] + 1, row[:-1] + (codes_after != item)]))
        row = np.minimum.accumulate(best - ramp) + ramp  # insertions, left to right
    return float(row[-1]) / len(original)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Count the leading items that are equal."""
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[:size] != second[:size])
    return int(differs[0]) if len(differs) else size


def slugs(given: Sequence[Any]) -> list[str]:
    """Return the attacks' names as parts of file names, e.g. `delete-30`; with details only where names coincide."""
    short = [_slug(_short(attack)) for attack in given]
    return [_slug(label(attack)) if short.count(name) > 1 else name for attack, name in zip(given, short)]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
