"""Hugging Face transformers as outside oracle: equal logits and equal greedy text from the same weights.

transformers gets its weights by another way than the backends: the default model through save_checkpoint, the small
ones from its own random initialisation, which load_checkpoint then reads.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import jaxbench.eqx.transformer
import jaxbench.sample
import jaxbench.transformer
import torch_ref.sample
import torch_ref.transformer
from jaxbench import initial
from jaxbench.parity import cases
from jaxbench.pretrained import tokenizer, weights
from jaxbench.text import packing

pytestmark = pytest.mark.timeout(900)  # about 90 s on two quiet cores; PyTorch suffers when others compute
LENGTHS = (8, 31, 100, 256, 512)  # tokens of the prompts
NEW_TOKENS = 24
FLOAT64_TOLERANCE = 1e-9  # relative 2-norm
LOGIT_TOLERANCE = 1e-5  # relative 2-norm in float32, the bar
SAFETY = 10  # greedy choices may part only where the margin is under this many times the measured logit error
BACKENDS = {
    "flax": (jaxbench.transformer, jaxbench.sample),
    "equinox": (jaxbench.eqx.transformer, jaxbench.sample),
    "torch": (torch_ref.transformer, torch_ref.sample),
}


class Oracle(NamedTuple):
    """What transformers says about the default model."""

    checkpoint: weights.Checkpoint
    prompts: list[list[int]]
    logits: list[np.ndarray]  # [T V] of each prompt
    continuations: np.ndarray  # [B M] greedy tokens
    margins: np.ndarray  # [B M] top logit minus second


class Ours(NamedTuple):
    """What one backend says."""

    logits: list[np.ndarray]
    continuations: np.ndarray


def test_every_backend_is_held_to_the_oracle():
    assert set(BACKENDS) == {*cases.BACKENDS, "torch"}


def _forward(backend: str, model) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return (tokens, positions) -> logits in numpy, compiled where that is usual."""
    if backend == "torch":

        def forward(tokens, positions):
            with torch.no_grad():
                return model(torch.from_numpy(tokens), torch.from_numpy(positions)).numpy()

        return forward
    if backend == "equinox":
        call = eqx.filter_jit(lambda model, tokens, positions: model(tokens, positions))
        return lambda tokens, positions: np.asarray(call(model, tokens, positions))
    graph, state = nnx.split(model)
    call = jax.jit(lambda state, tokens, positions: nnx.merge(graph, state)(tokens, positions))
    return lambda tokens, positions: np.asarray(call(state, tokens, positions))


