"""The page of verdicts: all of every response, marked and escaped, and nothing from elsewhere."""

import html.parser
import itertools
import re

import pytest

from jaxbench.hallucination.bulk import page

RESPONSE = 'It is <b>old</b>. <script>alert(1)</script> & "it" burned.\n\nJonas\' roof\u2028fell'
ABOUT = page.About("rows<i>.jsonl", 2, 1, 0.42, 0.25)


class Reader(html.parser.HTMLParser):
    """Texts of the page by class of the element they are in, its elements and their attributes."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.elements = [], [], []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(dict(attrs).get("class", tag))

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        self.texts.append((tuple(self.open), data))

    def of(self, name):
        """Return the texts inside elements of a class, those of notes apart."""
        return "".join(text for path, text in self.texts if name in path and ("note" in path) == (name == "note"))


def sentence(start, end, probability, passage=None):
    """Return a sentence of RESPONSE."""
    return {
        "start": start, "end": end, "text": RESPONSE[start:end], "probability": probability,
        "is_flagged": probability > 0.25, "passage": passage and {"start": 0, "end": 1, "text": passage},
    }  # fmt: skip


def verdict(*sentences, cut=0, probability=0.9, spans=()):
    """Return a verdict."""
    return {
        "probability": probability, "is_hallucinated": probability > 0.42, "sentences": list(sentences),
        "spans": [{"start": start, "end": end, "probability": 0.75} for start, end in spans], "num_cut": cut,
    }  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """Return a function that writes a page and reads it."""

    def made(*pairs):
        page.write(tmp_path / "page.html", pairs, ABOUT)
        reader = Reader()
        reader.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
        assert not reader.open
        return reader

    return made


def test_every_letter_of_a_response_is_shown_and_none_of_it_is_markup(read):
    row = {"context": "</div><script>", "question": "<img src=x onerror=alert(1)>", "response": RESPONSE, "id": "<u>"}
    marked = verdict(sentence(0, 17, 0.9, "<em>The mill</em>"), sentence(18, 60, 0.1), cut=1234)
    found = read((row, marked), ({"context": "a", "question": "", "response": "b"}, verdict(probability=0.1)))
    assert found.of("response") == RESPONSE + "b"
    assert found.of("context") == "</div><script>a" and "<img src=x" in "".join(text for _, text in found.texts)
    assert [tag for tag, _ in found.elements].count("script") == 1
    assert {tag for tag, _ in found.elements}.isdisjoint({"img", "u", "em", "b", "link"})
    assert "1,234 tokens of the context did not fit" in found.of("cut")
    assert "0.90. It should rest on: <em>The mill</em>" in found.of("note")


def test_flagged_sentences_and_responses_are_marked_by_more_than_colour(read):
    row = {"context": "a", "question": "", "response": RESPONSE}
    found = read((row, verdict(sentence(0, 17, 0.9), sentence(18, 60, 0.1, "x"))), (row, verdict(probability=0.1)))
    shown = [attrs for tag, attrs in found.elements if "tabindex" in attrs]
    assert [(attrs["class"], attrs["style"]) for attrs in shown] == [("s flag", "--p: 0.900"), ("s", "--p: 0.100")]
    notes = {attrs["id"] for _, attrs in found.elements if attrs.get("class") == "note"}
    assert [attrs["aria-describedby"] in notes for attrs in shown] == [True, True]
    assert "flagged, probability 0.90. No passage" in found.of("note") and "Nearest passage: x" in found.of("note")
    assert found.of("verdict") == "flagged, 0.90not flagged, 0.10"


def test_words_without_support_are_marked_inside_their_sentences_and_nothing_is_lost_or_doubled(read):
    row = {"context": "a", "question": "", "response": RESPONSE}
    marked = verdict(sentence(0, 17, 0.9), sentence(18, 60, 0.1), spans=[(6, 9), (9, 17), (14, 30)])
    found = read((row, marked))
    assert found.of("response") == RESPONSE
    assert found.of("t").removeprefix("bold") == RESPONSE[6:17] + RESPONSE[18:30]
    assert {attrs["title"] for _, attrs in found.elements if "title" in attrs} == {"without support: 0.75"}


def test_the_page_loads_nothing_and_has_both_themes(read, tmp_path):
    read(({"context": "a", "question": "", "response": "b"}, verdict()))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"""https?:|src=|href=|url\(|@import""", text)
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text


def test_rows_are_written_as_they_come(tmp_path):
    held, row = [], {"context": "a" * 1000, "question": "", "response": "b"}

    def pairs():
        for _ in range(2000):
            held.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
            yield row, verdict()

    page.write(tmp_path / "page.html", pairs(), ABOUT)
    assert held[-1] > 1_000_000  # of the 2,000 rows nearly all are on the disk when the last one is asked for
    assert all(later >= earlier for earlier, later in itertools.pairwise(held))
