"""A detector that needs no labels: fixed signs on columns standardised over unlabelled responses (S file).

The signs follow from what the columns mean: words absent from the context count for a hallucination; attention to the
context, the lookback ratio, and the reduction of the loss by the context count against it. Each of the four has the
same weight. The scores rank responses; as probabilities they mean nothing.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from jaxbench.hallucination import detector, lexical, linear
from jaxbench.hallucination.detector import Detector, Inputs, Member
from jaxbench.hallucination.linear import Linear
from jaxbench.hallucination.pooled import SURPRISE

FAMILIES = ("lexical", "surprise", "context_mass", "lookback")
MEMBERS = {"response": Member(FAMILIES, False, 0.0), "sentence": Member(FAMILIES, True, 0.0)}


def fit(inputs: Inputs, *, rate: float) -> Detector:
    """Fit a detector to responses without labels; it flags the share `rate` of these, and of their sentences.

    Raises:
      ValueError: rate is not between 0 and 1.
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate={rate}: the share of responses to flag lies between 0 and 1")
    fitted = {name: _fixed(detector.columns(inputs, member), inputs, member) for name, member in MEMBERS.items()}
    heard = detector.said(MEMBERS, fitted, inputs)
    zero, one = np.zeros(heard.shape[1]), np.ones(heard.shape[1])
    stack = Linear(zero, one, np.eye(len(zero))[0], np.array(0.0))  # only the first column: the whole response's
    scores = special.expit(stack.logit(heard))
    parts = detector.of_parts(MEMBERS, fitted, inputs)
    return Detector(MEMBERS, fitted, stack, *(float(np.quantile(each, 1 - rate)) for each in (scores, parts)))


def _fixed(x: np.ndarray, inputs: Inputs, member: Member) -> Linear:
    """Weights of standardised columns: 1 per family, with its sign, divided evenly among its heads."""
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
    return Linear(*linear.standard(x), np.concatenate(weights), np.array(0.0))