def _padded(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and positions [B T] of prompts of several lengths, padded on the right."""
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    positions = np.full_like(tokens, -1)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        positions[row, : len(prompt)] = np.arange(len(prompt))
    return tokens, positions


def _relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64)))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    checkpoint = weights.load_checkpoint()
    prompts = packing.real_prompts(tokenizer.load_tokenizer(checkpoint.tokenizer), LENGTHS, packing.load_text())
    folder = weights.save_checkpoint(tmp_path_factory.mktemp("hf") / "default", checkpoint.config, checkpoint.params)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shutil.rmtree(folder)
    model.generation_config.eos_token_id = None  # all of NEW_TOKENS are compared
    width = max(LENGTHS)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])  # generate wants left padding
    is_token = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    how = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts]
        made = model.generate(ids, attention_mask=is_token, max_new_tokens=NEW_TOKENS, **how)
    top = torch.stack(made.logits, dim=1).topk(2).values  # [B M 2]
    margins = (top[..., 0] - top[..., 1]).numpy()
    return Oracle(checkpoint, prompts, logits, made.sequences[:, width:].numpy(), margins)


@pytest.fixture(scope="module", params=BACKENDS)
def ours(request, oracle, free_programs):
    transformer, sample = BACKENDS[request.param]
    model = transformer.build(oracle.checkpoint.config, oracle.checkpoint.params, dtype="float32")
    forward, (tokens, positions) = _forward(request.param, model), _padded(oracle.prompts)
    kept = []
    for row, prompt in enumerate(oracle.prompts):  # one shape, a fifth of the memory of all rows at once
        logits = forward(tokens[row : row + 1], positions[row : row + 1])
        kept.append(logits[0, : len(prompt)].copy())
    generator = sample.Generator(model, eos_id=None, sampling=sample.SamplingParams(temperature=0.0))
    made = generator(oracle.prompts, max_new_tokens=NEW_TOKENS, seed=0)
    del model, forward, generator, logits
    yield Ours(kept, np.asarray(made.tokens))
    free_programs()


def test_logits_of_the_default_model_equal_transformers(ours, oracle, record_property):
    errors = [_relative_error(found, wanted) for found, wanted in zip(ours.logits, oracle.logits, strict=True)]
    record_property("relative_errors", errors)
    assert max(errors) <= LOGIT_TOLERANCE, dict(zip(LENGTHS, errors, strict=True))


def test_greedy_text_of_the_default_model_equals_transformers(ours, oracle, record_property):
    error = max(np.abs(found - wanted).max() for found, wanted in zip(ours.logits, oracle.logits, strict=True))
    compared = []
    for row, (wanted, margins) in enumerate(zip(oracle.continuations, oracle.margins, strict=True)):
        different = np.flatnonzero(ours.continuations[row] != wanted)
        compared.append(int(different[0]) if len(different) else NEW_TOKENS)
        if len(different):
            margin = margins[different[0]]
            assert margin < SAFETY * error, f"prompt of {LENGTHS[row]} tokens, step {different[0]}, margin {margin:.1e}"
    record_property("tokens_compared", compared)
    note = f"equal for {compared} tokens, logit error {error:.1e}, least margin {oracle.margins.min():.1e}"
    print(note)
    assert sum(compared) >= 0.9 * NEW_TOKENS * len(LENGTHS), note


# --- small random models of every variant, as transformers writes them

SHAPE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "bos_token_id": 0}
SHAPE |= {"eos_token_id": 1, "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
QWEN3_ROTARY = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
# 64 wide, because transformers rounds the embeddings' factor to float32, and 8 is exact.
GEMMA = SHAPE | {"hidden_size": 64, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
VARIANTS = {
    "llama grouped untied": transformers.LlamaConfig(**SHAPE, num_key_value_heads=2),
    "llama tied, one key head, wide heads": transformers.LlamaConfig(
        **SHAPE, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True
    ),
    "llama llama3 rotary": transformers.LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=LLAMA3),
    "llama linear rotary with biases": transformers.LlamaConfig(
        **SHAPE,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        attention_bias=True,
        mlp_bias=True,
    ),
    "mistral window": transformers.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=9),
    "qwen3": transformers.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16, rope_parameters=QWEN3_ROTARY),
    "qwen3 tied, one key head, window": transformers.Qwen3Config(
        **SHAPE,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=0,
    ),
    "gpt2": transformers.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=1),
    "gpt2 untied, narrow": transformers.GPT2Config(
        **GPT2, n_inner=40, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1
    ),
}

# Held to transformers in float64, through a folder both ways.
VARIANTS_FLOAT64 = {name: config for name, config in VARIANTS.items() if name.startswith("qwen3")} | {
    "qwen2": transformers.Qwen2Config(**SHAPE, num_key_value_heads=2, rope_parameters=QWEN3_ROTARY),
    "qwen2 window, yarn": transformers.Qwen2Config(
        **SHAPE,
        num_key_value_heads=4,
        rope_parameters=YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=0,
    ),
    "llama yarn": transformers.LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=YARN),
    "llama yarn by mscale": transformers.LlamaConfig(
        **SHAPE, num_key_value_heads=2, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}
    ),
    "gemma": transformers.GemmaConfig(**GEMMA),
    "gemma2": transformers.Gemma2Config(
        **GEMMA, sliding_window=9, query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **GEMMA | {"num_hidden_layers": 5},
        sliding_window=9,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] + ["sliding_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        final_logit_softcapping=4.0,
    ),
}


def _small_model(variant: str) -> torch.nn.Module:
    """Return transformers' random model of a variant, none of whose parameters is one or zero throughout."""
    torch.manual_seed(0)
    config = (VARIANTS | VARIANTS_FLOAT64)[variant]
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # norms and biases start at one and zero; a swapped or forgotten one must show
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return theirs


def _small_batch() -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 97, (2, 80), dtype=np.int32)
    return tokens, np.broadcast_to(np.arange(80, dtype=np.int32), tokens.shape).copy()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_small_models_equal_transformers(variant, tmp_path):
    theirs = _small_model(variant)
    theirs.save_pretrained(tmp_path / "hf")
    checkpoint = weights.load_checkpoint(tmp_path / "hf")
    tokens, positions = _small_batch()
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    for backend, (transformer, _) in BACKENDS.items():
        model = transformer.build(checkpoint.config, checkpoint.params, dtype="float32")
        found = _forward(backend, model)(tokens, positions)
        assert _relative_error(found, wanted) <= LOGIT_TOLERANCE, backend


@pytest.fixture
def wide_transformers(monkeypatch):
    """Let transformers compute norms, softmax and rotary angles in float64, which it narrows to float32 by name."""
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("variant", VARIANTS_FLOAT64)
def test_float64_logits_equal_transformers_both_ways(variant, tmp_path, wide_transformers):
    theirs = _small_model(variant).double()
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = weights.load_checkpoint(tmp_path / "theirs")
    assert set(checkpoint.params) == set(initial.parameter_shapes(checkpoint.config))
    folder = weights.save_checkpoint(tmp_path / "ours", checkpoint.config, checkpoint.params)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True, attn_implementation="eager"
    )
    assert type(again) is type(theirs) and not any(report.values()), report
    tokens, positions = _small_batch()
    with torch.no_grad():
        wanted, saved = (model.eval()(torch.from_numpy(tokens).long()).logits.numpy() for model in (theirs, again))
    assert wanted.dtype == np.float64
    exact = 1e-13 if variant.startswith("gemma") else 0.0  # whose scales are stored less 1
    assert _relative_error(saved, wanted) <= exact
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        for backend, (transformer, _) in BACKENDS.items():
            model = transformer.build(checkpoint.config, checkpoint.params, dtype="float64")
            error = _relative_error(_forward(backend, model)(tokens, positions), wanted)
            assert error <= FLOAT64_TOLERANCE, (backend, error)
