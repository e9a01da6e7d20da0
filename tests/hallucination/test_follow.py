"""Verdicts on an answer while it is written: which sentences are complete when, and what is read again."""

import json
import subprocess
import sys

import pytest

from jaxbench.hallucination import detect, follow
from tests.structure import ROOT
from tests.test_cli import shell_environment

CONTEXT, QUESTION = "The mill was built in 1820 by Reed. It burned.", "when"  # with it fits the window of 128 tokens:
ANSWER = "Built by Dr. Reed. It burned!\nWas it 2.5 m? Yes"
SENTENCES = ["Built by Dr. Reed.", "It burned!", "Was it 2.5 m?", "Yes"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_sentences_come_once_when_they_are_complete_however_the_text_arrives(made, size):
    _, _, path, _, model = made
    detector = detect.HallucinationDetector(path, model=model)
    follower, found = detector.follow(CONTEXT, QUESTION), []
    for start in range(0, len(ANSWER), size):
        for sentence in follower.add(ANSWER[start : start + size]):
            found.append(sentence.text)
            assert follower.text[sentence.end].isspace()
            if size == 1:  # a sentence at a time: the verdict is that on the answer up to it
                assert follower.verdict == detector.detect(CONTEXT, QUESTION, ANSWER[: sentence.end])
    assert found == SENTENCES[:-1]
    assert [sentence.text for sentence in follower.end()] == SENTENCES[-1:]
    assert follower.verdict == detector.detect(CONTEXT, QUESTION, ANSWER) and follower.end() == ()


def test_sentences_without_spaces_between_are_complete_with_the_next_character(made):
    _, _, path, _, model = made
    follower = detect.HallucinationDetector(path, model=model).follow(CONTEXT, QUESTION)
    found = [[sentence.text for sentence in follower.add(letter)] for letter in "「本当？」はい。"]
    assert found == [[], [], [], [], [], ["「本当？」"], [], []]
    assert [sentence.text for sentence in follower.end()] == ["はい。"]


def test_the_prompt_of_an_answer_is_read_once(made, monkeypatch):
    _, _, path, _, model = made
    detector = detect.HallucinationDetector(path, model=model)
    inner, count = detector.reader.feature_reader._reader, []
    read = inner.read_prompt
    monkeypatch.setattr(inner, "read_prompt", lambda prompts: count.append(prompts) or read(prompts))
    follower = detector.follow(CONTEXT, QUESTION)
    assert sum(len(follower.add(letter)) for letter in ANSWER) == 3 and len(count) == 2


def test_lines_begin_answers_and_go_on_with_them(made):
    _, _, path, _, model = made
    detector = detect.HallucinationDetector(path, model=model)
    begin = {"context": CONTEXT, "question": QUESTION}
    lines = [begin, {"text": "It was built in 18"}, {"text": "20. It bu"}, begin, {"text": "Jonas Reed built it."}]
    said = list(follow.follow_lines(detector.follow, map(json.dumps, lines)))
    assert [(each["answer"], each["text"]) for each in said] == [
        (1, "It was built in 1820."), (1, "It bu"), (2, "Jonas Reed built it."),
    ]  # fmt: skip
    whole = detector.detect(CONTEXT, QUESTION, "It was built in 1820. It bu")
    assert said[1]["so_far"]["probability"] == whole.probability
    assert said[1]["probability"] == whole.sentences[1].probability


def test_blank_lines_between_objects_are_skipped_and_counted(made):
    _, _, path, _, model = made
    detector = detect.HallucinationDetector(path, model=model)
    lines = ["\n", json.dumps({"context": CONTEXT, "question": QUESTION}) + "\n", " \n", '{"text": "Yes"}\n', "\n"]
    assert [each["text"] for each in follow.follow_lines(detector.follow, lines)] == ["Yes"]
    with pytest.raises(ValueError, match="standard input line 6: no JSON"):
        list(follow.follow_lines(detector.follow, [*lines, "{"]))


def test_a_line_that_is_no_text_is_named_and_those_before_it_are_said():
    given = [b'\xef\xbb\xbf{"text": "a"}\n', '{"text": "é"}\n'.encode(), b'{"text": "\xff"}\n']
    found = follow.texts(given)
    assert [next(found), next(found)] == ['{"text": "a"}\n', '{"text": "é"}\n']
    with pytest.raises(ValueError, match="standard input line 3: no UTF-8 .*0xff"):
        next(found)


def test_a_character_that_arrives_in_the_halves_of_its_pair_is_that_character(made):
    _, _, path, _, model = made
    detector = detect.HallucinationDetector(path, model=model)
    lines = [
        {"context": CONTEXT, "question": QUESTION},
        {"text": "By \ud83d"},
        {"text": "\ude00. It"},
        {"text": " \ud83d"},
    ]
    said = follow.follow_lines(detector.follow, map(json.dumps, lines))
    assert next(said)["text"] == "By \U0001f600."
    with pytest.raises(ValueError, match=r"response: 'By .*ud83d' has a lone surrogate"):  # the other half never came
        next(said)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_text_that_is_not_unicode_is_named(made, place):
    _, _, path, _, model = made
    texts = ["In 1820.", "when", "In 1820."]
    texts[place] += "\ud83d"
    with pytest.raises(ValueError, match=("context", "question", "response")[place] + ": .*has a lone surrogate"):
        detect.HallucinationDetector(path, model=model).detect(*texts)


@pytest.mark.parametrize(
    "line, problem",
    [
        ("{", "line 1: no JSON"),
        ('{"text": "It"}', "line 1: text 'It' before any context"),
        ('{"text": 5}', "line 1: wanted an object with the texts"),
        ('{"context": "a"}', "line 1: wanted an object with the texts"),
        ('{"context": " ", "question": ""}', "line 1: context ' ' is empty"),
        ('{"context": "a", "question": "\\ud83d"}', "line 1: question .* has a lone surrogate"),
    ],
)
def test_lines_that_are_no_answers_are_named(line, problem):
    with pytest.raises(ValueError, match=f"standard input {problem}"):
        list(follow.follow_lines(lambda context, question: None, [line]))


@pytest.mark.timeout(900)  # a command that starts Python and JAX, on a machine that may be shared
def test_the_command_says_a_sentence_before_the_next_line_comes_and_names_a_line_that_is_no_text(made):
    _, _, path, _, model = made
    words = ("detect", "--follow", f"--detector={path}", f"--model={model}")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [sys.executable, str(ROOT / "experiments" / "hallucination.py"), *words]
    with subprocess.Popen(started, cwd=ROOT, env=shell_environment(), **pipes) as process:
        for line in ({"context": CONTEXT, "question": QUESTION}, {"text": "Built by Dr. Reed. It"}):
            process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["text"] == "Built by Dr. Reed."
        said, error = process.communicate(b'{"text": "\xff"}\n')
    assert (process.returncode, said) == (2, b"") and error.startswith(b"error: standard input line 3: no UTF-8")
