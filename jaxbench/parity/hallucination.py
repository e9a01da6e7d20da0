"""Parity of the hallucination lab's token scores: JAX and PyTorch versus the literal formulas, in float64.

The literal formulas (jaxbench/hallucination/reference.py) get attention, residual streams and logits from transformers,
one response at a time without padding; jaxbench reads prompts once, with several responses per row and padding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import torch_ref.hallucination.reader
import torch_ref.hallucination.token_scores
import torch_ref.transformer
from jaxbench import transformer
from jaxbench.hallucination import layout, reader, reference, token_scores
from jaxbench.parity import cases, distance, gates
from jaxbench.parity.oracles import families, transformers_model
from jaxbench.pretrained import weights

TOLERANCE = 1e-9  # relative 2-norm
PERCENT = 10  # of a context's tokens that count as attended to
SHAPE = families.SHAPE | {"num_hidden_layers": 3}
# Where transformers keeps the residual stream between a block's branches: the input of this norm.
BETWEEN = {"gpt2": "ln_2", "gemma2": "pre_feedforward_layernorm"}


class Sample(NamedTuple):
    """A prompt and its responses, as token ids."""

    text: layout.Text
    responses: list[list[int]]


class Seen(NamedTuple):
    """What transformers computed for one response after its prompt; S slots."""

    attention: np.ndarray  # [L N S S]
    stream: np.ndarray  # [L + 1, S D]
    middle: np.ndarray  # [L S D]
    hidden: np.ndarray  # [S D], after the final norm
    logits: np.ndarray  # [S V]


def samples(vocab_size: int) -> list[Sample]:
    """Two prompts of different lengths, with three and two responses, one of them a single token."""
    random = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return random.integers(0, vocab_size, length).tolist()

    first = Sample(layout.Text(ids(34), range(3, 30)), [ids(9), ids(4), ids(6)])
    return [first, Sample(layout.Text(ids(19), range(2, 17)), [ids(1), ids(8)])]


def family_model(family: str) -> torch.nn.Module:
    """Build transformers' random model of a family, in float64, with attention weights exposed."""
    extra: dict[str, Any] = {} if family == "gpt2" else dict(families.GROUPED)
    extra |= {"mistral": {"sliding_window": 9}, "gemma2": {"sliding_window": 9}}.get(family, {})
    epsilon = "layer_norm_epsilon" if family == "gpt2" else "rms_norm_eps"
    config = transformers.AutoConfig.for_model(family, **SHAPE, **extra, **{epsilon: families.NORM_EPS})
    model = transformers_model.random_model(config)
    model.set_attn_implementation("eager")
    return model


