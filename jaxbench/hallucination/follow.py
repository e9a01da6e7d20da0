"""Judge an answer while it is written (S file).

follower = detector.follow(context, question)
for piece in pieces:
    for sentence in follower.add(piece):
        sentence.is_flagged, follower.verdict.probability  # of the answer so far

The prompt is read once; the answer's own tokens are read again from its start whenever a sentence is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxbench.hallucination import sentences
from jaxbench.hallucination.verdict import Sentence, Verdict
from jaxbench.text.lines import has_surrogate


class Follower:
    """An answer that grows, and the verdict on it so far."""

    def __init__(self, judge: Callable[[str], Verdict]):
        """judge: returns the verdict on an answer; HallucinationDetector.follow makes it."""
        self.text = ""
        self.verdict: Verdict | None = None  # on the text up to the end of the last sentence returned
        self._judge, self._num_known = judge, 0

    def add(self, text: str) -> tuple[Sentence, ...]:
        """Append text to the answer; return the sentences that this completes, which are read together.

        A sentence is complete once the space or line end after it has arrived; without spaces, the next character. A
        character may arrive as the two halves of its surrogate pair, which is how JavaScript cuts a text.

        Raises:
          ValueError: context empty, an answer longer than half of the reader's window, or half a character inside it.
        """
        self.text = _paired(self.text, text)
        # the letter stands for what comes next, so that the last sentence is always the one that is still open
        complete = [each for each in sentences.sentences(self.text + "x")[:-1] if each[1] < len(self.text)]
        return self._known(self.text[: complete[-1][1]] if complete else "", len(complete))

    def end(self) -> tuple[Sentence, ...]:
        """End the answer; return its last sentence, if that was still open.

        Raises:
          ValueError: as `add`.
        """
        return self._known(self.text, len(sentences.sentences(self.text)))

    def _known(self, text: str, num_complete: int) -> tuple[Sentence, ...]:
        if num_complete <= self._num_known:
            return ()
        self.verdict = self._judge(text)
        new = self.verdict.sentences[self._num_known : num_complete]
        self._num_known = num_complete
        return new


def _paired(text: str, more: str) -> str:
    """Join texts; a surrogate pair that they were cut in becomes its character."""
    if has_surrogate(text[-1:]) and has_surrogate(more[:1]):
        pair = (text[-1] + more[0]).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return text[:-1] + pair + more[1:]
    return text + more


def check(given: Mapping[str, bool]) -> None:
    """Check that no flag was given that is meaningless for answers from standard input.

    Raises:
      ValueError: one was; it is named.
    """
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"--follow reads standard input and writes standard output, and takes no --{name}")


def run(begin: Callable[[str, str], Follower], lines: Iterable[bytes]) -> None:
    """Print what `follow_lines` yields of standard input's lines, as JSON lines, each as soon as it is known.

    Raises:
      ValueError: as `texts` and `follow_lines`.
    """
    for said in follow_lines(begin, texts(lines)):
        print(json.dumps(said, ensure_ascii=False), flush=True)


def texts(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield lines as texts, one by one: a bad one does not affect those before it.

    Raises:
      ValueError: a line is not UTF-8; it is named.
    """
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input line {number}: no UTF-8 ({error})") from None
        yield text


def follow_lines(begin: Callable[[str, str], Follower], lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the verdict on each sentence of answers that arrive as JSON lines.

    begin: HallucinationDetector.follow.
    lines: {"context": .., "question": ..} begins an answer and ends the one before, {"text": ..} continues it; blank
      lines are skipped.
    Each dict has `answer` (its number from 1), the sentence's fields, and `so_far` (the verdict on the answer so far).

    Raises:
      ValueError: a line is no such object, or comes before an answer has begun; it is named.
    """
    follower, answer = None, 0
    for number, line in enumerate(lines, 1):
        if not line.strip():  # blank lines between objects, or after the last one
            continue
        try:
            given = _object(line)
            if "text" in given:
                if follower is None:
                    raise ValueError(f"text {given['text'][:40]!r} before any context and question")
                yield from _said(follower, answer, follower.add(given["text"]))
                continue
            if follower is not None:
                yield from _said(follower, answer, follower.end())
            follower, answer = begin(given["context"], given["question"]), answer + 1
        except ValueError as error:
            raise ValueError(f"standard input line {number}: {error}") from None
    if follower is not None:
        yield from _said(follower, answer, follower.end())


def _object(line: str) -> dict[str, str]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None
    is_object = isinstance(given, dict) and set(given) in ({"text"}, {"context", "question"})
    if not is_object or not all(isinstance(text, str) for text in given.values()):
        raise ValueError(f"wanted an object with the texts context and question, or text; got {line[:60]!r}")
    for name in ("context", "question"):  # an answer's text may come in halves of a character
        if has_surrogate(given.get(name, "")):
            raise ValueError(f"{name} {given[name][:40]!a} has a lone surrogate, which is no Unicode text")
    if not given.get("context", "-").strip():
        raise ValueError(f"context {given['context'][:40]!r} is empty")
    return given


def _said(follower: Follower, answer: int, found: Iterable[Sentence]) -> Iterator[dict[str, Any]]:
    for sentence in found:
        assert follower.verdict is not None
        so_far = {name: getattr(follower.verdict, name) for name in ("probability", "is_hallucinated", "num_cut")}
        yield {"answer": answer} | sentence.to_dict() | {"so_far": so_far}
