"""Votes of several fitted detectors: by majority, by mean probability, or weighed by development AUC (S file).

- hard: the share of members whose own thresholds are reached; a response counts as hallucinated from a majority on,
  which is more than half: of two members both.
- soft: the mean of the members' probabilities.
- weighted: their mean with weights in proportion to AUC - 1/2 on the development responses; a member below 1/2 gets 0.

Thresholds of soft and weighted votes have the highest F1 on the development responses, which no member was fitted to.
Sentences and tokens are voted on alike; tokens by the members that have a token classifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxbench.hallucination import detector as detectors
from jaxbench.hallucination import metrics
from jaxbench.hallucination.detector import Detector, Inputs, Labels, Tuned, Verdicts
from jaxbench.hallucination.token_inputs import Trained

Array = np.ndarray
RULES = ("hard", "soft", "weighted")


class Ensemble(NamedTuple):
    """Several detectors of one reader, and how their verdicts become one."""

    members: tuple[Detector, ...]
    names: tuple[str, ...]
    rule: str  # one of RULES
    weights: Array  # [members], which add up to 1
    threshold: float  # combined score from which a response counts as hallucinated
    part_threshold: float  # a sentence
    token_threshold: float  # a token
    aucs: Array | None = None  # [members] of the development responses; None = a hard vote without any
    own_thresholds: Array | None = None  # [members], of responses, chosen on the same; to compare verdicts fairly

    @property
    def tokens(self) -> tuple[Trained, ...]:
        """Token classifiers of all members."""
        return tuple(each for member in self.members for each in member.tokens)

    @property
    def tuned(self) -> Tuned | None:
        """The tuned reader that a member has; None if none has one."""
        return next((member.tuned for member in self.members if member.tuned is not None), None)

    @property
    def best(self) -> int | None:
        """Index of the member with the highest AUC on the development responses; None without these."""
        return None if self.aucs is None else int(np.argmax(self.aucs))


def check(members: Sequence[Detector | Ensemble], names: Sequence[str]) -> None:
    """Check that detectors can vote.

    Raises:
      ValueError: there are fewer than two, one is a vote itself, or two have tuned readers.
    """
    if len(members) < 2:
        raise ValueError(f"vote: {len(members)} detectors ({', '.join(names)}), wanted two or more")
    for member, name in zip(members, names, strict=True):
        if isinstance(member, Ensemble):
            raise ValueError(f"vote: {name} is a vote of {len(member.members)} detectors itself, wanted its members")
    tuned = [name for member, name in zip(members, names) if member.tuned is not None]
    if len(tuned) > 1:
        raise ValueError(f"vote: {tuned[0]} and {tuned[1]} both have a tuned reader, wanted one at most")


def majority(members: Sequence[Detector], names: Sequence[str]) -> Ensemble:
    """Return the hard vote of detectors, which needs no development responses.

    Raises:
      ValueError: as `check`.
    """
    check(members, names)
    num, num_tokens = len(members), sum(bool(member.tokens) for member in members)
    weights = np.full(num, 1 / num)
    return Ensemble(tuple(members), tuple(names), "hard", weights, _most(num), _most(num), _most(num_tokens))


def _most(num: int) -> float:
    """Return the share of members that is a majority."""
    return (num // 2 + 1) / max(num, 1)


def fit(members: Sequence[Detector], names: Sequence[str], inputs: Inputs, labels: Labels, *, rule: str) -> Ensemble:
    """Choose weights and thresholds of a vote on development responses that no member was fitted to.

    Raises:
      ValueError: as `check`; there is no such rule, one class only, or no member has an AUC above 1/2 (weighted).
    """
    if rule not in RULES:
        raise ValueError(f"vote: rule={rule!r} is unknown, wanted {', '.join(RULES)}")
    made = majority(members, names)._replace(rule=rule)
    count, total = int(labels.response.sum()), len(labels.response)
    if not 0 < count < total:
        raise ValueError(f"vote: {count} of {total} development responses are labelled; wanted both classes")
    heard = [detectors.judge(member, inputs) for member in members]
    aucs = np.array([metrics.auc(labels.response, each.probability) for each in heard])
    own = np.array([metrics.best_threshold(labels.response, each.probability) for each in heard])
    made = made._replace(aucs=aucs, own_thresholds=own)
    if rule == "hard":
        return made
    if rule == "weighted":
        above = np.maximum(aucs - 0.5, 0.0)
        if not above.any():
            said = ", ".join(f"{name} {auc:.3f}" for name, auc in zip(names, aucs))
            raise ValueError(f"vote: rule={rule}: no member has a development AUC above 0.5 ({said}); leave them out")
        made = made._replace(weights=above / above.sum())
    said = combine(made, heard)
    found = {"threshold": metrics.best_threshold(labels.response, said.probability)}
    if labels.part.any():  # sentences without a label have no F1 to choose by
        found["part_threshold"] = metrics.best_threshold(labels.part, said.parts)
    if said.tokens:
        widths = np.concatenate([each.width for each in inputs.tokens])
        marked, probability = np.concatenate(labels.tokens), np.concatenate(said.tokens)
        found["token_threshold"] = metrics.best_threshold(marked, probability, weights=widths)
    return made._replace(**found)


def judge(fitted: Detector | Ensemble, inputs: Inputs, *, package: str = "jaxbench") -> Verdicts:
    """Compute the probabilities of responses, sentences and tokens by a detector, or their combined scores by a vote.

    package: the one whose token classifiers run, JAX's or PyTorch's.
    """
    if isinstance(fitted, Detector):
        return detectors.judge(fitted, inputs, package=package)
    return combine(fitted, [detectors.judge(member, inputs, package=package) for member in fitted.members])


def combine(ensemble: Ensemble, heard: Sequence[Verdicts]) -> Verdicts:
    """Combine what the members say: scores from 0 to 1."""
    voters = [i for i, member in enumerate(ensemble.members) if member.tokens]
    spoken = [heard[i].tokens for i in voters]  # by member, then by response
    tokens = [_voted(ensemble, each, "token_threshold", voters) for each in zip(*spoken, strict=True)]
    every = range(len(heard))
    return Verdicts(
        _voted(ensemble, [each.probability for each in heard], "threshold", every),
        _voted(ensemble, [each.parts for each in heard], "part_threshold", every),
        tuple(tokens),
    )


def _voted(ensemble: Ensemble, said: Sequence[Array], threshold: str, voters: Sequence[int]) -> Array:
    """Combine the probabilities of some members [members, things] into one score for each thing."""
    if ensemble.rule == "hard":
        flags = [each >= getattr(ensemble.members[i], threshold) for i, each in zip(voters, said, strict=True)]
        return np.sum(flags, axis=0) / len(flags)  # as _most divides
    weights = ensemble.weights[list(voters)]
    if not weights.any():  # the members that mark tokens have no say on responses
        weights = np.ones(len(weights))
    return (weights / weights.sum()) @ np.stack(said)


def compared_threshold(ensemble: Ensemble, number: int) -> float:
    """Return the threshold by which a member's verdicts on responses are compared with the vote's.

    It is chosen on the development responses, as the vote's is; without these it is the member's own.
    """
    own = ensemble.own_thresholds
    return ensemble.members[number].threshold if own is None else float(own[number])
