"""Parity of sampling: filters and penalties versus transformers' own processors, and draws of JAX versus PyTorch's.

The logits are random and spread so that every filter removes tokens; prompts have several lengths, with other tokens
behind their ends. transformers chooses which processors it applies and in which order. It has no penalties of frequency
and presence, and adds biases first: what is added to logits is compared with a loop over the tokens of each row too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import transformers

import jaxbench.prng
import jaxbench.sample
import torch_ref.prng
import torch_ref.sample
from jaxbench.parity import cases, gates
from jaxbench.parity.oracles import transformers_model
from jaxbench.prompts import SamplingParams

ROWS, VOCAB, WIDTH = 48, 40, 9  # rows, tokens of the vocabulary and of a row's context
MANY = jaxbench.sample.NUM_CANDIDATES + 60  # tokens of a vocabulary whose nucleus is wider than the candidates
BIASES = ((0, 1.5), (3, -4.0), (17, 2.5), (VOCAB - 1, -0.75))  # exact in the float32 in which transformers keeps them
SETTINGS = {
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.3, top_k=5),
    "top-p": SamplingParams(temperature=0.8, top_p=0.7),
    "min-p": SamplingParams(temperature=1.4, min_p=0.15),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "bias": SamplingParams(temperature=0.7, top_k=7, logit_bias=BIASES),
    "all": SamplingParams(temperature=0.9, top_k=9, top_p=0.85, min_p=0.06, repetition_penalty=1.5),
}
ADDED = SamplingParams(
    temperature=1.0, repetition_penalty=1.7, frequency_penalty=0.8, presence_penalty=-0.5, logit_bias=BIASES
)
SEED, STEP = 7, 3


class Inputs(NamedTuple):
    """Logits of one step, and what came before it."""

    logits: np.ndarray  # [B V]
    tokens: np.ndarray  # [B W] int32
    lengths: np.ndarray  # [B] int32, tokens of each row


def gates_of(case: cases.Case) -> list[gates.Gate]:
    """One gate per setting, one for penalties and biases, one for a wide nucleus, one for draws of each kind."""
    given = inputs(vocab_size=VOCAB, spread=2.5)
    found = [_filtered(f"filters: {name}", sampling, given) for name, sampling in SETTINGS.items()]
    wide = SamplingParams(temperature=1.0, top_p=0.97)
    found.append(_filtered("filters: a wide nucleus", wide, inputs(vocab_size=MANY, spread=0.5)))
    found.append(_added(given._replace(lengths=np.maximum(given.lengths, STEP + 1))))
    found.append(_greedy(given._replace(logits=np.round(given.logits))))
    return [*found, _drawn(given)]


def inputs(*, vocab_size: int, spread: float) -> Inputs:
    """Random logits of a standard deviation, and rows of tokens with other tokens behind their ends."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocab_size, (ROWS, WIDTH), dtype=np.int32)
    lengths = random.integers(1, WIDTH, ROWS, dtype=np.int32)
    return Inputs(spread * random.standard_normal((ROWS, vocab_size)), tokens, lengths)


def filtered(library: Any, as_array: Any, sampling: SamplingParams, given: Inputs, *, step: int = 0) -> np.ndarray:
    """Logits [B V] of one backend after penalties, biases, temperature and filters, -inf where a token is removed.

    step: how many of each row's tokens are its answer.
    """
    logits, tokens, lengths = map(as_array, given)
    logits = library.penalties.penalize(logits, tokens, lengths, step=step, sampling=sampling)
    return np.asarray(library.filter_logits(logits, sampling))


def by_transformers(sampling: SamplingParams, given: Inputs) -> np.ndarray:
    """Logits [B V] after the processors that transformers' generate makes of the settings, row by row."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    settings = transformers.GenerationConfig(
        do_sample=True,
        sequence_bias={(token,): bias for token, bias in sampling.logit_bias} or None,
        **{name: getattr(sampling, name) for name in names},
    )
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers_model.random_model(transformers.LlamaConfig(vocab_size=8, **shape))
    rows = []
    for logits, tokens, length in zip(*given):
        ids, scores = torch.from_numpy(tokens[None, :length]).long(), torch.from_numpy(logits[None])
        processors = model._get_logits_processor(settings, input_ids_seq_length=int(length), encoder_input_ids=ids)
        rows.append(processors(ids, scores.clone()).numpy()[0])
    return np.stack(rows)


def by_hand(sampling: SamplingParams, given: Inputs, *, step: int) -> np.ndarray:
    """Logits [B V] after the three penalties, then the biases, token by token."""
    rows = given.logits.copy()
    for row, tokens, length in zip(rows, given.tokens.tolist(), given.lengths):
        for token in set(tokens[:length]):
            row[token] *= sampling.repetition_penalty ** (-1 if row[token] > 0 else 1)
        answer = tokens[length - step : length]
        for token in set(answer):
            row[token] -= answer.count(token) * sampling.frequency_penalty + sampling.presence_penalty
        for token, bias in sampling.logit_bias:
            row[token] += bias
    return rows


def _added(given: Inputs) -> gates.Gate:
    """Gate P11 of penalties and biases at a step whose rows have an answer."""
    ours = {
        "flax": filtered(jaxbench.sample, jnp.asarray, ADDED, given, step=STEP),
        "torch": filtered(torch_ref.sample, torch.tensor, ADDED, given, step=STEP),
    }
    wanted = by_hand(ADDED, given, step=STEP)
    return gates.oracle("penalties, then biases", ours, dict.fromkeys(ours, wanted), source="a loop over tokens")


def _filtered(what: str, sampling: SamplingParams, given: Inputs) -> gates.Gate:
    """Gate P11 of both backends' filtered logits."""
    ours = {
        "flax": filtered(jaxbench.sample, jnp.asarray, sampling, given),
        "torch": filtered(torch_ref.sample, torch.tensor, sampling, given),
    }
    wanted = by_transformers(sampling, given)
    source = f"transformers {transformers.__version__}: generate's processors of logits"
    return gates.oracle(what, ours, dict.fromkeys(ours, wanted), source=source)


def _greedy(given: Inputs) -> gates.Gate:
    """Gate P11 of temperature 0: of equally probable tokens the lowest id, as numpy's argmax."""
    ours = dict(zip(("flax", "torch"), _tokens(SamplingParams(), given)))
    wanted = dict.fromkeys(ours, np.argmax(given.logits, axis=1))
    return gates.oracle("greedy tokens", ours, wanted, source="numpy.argmax", tolerance=0.0)


def _drawn(given: Inputs) -> gates.Gate:
    """Gate P6 of one draw of every row."""
    mine, theirs = _tokens(SETTINGS["all"], given)
    return gates.sampling({"flax": mine[:, None], "torch": theirs[:, None]})


def _tokens(sampling: SamplingParams, given: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B] that JAX and PyTorch take of the same logits."""
    rows = np.arange(len(given.logits), dtype=np.int32)
    where = {"key": jaxbench.prng.key_from_seed(SEED), "step": jnp.int32(STEP), "row_ids": jnp.asarray(rows)}
    mine = jaxbench.sample.draw(jnp.asarray(given.logits), sampling, **where)
    where = {"key": torch_ref.prng.key_from_seed(SEED), "step": STEP, "row_ids": torch.tensor(rows)}
    return np.asarray(mine), torch_ref.sample.draw(torch.tensor(given.logits), sampling, **where).numpy()
