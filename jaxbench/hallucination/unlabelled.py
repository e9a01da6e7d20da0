"""A detector that needs no labels: fixed signs, columns standardised on responses nobody has judged (S file).

What counts was decided by what the columns mean: words that the context does not have count for a hallucination;
attention that rests on the context, its share in lookback, and what the context takes off the loss count against it.
Each of the four weighs the same. Its numbers order responses; as probabilities they mean nothing.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from jaxbench.hallucination import detector, lexical
from jaxbench.hallucination.detector import Detector, Inputs, Member
from jaxbench.hallucination.linear import Linear
from jaxbench.hallucination.pooled import SURPRISE

FAMILIES = ("lexical", "surprise", "context_mass", "lookback")
MEMBERS = {"response": Member(FAMILIES, False, 0.0), "sentence": Member(FAMILIES, True, 0.0)}


def fit(inputs: Inputs, *, rate: float) -> Detector:
    """Detector of responses without labels; it flags the share `rate` of these, and of their sentences.

    Raises:
      ValueError: rate is not between 0 and 1.
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate={rate}: the share of responses to flag lies between 0 and 1")
    fitted = {name: _fixed(detector.columns(inputs, member), inputs, member) for name, member in MEMBERS.items()}
    heard = detector.said(MEMBERS, fitted, inputs)
    zero, one = np.zeros(heard.shape[1]), np.ones(heard.shape[1])
    stack = Linear(zero, one, np.eye(len(zero))[0], np.array(0.0))  # the first column: of the whole response
    scores = special.expit(stack.logit(heard))
    parts = detector.of_parts(MEMBERS, fitted, inputs)
    return Detector(MEMBERS, fitted, stack, *(float(np.quantile(each, 1 - rate)) for each in (scores, parts)))


def _fixed(x: np.ndarray, inputs: Inputs, member: Member) -> Linear:
    """Weights of standardised columns: one a family, with its sign, shared out among its heads."""
    source = inputs.parts if member.of_parts else inputs.whole
    weights = []
    for name in FAMILIES:
        mine = np.zeros(source[name].shape[1])
        if name == "lexical":
            mine[lexical.COUNTS.index("novel_words")] = 1.0
        elif name == "surprise":
            mine[SURPRISE.index("gain")] = -1.0
        else:
            mine[:] = -1.0 / len(mine)
        weights.append(mine)
    deviation = x.std(0)
    return Linear(x.mean(0), np.where(deviation > 0, deviation, 1.0), np.concatenate(weights), np.array(0.0))
