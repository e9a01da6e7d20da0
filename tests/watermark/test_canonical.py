"""Canonicalisation: attacks on the look are undone, what models write stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.watermark import canonical

PLAIN = "The quick brown fox jumps over a lazy dog, I say: Xylophones Play Jazz in EACH BIG ROOM."


@pytest.mark.parametrize("step", [1, 2, 3])
def test_cyrillic_and_greek_look_alikes_become_latin_again(step):
    table = str.maketrans("aceijopsxyABCEHIJKMNOPSTXYZ", "асеіјорѕхуАВСЕНІЈΚМΝОРЅТХΥΖ")
    attacked = "".join(c.translate(table) if i % step == 0 else c for i, c in enumerate(PLAIN))
    found = canonical.canonicalize(attacked)
    assert found.text == PLAIN
    assert found.homoglyphs == sum(a != b for a, b in zip(attacked, PLAIN)) > 0
    assert (found.invisible, found.compatibility) == (0, 0)


@pytest.mark.parametrize("sign", ["\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u202e", "\ufe0f"])
def test_invisible_characters_vanish_from_latin_text(sign):
    found = canonical.canonicalize(sign.join(PLAIN))
    assert found.text == PLAIN
    assert found.invisible == found.num_changed == len(PLAIN) - 1


@pytest.mark.parametrize("sign", ["\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\ufe0f"])
def test_invisible_characters_vanish_behind_typographic_punctuation_and_styled_letters(sign):
    text = "\u201cIt\u2019s late\u2026\u201d \u2014 she said \u2013 to the caf\u00e9\u2019s owner"
    assert canonical.canonicalize(sign.join(text)).text == text
    found = canonical.canonicalize(f"\uff21{sign}\U0001d41b{sign}c\u3000{sign}d")
    assert (found.text, found.invisible, found.compatibility) == ("Abc d", 3, 3)


def test_capital_initials_that_look_latin_are_latin():
    assert canonical.canonicalize("Said \u039d. \u03a5. P. Co.").text == "Said N. Y. P. Co."


def test_styled_letters_and_unusual_spaces_become_plain():
    found = canonical.canonicalize(
        "\uff28\uff45\uff4c\uff4c\uff4f\u00a0\U0001d430\U0001d428\U0001d42b\U0001d425\U0001d41d"
    )
    assert found.text == "Hello world"
    assert found.compatibility == 11


@pytest.mark.parametrize(
    "text",
    [
        "Оса сосала сок, а рак рос.",  # Russian of letters that all look Latin
        "Привет, мир. Это обычный русский текст.",
        "Το ποτάμι είναι μεγάλο",
        "The parameter α lies between β and γ.",
        "Look \u203c\ufe0f and \u2049\ufe0f",  # emoji of the punctuation's block
        "Family: \U0001f468\u200d\U0001f469\u200d\U0001f467, heart: \u2764\ufe0f",
        "می\u200cخواهم",  # Persian needs its non-joiner
        "“Quotes” — dashes… naïve café, Straße, ½",
        "",
    ],
)
def test_what_a_model_writes_itself_stays(text):
    assert canonical.canonicalize(text) == (text, 0, 0, 0)


@given(st.text(max_size=60))
def test_doing_it_twice_changes_nothing_more(text):
    once = canonical.canonicalize(text)
    assert canonical.canonicalize(once.text) == (once.text, 0, 0, 0)
    assert (once.num_changed == 0) == (once.text == text)
