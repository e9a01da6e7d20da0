"""Answer questions over passages, from vectors and from the baselines they are compared with.

- Closed: no passage. Open: the whole passage as plain text. Keep: its first tokens as plain text, as many as it has
  vectors. Others: another passage's vectors. All use the one decoder that was tuned on vectors and on plain-text
  passages; "untuned" is the decoder without its adapters, given the whole passage.
- Loss: of the first right answer, nats per token. Recovery: (closed - own) / (closed - open), of means over articles.
- Exact match and F1 of the most probable answer, as SQuAD counts them. Retention: (own - closed) / (open - closed).
  Neither share exists where the whole passage is no better than none.
- The right answer to a question that its passage does not answer is the word NO_ANSWER.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.compress import auto, evaluate, questions, reading
from jaxbench.compress.auto import AutoCompressor, Prompt
from jaxbench.compress.config import TAGS
from jaxbench.text import answers

NEW_TOKENS = 24  # most tokens of an answer
CLEAR_ARMS, VECTOR_ARMS = ("closed", "open"), ("keep", "others", "vectors")  # without a ratio, and with one
ANSWER = TAGS.index("answer")
Progress = Callable[[int], Any]
Generate = Callable[..., Any]  # a sample.Generator of the decoder that reads


class Answered(NamedTuple):
    """Result of one question."""

    nats: float  # per token of the first right answer
    said: str


def prompts(compressor: AutoCompressor, asked: Sequence[questions.Question], arm: str) -> list[Prompt]:
    """Make the prompt of each question.

    Raises:
      ValueError: the arm is unknown, or there is no other passage.
    """
    if arm == "closed":
        return [in_clear(compressor, each.context[:0], each.question) for each in asked]
    if arm == "open":
        return [in_clear(compressor, each.context, each.question) for each in asked]
    if arm == "keep":
        counts = [-(-len(each.context) // compressor.ratio) for each in asked]  # as many as there are vectors
        return [in_clear(compressor, each.context[:count], each.question) for count, each in zip(counts, asked)]
    if arm not in VECTOR_ARMS:
        raise ValueError(f"answers: arm={arm!r}; wanted one of {', '.join((*CLEAR_ARMS, *VECTOR_ARMS))}")
    made = [evaluate.tokens_of(compressor, each.context)[0] for each in asked]
    if arm == "others":
        others = evaluate.of_others([each.title for each in asked])
        if others is None:
            raise ValueError(f"answers: all questions are about {asked[0].title!r}; wanted two articles at least")
        made = [made[i] for i in others]
    return [behind(compressor, vectors, each.question) for vectors, each in zip(made, asked)]


def behind(compressor: AutoCompressor, vectors: np.ndarray, question: np.ndarray) -> Prompt:
    """Vectors of a passage, the tag, and the question."""
    size, table = compressor.config.decoder.vocab_size, np.concatenate([vectors, compressor.tag(ANSWER)])
    return Prompt([*range(size, size + len(table)), *question.tolist()], table.astype(np.float32))


def in_clear(compressor: AutoCompressor, passage: np.ndarray, question: np.ndarray) -> Prompt:
    """The tag, a passage as plain text, and the question, as in training rows (questions.draw)."""
    return behind(compressor, compressor.tag(ANSWER)[:0], np.concatenate([passage, question]))


def plain(asked: Sequence[questions.Question]) -> list[Prompt]:
    """Passage and question alone, for a decoder that knows no tags."""
    none = np.zeros((0, 0), np.float32)
    return [Prompt([*each.context.tolist(), *each.question.tolist()], none) for each in asked]


def answered(
    reader: reading.Reader, generate: Generate, tokenizer: Any, asked: Sequence[questions.Question],
    given: Sequence[Prompt], *, progress: Progress = lambda count: None,
) -> list[Answered]:  # fmt: skip
    """Compute the loss of each right answer after its prompt, and the most probable answer."""
    rows = [
        reading.Row(
            np.array([*prompt.ids, *_words(each, tokenizer)[:-1]], np.int32), _words(each, tokenizer), prompt.vectors
        )
        for prompt, each in zip(given, asked)
    ]
    heard, said = reader(rows, progress=progress), [""] * len(given)
    order = sorted(range(len(given)), key=lambda i: len(given[i].ids))  # prompts of equal length share a program
    for first in range(0, len(order), evaluate.TOGETHER):
        numbers = order[first : first + evaluate.TOGETHER]
        for i, text in zip(numbers, generated(generate, tokenizer, [given[i] for i in numbers])):
            said[i] = text
        progress(len(numbers))
    return [Answered(float(each.losses.mean()), text) for each, text in zip(heard, said)]


def _words(question: questions.Question, tokenizer: Any) -> np.ndarray:
    """The right answer without the end token."""
    answer = question.answer
    return answer[:-1] if tokenizer.eos_id is not None else answer


def generated(generate: Generate, tokenizer: Any, part: Sequence[Prompt]) -> list[str]:
    """Generate the most probable answers of a few prompts, their vectors in one table."""
    ids, table = auto.joined(part, tokenizer.vocab_size)
    made = generate(ids, vectors=table, max_new_tokens=NEW_TOKENS, seed=0)
    return [text_of(tokenizer, tokens) for tokens in made.tokens]


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """An answer's text: its first line, without the end token."""
    kept = [int(token) for token in tokens if token >= 0 and token != tokenizer.eos_id]  # -1: after the end
    return tokenizer.decode(kept).strip().split("\n")[0].strip()


def figures(found: Mapping[str, Sequence[Answered]], asked: Sequence[questions.Question]) -> dict[str, dict[str, Any]]:
    """Figures of each arm with 95 % intervals over articles; some relative to `closed` and `open`."""
    titles = {title: number for number, title in enumerate(dict.fromkeys(each.title for each in asked))}
    has_answer = np.array([bool(each.answers) for each in asked])
    articles = np.array([titles[each.title] for each in asked])
    values = {arm: _values(mine, asked) for arm, mine in found.items()}
    shown = {}
    for arm, own in values.items():
        row: dict[str, Any] = {}
        for name, value in own.items():
            row[name] = evaluate.mean_interval(value[has_answer], articles[has_answer])
        for name, relative in (("nats", "recovery"), ("exact_match", "exact_match_retained"), ("f1", "f1_retained")):
            ends = [values["closed"][name], values["open"][name], own[name]]
            better = "lower" if name == "nats" else "higher"
            row[relative] = evaluate.share(*(each[has_answer] for each in ends), articles[has_answer], better=better)
        row["no_answer"] = {
            "said_where_there_is_none": _mean(own["no_answer"][~has_answer]),
            "said_where_there_is_one": _mean(own["no_answer"][has_answer]),
        }
        shown[arm] = row
    return shown


def _values(mine: Sequence[Answered], asked: Sequence[questions.Question]) -> dict[str, np.ndarray]:
    pairs = list(zip(mine, asked))
    return {
        "nats": np.array([each.nats for each in mine]),
        "exact_match": np.array([answers.exact_match(own.said, each.answers) for own, each in pairs]),
        "f1": np.array([answers.f1(own.said, each.answers) for own, each in pairs]),
        "no_answer": np.array([is_no_answer(each.said) for each in mine], np.float64),
    }


def is_no_answer(said: str) -> bool:
    """True if an answer says that there is none."""
    return answers.normalized(said) == questions.NO_ANSWER


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
