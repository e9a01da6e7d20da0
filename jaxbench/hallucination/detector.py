"""A stacked detector: regressions on responses and sentences, a token classifier, and a final regression (S file).

Two members score whole responses. Two score sentences, whose probabilities are reduced to three numbers per response:
that at least one is wrong, their mean and the largest. A token classifier, which is optional, scores tokens. A final
regression, the stack, combines all of these. It is fitted to out-of-fold scores, of sources that the members were not
fitted to, so that its probabilities are calibrated; the thresholds are chosen on the same scores. A tuned reader, also
optional, is combined with the result on sources held out from its tuning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxbench.hallucination import linear, metrics, token_scoring
from jaxbench.hallucination.linear import Linear
from jaxbench.hallucination.pooled import Pooled
from jaxbench.hallucination.token_inputs import Nested, Tokens, Trained
from jaxbench.hallucination.tuned_inputs import TunedConfig

Array = np.ndarray
FLOOR = 1e-3  # keeps logarithms of probabilities finite
STACK_STRENGTH = 0.03
TUNED_STRENGTH = 0.1


class Inputs(NamedTuple):
    """Features of responses, as a detector takes them."""

    whole: Mapping[str, Array]  # family of features -> [responses, columns]
    parts: Mapping[str, Array]  # the same of sentences -> [sentences, columns]
    response: Array  # [sentences] index of each sentence's response, in order
    tokens: tuple[Tokens, ...] = ()  # one per response, or empty
    tuned: tuple[Array, ...] = ()  # a tuned reader's log-odds of each response's tokens, or empty

    def take(self, rows: Array) -> Inputs:
        """Return some responses, by index, with their sentences."""
        place = np.full(self.num_responses, -1)
        place[rows] = np.arange(len(rows))
        mine = np.flatnonzero(place[self.response] >= 0)
        mine = mine[np.argsort(place[self.response[mine]], kind="stable")]
        whole = {name: values[rows] for name, values in self.whole.items()}
        parts = {name: values[mine] for name, values in self.parts.items()}
        tokens, tuned = (tuple(each[row] for row in rows) if each else () for each in (self.tokens, self.tuned))
        return Inputs(whole, parts, place[self.response[mine]], tokens, tuned)

    @classmethod
    def join(cls, read: Sequence[tuple[Pooled, Pooled]], tokens: Sequence[Tokens] = ()) -> Inputs:
        """Join the inputs of responses: features pooled over each response and over its sentences; their tokens."""
        counts = [len(parts.spans) for _, parts in read]
        joined = [
            {name: np.concatenate([each[i].families[name] for each in read]) for name in read[0][i].families}
            for i in range(2)
        ]
        places = [np.stack([np.arange(count) / count, np.full(count, count)], axis=1) for count in counts]
        joined[1]["place"] = np.concatenate(places)
        return cls(*joined, np.repeat(np.arange(len(read)), counts), tuple(tokens))

    @property
    def num_responses(self) -> int:
        """Number of responses."""
        return len(next(iter(self.whole.values())))


class Labels(NamedTuple):
    """Labels of responses, sentences and tokens."""

    response: Array  # [responses] bool
    part: Array  # [sentences] bool
    source: Array  # [responses], groups that no split divides
    tokens: tuple[Array, ...] = ()  # per response [tokens] bool, or empty

    def take(self, rows: Array, inputs: Inputs) -> Labels:
        """Return the labels of some responses, by ascending index, and of their sentences."""
        tokens = tuple(self.tokens[row] for row in rows) if self.tokens else ()
        return Labels(self.response[rows], self.part[np.isin(inputs.response, rows)], self.source[rows], tokens)


class Member(NamedTuple):
    """A regression of the detector."""

    families: tuple[str, ...]
    of_parts: bool
    strength: float


READER = {
    "response": Member(("lexical", "surprise", "states", "context_mass", "lookback"), False, 0.003),
    "lexical": Member(("lexical",), False, 1.0),
    "sentence": Member(
        ("lexical", "surprise", "place", "context_mass", "lookback", "external", "states"), True, 0.001
    ),
    "surprise": Member(("lexical", "surprise", "place"), True, 0.1),
}  # fmt: skip


class Tuned(NamedTuple):
    """A tuned reader as a member of a detector."""

    config: TunedConfig
    trained: Mapping[str, Array]  # adapters and head, by name
    weighing: Linear  # of the stack's log-odds and the four columns of token_scoring.of_responses


class Heard(NamedTuple):
    """A tuned reader's scores of labelled responses to sources held out from its tuning."""

    config: TunedConfig
    trained: Mapping[str, Array]
    rows: Array  # indices of the responses
    logits: Sequence[Array]  # log-odds of their tokens


