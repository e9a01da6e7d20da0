"""Questions over passages: files, articles on one side or the other, rows whose answers count."""

import gzip
import json

import numpy as np
import pytest

from jaxbench.compress import questions, rows
from jaxbench.parity import cases
from jaxbench.pretrained import tokenizer
from jaxbench.text import questions as text_questions

CONFIG = cases.COMPRESSOR.model_copy(
    update={"decoder": cases.LLAMA.model_copy(update={"vocab_size": 49152, "num_layers": 3}), "chunk": 16}
)
SETTINGS = rows.RowsConfig(batch=5, num_targets=8, clear=16, sampled=3)
PASSAGES = {
    "Mills": "The mill was built in 1712 by Ann.",
    "Rivers": "The Ouse is 37 miles long.",
    "Oaks": "Oak is hard.",
}


@pytest.fixture(scope="module")
def words():
    return tokenizer.load_tokenizer(None)


@pytest.fixture(scope="module")
def found(words, tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "q.jsonl.gz"
    lines = [
        {"title": title, "context": passage, "question": f"What of {i}? ", "answers": ["the mill"] if i else []}
        for title, passage in PASSAGES.items()
        for i in range(2)
    ]
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return questions.of_file(path, words)


def test_questions_are_read_with_an_end_and_a_word_for_those_without_an_answer(found, words):
    assert len(found) == 6 and found[0].answers == () and found[1].answers == ("the mill",)
    assert words.decode(found[1].question) == "\nQuestion: What of 1?\nAnswer:"
    assert words.decode(found[0].answer[:-1]) == " unanswerable" and found[0].answer[-1] == words.eos_id
    assert words.decode(found[1].context) == PASSAGES["Mills"]


def test_an_article_is_on_one_side(found):
    learned, asked = questions.split(found, 0.5)
    assert len(learned) + len(asked) == 6
    assert not {each.title for each in learned} & {each.title for each in asked}
    assert questions.split(found, 0.0) == (found, []) and questions.split(found, 1.0) == ([], found)
    titles = [f"article {i}" for i in range(2000)]
    many = [found[0]._replace(title=title) for title in titles]
    assert 0.21 < len(questions.split(many, 0.25)[1]) / 2000 < 0.29


def test_a_row_asks_for_the_answer_behind_vectors_tag_and_question(found):
    drawn = questions.draw(found, CONFIG, SETTINGS, seed=3, step=1)
    again = questions.draw(found, CONFIG, SETTINGS, seed=3, step=1)
    assert all(np.array_equal(a, b) for a, b in zip(drawn.arrays, again.arrays))
    size, vectors = CONFIG.decoder.vocab_size, 2 * CONFIG.chunk // drawn.ratio
    for i in range(SETTINGS.batch):
        inputs, mask = drawn.arrays.inputs[i], drawn.arrays.mask[i]
        own = next(
            each
            for each in found
            if np.array_equal(each.context, drawn.arrays.context[i].reshape(-1)[: len(each.context)])
            and np.array_equal(each.answer, drawn.arrays.targets[i][mask])
        )
        assert inputs[vectors] == size + vectors + rows.ANSWER
        behind = np.concatenate([own.question, own.answer[:-1]])
        np.testing.assert_array_equal(inputs[vectors + 1 : vectors + 1 + len(behind)], behind)


def test_rows_in_clear_have_no_vectors_and_a_passage_whole_cut_off_or_none(found):
    settings, size, seen = SETTINGS.model_copy(update={"in_clear": 0.5, "ratio": 4}), CONFIG.decoder.vocab_size, set()
    for step in range(12):
        arrays = questions.draw(found, CONFIG, settings, seed=0, step=step).arrays
        if (arrays.context >= 0).any():
            continue
        assert (arrays.groups == -1).all() and (arrays.sampled == -1).all()
        tag = 2 * CONFIG.chunk // CONFIG.ratios[-1]
        assert (arrays.positions[:, :tag] == -1).all() and (arrays.inputs[:, tag] == size + tag + rows.ANSWER).all()
        for inputs, positions, targets, mask in zip(arrays.inputs, arrays.positions, arrays.targets, arrays.mask):
            own = [each for each in found if np.array_equal(each.answer, targets[mask])]
            text = inputs[tag + 1 : int(np.flatnonzero(positions >= 0)[-1]) + 1]
            forms = [
                (name, np.concatenate([each.context[:kept], each.question, each.answer[:-1]]))
                for each in own
                for name, kept in (("whole", None), ("beginning", len(each.context) // 4), ("nothing", 0))
            ]
            fitting = {name for name, form in forms if np.array_equal(text, form)}
            assert fitting
            seen |= fitting
    assert seen == {"whole", "beginning", "nothing"}


def test_as_many_questions_as_wanted_are_drawn_once_each(found):
    some = questions.drawn(found, 4, seed=1)
    numbers = [next(i for i, each in enumerate(found) if each is one) for one in some]
    assert len(set(numbers)) == 4 and numbers == sorted(numbers)
    assert [id(each) for each in questions.drawn(found, 99, seed=1)] == [id(each) for each in found]
    with pytest.raises(ValueError, match="0 are about articles that are not learned from"):
        questions.drawn([], 4, seed=1)


def test_questions_about_one_article_or_without_any_answer_or_a_passage_have_no_figures(found):
    about_one = [each for each in found if each.title == "Mills"]
    with pytest.raises(ValueError, match="2 were drawn, about 1 articles, 1 of them with an answer"):
        questions.drawn(about_one, 4, seed=1)
    with pytest.raises(ValueError, match="3 were drawn, about 3 articles, 0 of them with an answer"):
        questions.drawn([each for each in found if not each.answers], 4, seed=1)
    with pytest.raises(ValueError, match="1 of 6 have an empty passage, about 'Mills'; wanted text"):
        questions.drawn([found[0]._replace(context=found[0].context[:0]), *found[1:]], 9, seed=1)


def test_what_has_no_room_is_left_out_and_nothing_left_is_an_error(found):
    assert questions.fitting(found, CONFIG, SETTINGS) == found
    with pytest.raises(ValueError, match="none of 6 has room: num_chunks=2 of 16 tokens, clear=4, num_targets=8"):
        questions.fitting(found, CONFIG, SETTINGS.model_copy(update={"clear": 4}))
    with pytest.raises(ValueError, match="ratio=3; wanted one of 2, 4"):
        questions.draw(found, CONFIG, SETTINGS.model_copy(update={"ratio": 3}), seed=0, step=0)


def test_lines_end_with_newlines_alone_and_empty_ones_and_a_byte_order_mark_are_none(tmp_path):
    row = {"context": "one\u2028two\x0bthree", "question": "b", "answers": [], "title": "c"}
    path = tmp_path / "q.jsonl"
    path.write_text(f"\ufeff{json.dumps(row, ensure_ascii=False)}\r\n\n", encoding="utf-8", newline="")
    [found] = text_questions.read(path)
    assert found.context == row["context"]


@pytest.mark.parametrize(
    "content, wanted",
    [
        (b"", "has none"),
        (b"\n\n", "has none"),
        (b"\n[1]\n", "line 2 is a list, wanted an object"),
        (b"[1]\n", "line 1 is a list, wanted an object"),
        (b"{", "line 1 is no JSON"),
        (b'{"context": "a"}', "no 'question'"),
        (b"\xff", "no UTF-8 text"),
        (b'{"context": 1, "question": "b", "answers": [], "title": "c"}', "wanted texts"),
    ],  # fmt: skip
)
def test_a_bad_file_is_named(content, wanted, words, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=wanted):
        questions.of_file(path, words)
    with pytest.raises(ValueError, match="none.jsonl is no file"):
        questions.of_file(tmp_path / "none.jsonl", words)
    cut = tmp_path / "q.jsonl.gz"
    cut.write_bytes(gzip.compress(b"x" * 100)[:20])
    with pytest.raises(ValueError, match="q.jsonl.gz is damaged"):
        questions.of_file(cut, words)