def seen(model: torch.nn.Module, ids: list[int]) -> Seen:
    """Run transformers on token ids and keep what it computes."""
    kept: dict[str, list[np.ndarray]] = {"stream": [], "middle": []}
    core = model.transformer if hasattr(model, "transformer") else model.model
    blocks = core.h if hasattr(core, "h") else core.layers
    between = BETWEEN.get(model.config.model_type, "post_attention_layernorm")

    def keep(kind: str):
        return lambda module, inputs, kwargs: kept[kind].append(
            (inputs[0] if inputs else kwargs["hidden_states"])[0].numpy()
        )

    norm = core.ln_f if hasattr(core, "ln_f") else core.norm
    watched = [(block, "stream") for block in blocks] + [(norm, "stream")]
    watched += [(getattr(block, between), "middle") for block in blocks]
    hooks = [module.register_forward_pre_hook(keep(kind), with_kwargs=True) for module, kind in watched]
    try:
        with torch.no_grad(), transformers_model.wide():
            out = model(torch.tensor([ids]), output_attentions=True, output_hidden_states=True, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    attention = np.stack([each[0].numpy() for each in out.attentions])
    return Seen(
        attention, np.stack(kept["stream"]), np.stack(kept["middle"]), out.hidden_states[-1][0].numpy(),
        out.logits[0].numpy(),
    )  # fmt: skip


def by_the_formulas(model: torch.nn.Module, sample: Sample, response: list[int]) -> dict[str, np.ndarray]:
    """Compute every score of one response: arrays [L N R], [R L] or [R]."""
    text = sample.text
    full = seen(model, [*text.ids, *response[:-1]])
    core = model.transformer if hasattr(model, "transformer") else model.model
    norm = core.ln_f if hasattr(core, "ln_f") else core.norm

    def logits(state: np.ndarray) -> np.ndarray:
        with torch.no_grad(), transformers_model.wide():
            out = model.lm_head(norm(torch.from_numpy(state)[None, None]))[0, 0].numpy()
        cap = getattr(model.config, "final_logit_softcapping", None)
        return out if cap is None else cap * np.tanh(out / cap)

    first = len(text.ids) - 1
    layers, heads = full.attention.shape[:2]
    found = {name: np.zeros((layers, heads, len(response))) for name in token_scores.AttentionScores._fields}
    found |= {"parametric": np.zeros((len(response), layers)), "loss": np.zeros(len(response))}
    found["entropy"] = np.zeros(len(response))
    for i, target in enumerate(response):
        n = first + i
        generated = range(first + 1, n + 1)
        for layer, head in np.ndindex(layers, heads):
            row, visible = full.attention[layer, head, n], generated
            if (window := _window(model, layer)) is not None:
                visible = [slot for slot in generated if n - slot < window]
            here = (layer, head, i)
            found["external"][here] = reference.external_context_score(row, full.hidden, n, text.context, PERCENT)
            found["context_mass"][here] = reference.context_mass(row, text.context)
            found["lookback"][here] = reference.lookback_ratio(row, text.context, visible)
        for layer in range(layers):
            states = full.middle[layer, n], full.stream[layer + 1, n]
            found["parametric"][i, layer] = reference.parametric_knowledge_score(*states, logits)
        found["loss"][i], found["entropy"][i] = reference.surprise(full.logits[n], target)
    return found


def _window(model: torch.nn.Module, layer: int) -> int | None:
    """Attention window of a layer in tokens, None = all."""
    kinds = getattr(model.config, "layer_types", None)
    if kinds is not None and kinds[layer] == "full_attention":
        return None
    return getattr(model.config, "sliding_window", None)


def in_jax(checkpoint: weights.Checkpoint, given: list[Sample]) -> dict[str, np.ndarray]:
    """Compute every score of all slots in JAX: arrays [L N B T], [B T L] or [B T]."""
    model = transformer.build(checkpoint.config, checkpoint.params, dtype="float64")
    prompts, rows = _arrays(given)

    @jax.jit
    def run(prompts: layout.PromptArrays, rows: layout.ResponseArrays) -> dict[str, Any]:
        prompt = reader.read_prompt(model, prompts.tokens, prompts.positions, prompts.is_context)
        responses = reader.Responses(*rows)
        trace = reader.read_responses(model, prompt, responses)
        slots = jnp.arange(rows.tokens.size)
        scores = token_scores.attention_scores(model, prompt, responses, trace, prompts.num_attended)
        loss, entropy = token_scores.surprise(model, trace, rows.targets)
        parametric = token_scores.parametric_scores(model, trace, slots, len(slots))
        return scores._asdict() | {"parametric": parametric, "loss": loss, "entropy": entropy}

    return _named(run(prompts, rows), rows.tokens.shape)


@torch.no_grad()
def in_torch(checkpoint: weights.Checkpoint, given: list[Sample]) -> dict[str, np.ndarray]:
    """Compute the same in PyTorch."""
    of, scores = torch_ref.hallucination.reader, torch_ref.hallucination.token_scores
    model = torch_ref.transformer.build(checkpoint.config, checkpoint.params, dtype="float64")
    prompts, rows = (type(each)(*map(torch.from_numpy, each)) for each in _arrays(given))
    prompt = of.read_prompt(model, prompts.tokens, prompts.positions, prompts.is_context)
    responses = of.Responses(*rows)
    trace = of.read_responses(model, prompt, responses)
    slots = torch.arange(rows.tokens.numel())
    found = scores.attention_scores(model, prompt, responses, trace, prompts.num_attended)
    loss, entropy = scores.surprise(model, trace, rows.targets)
    parametric = scores.parametric_scores(model, trace, slots, len(slots))
    return _named(
        found._asdict() | {"parametric": parametric, "loss": loss, "entropy": entropy}, tuple(rows.tokens.shape)
    )


def _arrays(given: list[Sample]) -> tuple[layout.PromptArrays, layout.ResponseArrays]:
    """Arrays of prompts and responses, longer than the texts."""
    texts = [sample.text for sample in given]
    prompts = layout.prompt_arrays(texts, share=PERCENT / 100, size=40)
    return prompts, layout.response_arrays(texts, [sample.responses for sample in given], size=24)


def _named(found: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    values = {name: np.asarray(value) for name, value in found.items()}
    return values | {"parametric": values["parametric"].reshape(*shape, -1)}


def of_response(found: Mapping[str, np.ndarray], row: int, place: slice) -> dict[str, np.ndarray]:
    """Select the scores of one response from those of all slots."""
    heads = token_scores.AttentionScores._fields
    return {name: value[:, :, row, place] if name in heads else value[row, place] for name, value in found.items()}


def gates_of(case: cases.Case) -> list[gates.Gate]:
    """One gate per backend: every score of every response; the last part of the case's id is the family."""
    model = family_model(case.id.rsplit("/", 1)[1])
    given = samples(SHAPE["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        transformers_model.save(model, Path(folder) / "model")
        checkpoint = weights.load_checkpoint(Path(folder) / "model")
    wanted = {
        (row, i): by_the_formulas(model, sample, response)
        for row, sample in enumerate(given)
        for i, response in enumerate(sample.responses)
    }
    found = []
    for name, run in (("flax", in_jax), ("torch", in_torch)):
        values = run(checkpoint, given)
        mine, theirs = {}, {}
        for (row, i), each in wanted.items():
            place = layout.places(given[row].responses)[i]
            mine |= {f"{kind} of {row}.{i}": x for kind, x in of_response(values, row, place).items()}
            theirs |= {f"{kind} of {row}.{i}": x for kind, x in each.items()}
        compared = distance.compare(mine, theirs, kind="token scores")
        worst = max(compared.entries, key=lambda entry: entry.error)
        what = f"{name}: token scores against their formulas, float64"
        passed = compared.passed and worst.error <= TOLERANCE
        found.append(gates.Gate("P1", what, passed, worst.error, TOLERANCE, worst.name))
    return found