class Detector(NamedTuple):
    """A fitted detector."""

    members: Mapping[str, Member]
    fitted: Mapping[str, Linear]
    stack: Linear
    threshold: float  # probability from which a response counts as hallucinated
    part_threshold: float  # and from which a sentence does
    tokens: tuple[Trained, ...] = ()  # token classifiers, whose log-odds are averaged
    token_threshold: float = 1.0  # probability from which a token counts
    tuned: Tuned | None = None  # applied last: combined with the stack's log-odds


class Verdicts(NamedTuple):
    """Probabilities by a detector."""

    probability: Array  # [responses]
    parts: Array  # [sentences], by the first member that scores sentences
    tokens: tuple[Array, ...]  # of each response's tokens; () without a token classifier


def columns(inputs: Inputs, member: Member) -> Array:
    """Return the features of a member [rows, columns], as `prepared`."""
    source = inputs.parts if member.of_parts else inputs.whole
    return np.concatenate([prepared(source, name) for name in member.families], axis=1)


def prepared(families: Mapping[str, Array], name: str) -> Array:
    """Return a family's columns as regressions take them: lexical counts as log(1 + count)."""
    return np.log1p(families[name]) if name == "lexical" else families[name]


def said(members: Mapping[str, Member], fitted: Mapping[str, Linear], inputs: Inputs) -> Array:
    """Score responses by every member [responses, columns]: 1 column per member, 3 if it scores sentences."""
    found = []
    for name, member in members.items():
        logit = fitted[name].logit(columns(inputs, member))
        found += [logit[:, None]] if not member.of_parts else [over_parts(special.expit(logit), inputs)]
    return np.concatenate(found, axis=1)


def over_parts(probability: Array, inputs: Inputs) -> Array:
    """Reduce sentences' probabilities p to three columns per response [responses, 3].

    Log of the sum of -log(1 - p), which grows with the probability that at least one sentence is wrong; log-odds of the
    mean; log-odds of the largest.
    """
    count = np.bincount(inputs.response, minlength=inputs.num_responses)
    safe = np.log1p(-np.minimum(probability, 1 - FLOOR))
    any_wrong = -np.bincount(inputs.response, weights=safe, minlength=len(count))
    mean = np.bincount(inputs.response, weights=probability, minlength=len(count)) / np.maximum(count, 1)
    largest = np.zeros(len(count))
    np.maximum.at(largest, inputs.response, probability)
    return np.stack([np.log(any_wrong + FLOOR), _log_odds(mean), _log_odds(largest)], axis=1)


def _log_odds(probability: Array) -> Array:
    return np.log(probability + FLOOR) - np.log1p(FLOOR - probability)


