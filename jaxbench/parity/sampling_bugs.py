"""Bugs in the PyTorch twin's sampling, which transformers' processors of logits must catch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from jaxbench.parity import sampling as sampling_case
from jaxbench.parity.injection import Mutation
from jaxbench.prompts import SamplingParams
from torch_ref import penalties, sample


def _changed(**update: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """Bug that filters by other settings."""

    def bug(original: Callable, logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
        new = {name: change(getattr(sampling, name)) for name, change in update.items()}
        return original(logits, sampling._replace(**new))

    return bug


def _temperature_last(original: Callable, logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    return original(logits, sampling._replace(temperature=1.0)) / sampling.temperature


def _nucleus_before_top_k(original: Callable, logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    nucleus = original(logits, sampling._replace(top_k=0, min_p=0.0)) * sampling.temperature
    return original(nucleus, sampling._replace(top_p=1.0))


def _without_the_crossing_token(original: Callable, logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Least logit of the largest set of most probable tokens whose mass stays below top_p, one token at least."""
    ordered = torch.sort(logits, dim=-1, descending=True).values
    mass = torch.cumsum(torch.softmax(ordered, dim=-1), dim=-1)
    return torch.amin(torch.where(mass < top_p, ordered, ordered[:, :1]), dim=-1, keepdim=True)


def _penalty_divides_all(original: Callable, logits: torch.Tensor, *seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divide negative logits of tokens already present too, which makes those tokens more probable."""
    shift = logits.amin(dim=-1, keepdim=True) - 1.0
    is_changed = original(logits - shift, *seen, penalty=penalty) != logits - shift
    return torch.where(is_changed, logits / penalty, logits)


def _penalty_of_padding(
    original: Callable, logits: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, **penalty: float
) -> torch.Tensor:
    return original(logits, tokens, torch.full_like(lengths, tokens.shape[1]), **penalty)


def _biased(change: Callable[[int, float, SamplingParams], tuple[int, float]]) -> Callable[..., torch.Tensor]:
    """Bug that adds other biases."""

    def bug(
        original: Callable, logits: torch.Tensor, *seen: torch.Tensor, sampling: SamplingParams, **step: Any
    ) -> Any:
        biases = tuple(change(token, value, sampling) for token, value in sampling.logit_bias)
        return original(logits, *seen, sampling=sampling._replace(logit_bias=biases), **step)

    return bug


def _bias_replaces(
    original: Callable, logits: torch.Tensor, *seen: torch.Tensor, sampling: SamplingParams, **step: Any
) -> torch.Tensor:
    changed = original(logits, *seen, sampling=sampling._replace(logit_bias=()), **step)
    for token, value in sampling.logit_bias:
        changed[:, token] = value
    return changed


def _bias_before_penalties(
    original: Callable, logits: torch.Tensor, *seen: torch.Tensor, sampling: SamplingParams, **step: Any
) -> torch.Tensor:
    plain = SamplingParams(temperature=sampling.temperature, logit_bias=sampling.logit_bias)
    biased = original(logits, *seen, sampling=plain, **step)
    return original(biased, *seen, sampling=sampling._replace(logit_bias=()), **step)


def _frequency_of_prompts(
    original: Callable, logits: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, *how: Any, **weights: float
) -> torch.Tensor:
    return original(logits, tokens, torch.zeros_like(starts), *how, **weights)


def _ended_rows_go_on(original: Callable, self: sample.Generator, *step: Any) -> sample.DecodeState:
    state = original(self, *step)
    return state._replace(finished=torch.zeros_like(state.finished))


_bug = functools.partial(Mutation, case="sample/filters")
_FILTER, _PENALTY = (sample, "filter_logits"), (penalties, "penalize_repetition")
_ADDED, _FREQUENCY = (penalties, "penalize"), (penalties, "penalize_frequency")
SAMPLING_BUGS: tuple[Mutation, ...] = (
    _bug("sampling-ended-rows-go-on", case="transformer/gpt2", place=(sample.Generator, "_append"),
         bug=_ended_rows_go_on),
    _bug("sampling-one-token-more-in-top-k", place=_FILTER, bug=_changed(top_k=lambda count: count and count + 1)),
    _bug("sampling-min-p-squared", place=_FILTER, bug=_changed(min_p=lambda share: share * share)),
    _bug("sampling-temperature-last", place=_FILTER, bug=_temperature_last),
    _bug("sampling-nucleus-before-top-k", place=_FILTER, bug=_nucleus_before_top_k),
    _bug("sampling-nucleus-one-token-short", place=(sample, "_nucleus_threshold"), bug=_without_the_crossing_token),
    _bug("sampling-penalty-divides-negative-logits", place=_PENALTY, bug=_penalty_divides_all),
    _bug("sampling-penalty-of-padding", place=_PENALTY, bug=_penalty_of_padding),
    _bug("sampling-bias-of-the-next-token", place=_ADDED,
         bug=_biased(lambda token, value, how: ((token + 1) % sampling_case.VOCAB, value))),
    _bug("sampling-bias-after-temperature", place=_ADDED,
         bug=_biased(lambda token, value, how: (token, value * how.temperature))),
    _bug("sampling-bias-replaces-logits", place=_ADDED, bug=_bias_replaces),
    _bug("sampling-bias-before-penalties", place=_ADDED, bug=_bias_before_penalties),
    _bug("sampling-frequency-of-prompts", place=_FREQUENCY, bug=_frequency_of_prompts),
    _bug("sampling-presence-once-per-occurrence", place=_FREQUENCY,
         bug=lambda original, *args, frequency, presence: original(*args, frequency=frequency + presence, presence=0)),
    _bug("sampling-last-of-equal-tokens", place=(sample, "draw"),
         bug=lambda original, logits, *how, **where: logits.shape[1] - 1 - original(logits.flip(-1), *how, **where)),
)  # fmt: skip