def fit(
    inputs: Inputs,
    labels: Labels,
    *,
    members: Mapping[str, Member] = READER,
    tokens: Nested | None = None,
    tuned: Heard | None = None,
    inner_folds: int = 5,
    seed: int = 0,
) -> Detector:
    """Fit a detector to labelled responses.

    tokens: result of token_training.nested on the same responses; None = without a token classifier.
    tuned: a tuned reader's scores of some of them, on which it is combined with the rest; None = without one.

    Raises:
      ValueError: too few sources, one class only, or a feature that is not finite.
    """
    fold = linear.folds(labels.source, inner_folds, seed=seed)
    linear.check_folds(labels.response, labels.source, fold)
    heard, parts = None, np.zeros(len(labels.part))
    for i in range(inner_folds):
        test = np.flatnonzero(fold == i)
        fitted, taken = _fit_members(inputs, labels, np.flatnonzero(fold != i), members), inputs.take(test)
        mine = said(members, fitted, taken)
        heard = np.zeros((len(fold), mine.shape[1])) if heard is None else heard
        heard[test] = mine
        parts[np.isin(inputs.response, test)] = of_parts(members, fitted, taken)
    if tokens is not None:
        heard = np.concatenate([heard, token_scoring.of_responses(tokens.logits)], axis=1)
    stack = linear.fit(heard, labels.response, strength=STACK_STRENGTH)
    threshold = metrics.best_threshold(labels.response, special.expit(stack.logit(heard)))
    fitted = _fit_members(inputs, labels, np.arange(len(fold)), members)
    of_tokens = () if tokens is None else (tokens.trained, tokens.threshold)
    made = Detector(members, fitted, stack, threshold, metrics.best_threshold(labels.part, parts), *of_tokens)
    return made if tuned is None else _weighed(made, tuned, heard, labels.response)


def _weighed(detector: Detector, tuned: Heard, heard: Array, labels: Array) -> Detector:
    """Add a tuned reader to the detector, weighed on responses that neither it nor the other members were fitted to."""
    mine = labels[tuned.rows]
    others = np.setdiff1d(np.arange(len(labels)), tuned.rows)
    stack = linear.fit(heard[others], labels[others], strength=STACK_STRENGTH)  # a stack that did not see them either
    columns = _with_tuned(stack.logit(heard[tuned.rows]), tuned.logits)
    weighing = linear.fit(columns, mine, strength=TUNED_STRENGTH)
    threshold = metrics.best_threshold(mine, special.expit(weighing.logit(columns)))
    return detector._replace(threshold=threshold, tuned=Tuned(tuned.config, tuned.trained, weighing))


def _with_tuned(logit: Array, tuned: Sequence[Array]) -> Array:
    return np.concatenate([logit[:, None], token_scoring.of_responses(tuned)], axis=1)


def _fit_members(inputs: Inputs, labels: Labels, rows: Array, members: Mapping[str, Member]) -> dict[str, Linear]:
    mine = np.isin(inputs.response, rows)
    found = {}
    for name, member in members.items():
        x = columns(inputs, member)
        x, y = (x[mine], labels.part[mine]) if member.of_parts else (x[rows], labels.response[rows])
        found[name] = linear.fit(x, y, strength=member.strength)
    return found


def judge(detector: Detector, inputs: Inputs, *, package: str = "jaxbench") -> Verdicts:
    """Compute the probabilities of responses, of their sentences and of their tokens.

    package: the one whose token classifier runs, JAX's or PyTorch's.

    Raises:
      ValueError: a probability is NaN, which no threshold would flag: features are not numbers.
    """
    parts = of_parts(detector.members, detector.fitted, inputs)
    _check("sentence", parts)  # first: numpy warns where it takes the largest of NaN
    heard, tokens = said(detector.members, detector.fitted, inputs), []
    if detector.tokens:
        tokens = token_scoring.logits(detector.tokens, inputs.tokens, package=package)
        heard = np.concatenate([heard, token_scoring.of_responses(tokens)], axis=1)
    logit = detector.stack.logit(heard)
    if detector.tuned is not None:
        logit = detector.tuned.weighing.logit(_with_tuned(logit, inputs.tuned))
    probability = special.expit(logit)
    _check("response", probability)
    return Verdicts(probability, parts, tuple(map(special.expit, tokens)))


def _check(name: str, probability: Array) -> None:
    if (bad := np.isnan(probability)).any():
        raise ValueError(
            f"detector: {name} {int(np.argmax(bad)) + 1} of {len(bad)} has probability nan; the reader's features of "
            "it are not numbers"
        )


def of_parts(members: Mapping[str, Member], fitted: Mapping[str, Linear], inputs: Inputs) -> Array:
    """Probability of each sentence, by the first member that scores sentences."""
    name = next(name for name, member in members.items() if member.of_parts)
    return special.expit(fitted[name].logit(columns(inputs, members[name])))
