"""Table of parity cases, one row per case; unit tests, the parity command and every workload share it (S file).

A row names the module that holds `build(config, params, dtype=..., **options)` in jaxbench/, torch_ref/ and
jaxbench/eqx/, by their common relative path. To add a workload's case, add a row; if its model is no decoder, the row
also names

    task    the module, next to `module` in every package, with Batch, predict, loss_of and loss_fn, as in train.py
    data    the S module with initial_params(config, seed, distinct=True) and parity_arrays(config, batch=, length=,
            seed=, step=), whose result has the fields of Batch and `positions` [B T], -1 = padding
    exact   a module of jaxbench/parity/ with `gates_of(case)`, for cases without a model: bits, lists, counts, tokens
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxbench import initial
from jaxbench.block_pattern import BlockPattern
from jaxbench.compress.config import CompressorConfig
from jaxbench.config import RotaryScaling, TransformerConfig
from jaxbench.hallucination.token_inputs import TokenConfig
from jaxbench.hallucination.tuned_inputs import TunedConfig
from jaxbench.lora.config import LoraConfig, with_lora
from jaxbench.memory.bank_config import BankConfig
from jaxbench.memory.block_config import BlockConfig
from jaxbench.memory.config import NeuralMemoryConfig
from jaxbench.memory.decoder_config import DecoderMemory, with_memory
from jaxbench.training.step_config import OptimizerConfig, StepConfig
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.detector.features import NeuralConfig

# Backends that are compared with PyTorch's, and the module of each one's side.
BACKENDS = ("flax", "equinox")  # each has its own module in this package: <name>_side.py
LLAMA = TransformerConfig(
    vocab_size=64, d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_seq_len=64,
    dropout=0.1,
)  # fmt: skip
GPT2 = LLAMA.model_copy(
    update={
        "norm": "layernorm",
        "activation": "gelu",
        "position": "learned",
        "use_bias": True,
        "num_kv_heads": 4,
    }
)
# Heads whose total width exceeds the residual stream's, as in the small models of the family.
QWEN3 = {"qk_norm": True, "head_dim": 16, "rope_theta": 1e6, "norm_eps": 1e-6}
# Features of the family's three releases; windows in all layers but the last of every two or three.
GEMMA = {"activation": "geglu", "embedding_scale": 32**0.5, "norm_eps": 1e-6, "head_dim": 16}
GEMMA2 = GEMMA | {
    "post_norms": True, "query_pre_attn_scalar": 12.0, "attention_softcap": 2.0, "logit_softcap": 3.0,
    "sliding_window": 5, "global_every": 2,
}  # fmt: skip
GEMMA3 = GEMMA2 | {"attention_softcap": None, "local_rope_theta": 1e3, "qk_norm": True, "global_every": 3}
BLOCKED = {"implementation": "blocked", "block_size": 4}
KERNEL = LLAMA.model_copy(update={"d_model": 128, "head_dim": 64})  # heads as wide as real ones
LLAMA3_SCALING = RotaryScaling(kind="llama3", factor=8.0, original_max_seq_len=16)
# More tokens than one part of the queries has; a layer with a window, one without, and capped scores in both.
PARTS = {"max_seq_len": 192, "sliding_window": 20, "global_every": 2, "attention_softcap": 2.0}
EOS = 14  # a token that ends two of the four rows of `transformer/gpt2`, at different steps
YARN_SCALING = RotaryScaling(kind="yarn", factor=4.0, original_max_seq_len=64, beta_fast=8.0)
GATED = with_memory(LLAMA, DecoderMemory(
    kind="mag", layers=(1,), window=4, num_persistent=2, max_documents=2,
    neural=NeuralMemoryConfig(d_model=32, num_heads=2, head_dim=8, chunk_size=4),
))  # fmt: skip
ADAPTED = with_lora(LLAMA, LoraConfig(
    rank=3, alpha=5.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"), layers=(1,),
))  # fmt: skip
TUNED = TunedConfig(
    decoder=LLAMA.model_copy(update={"num_layers": 3}), first=1, num_blocks=2,
    lora=LoraConfig(rank=3, alpha=5.0, dropout=0.1, targets=("q_proj", "v_proj", "up_proj")),
)  # fmt: skip

# AdamW over all parameters, without clipping: what every case trains with unless it says otherwise. Decay is large, so
# that 20 steps move every parameter far above the tolerance.
ADAMW = OptimizerConfig(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, decay="all")
STEP = StepConfig(clip_norm=None, optimizer=ADAMW)
# The rest of a run's step: gradients clipped at every step here, micro-batches of different weights, decay of matrices.
RUN_STEP = StepConfig(clip_norm=0.3, accumulation=2, optimizer=ADAMW.model_copy(update={"decay": "matrices"}))
SGD_STEP = StepConfig(clip_norm=0.3, optimizer=OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=0.1))

COMPRESS = {
    "module": "compress.compressor", "task": "compress.compressor", "data": "compress.config", "prompt": 0,
    "backends": ("flax",),
}  # fmt: skip
COMPRESSOR = CompressorConfig(
    decoder=LLAMA.model_copy(update={"num_layers": 3}), num_layers=2, chunk=12, ratios=(2, 4), d_connector=24,
    d_local=20,
)  # fmt: skip


class Case(NamedTuple):
    """One configuration for which every backend must compute the same."""

    id: str  # <workload>/<variant>
    config: Any  # the configuration that `build` takes; None = the default model with its own weights
    module: str = "transformer"  # relative path of the module with `build`
    options: Mapping[str, Any] = {}  # further arguments of build: implementation, scan_layers, projection_groups, ...
    batch: int = 2  # rows; every second row starts with padding
    length: int = 16  # tokens a row
    first: int = 0  # position of a row's first token
    prompt: int = 10  # tokens of the prefill before decoding; 0 = the model does not decode
    chunk: int = 1  # tokens of the first call that reads the cache; those after it have one
    packed: bool = False  # two documents per row, distinguished by segment ids
    sampled: bool = False  # also sample tokens, and compare them exactly
    eos_id: int | None = None  # token that ends a row of these
    steps: int = 20  # optimiser steps; 0 = no training
    step: StepConfig = STEP
    gradients: bool = True  # compare gradients by default
    seed: int = 0
    task: str = "train"  # relative path of the module with Batch, predict, loss_of, loss_fn
    data: str | None = None  # S module of a workload's parameters and batches; None = the decoder's, here
    exact: str | None = None  # module of jaxbench/parity/ whose gates_of(case) replace all others
    backends: tuple[str, ...] = BACKENDS  # JAX backends that have the case
    device: str | None = None  # device that `kernel` needs; without it the case is skipped; None = any
    kernel: str | None = None  # 16-bit-only attention, used in bfloat16; float64 uses dense attention
    is_closed: bool = False  # its modules are called inside a scan, which hides their outputs from capture

    @property
    def is_scanned(self) -> bool:
        """True where the layers run inside a scan, which hides their outputs from capture."""
        return self.is_closed or bool(self.options.get("scan_layers"))

    def cached_calls(self) -> list[slice]:
        """Slots that each call after the prefill fills."""
        starts = [self.prompt, *range(self.prompt + self.chunk, self.length)]
        return [slice(start, end) for start, end in zip(starts, [*starts[1:], self.length], strict=True)]

    def options_in(self, dtype: str) -> dict[str, Any]:
        """Arguments of `build` in a number type."""
        kernel = {} if self.kernel is None or dtype == "float64" else {"implementation": self.kernel}
        return {**self.options, **kernel}


def _llama(
    name: str, *, options: Mapping[str, Any] | None = None, packed: bool = False, sampled: bool = False, **update: Any
) -> Case:
    config = TransformerConfig(**(LLAMA.model_dump() | update))
    return Case(f"transformer/{name}", config, options=options or {}, packed=packed, sampled=sampled)


def _memory(name: str, *, seed: int = 0, length: int = 18, **update: Any) -> Case:
    """Case of a neural memory; with 18 tokens the last chunk is half full; odd seeds have padding."""
    config = NeuralMemoryConfig(d_model=20, num_heads=2, head_dim=8, chunk_size=4, **update)
    path = {"module": "memory.neural", "task": "memory.target", "data": "memory.config"}
    return Case(f"memory/{name}", config, **path, length=length, prompt=0, seed=seed, backends=("flax",))


def _block(kind: str, *, seed: int = 0, length: int = 10, depth: int = 2) -> Case:
    """Case of a block with memory; odd seeds have padding."""
    shape, parts = {"d_model": 20, "head_dim": 8}, {"num_heads": 2, "num_kv_heads": 2 if kind == "bank" else 1}
    if kind == "bank":
        bank = BankConfig(**shape, num_heads=2, block_size=2, memory_slots=2, ratio=2)
        config = BlockConfig(kind=kind, **shape, **parts, window=3, bank=bank)
    else:
        learned = 0 if kind == "mac" or not depth else 2
        neural = NeuralMemoryConfig(**shape, num_heads=2, chunk_size=4, depth=depth, num_persistent=learned)
        persistent = 0 if kind == "lmm" else 2
        config = BlockConfig(kind=kind, **shape, **parts, window=4, num_persistent=persistent, neural=neural)
    path = {"module": "memory.blocks", "task": "memory.target", "data": "memory.block_config"}
    return Case(f"memory/{kind}", config, **path, length=length, prompt=0, seed=seed, backends=("flax",),
                is_closed=kind == "mac")  # fmt: skip


def _mark(name: str, **scheme: Any) -> Case:
    """Case of a watermarking scheme: bits, p-values and generated tokens."""
    return Case(f"watermark/{name}", parse_scheme(scheme), module="watermark.logits_processor", exact="watermark",
                backends=("flax",))  # fmt: skip


def _sparse(name: str, **pattern: Any) -> Case:
    """Case of block-sparse attention on rows with two documents and padding; the last block is half full."""
    return Case(f"sparse_attention/{name}", BlockPattern(block_size=4, **pattern), module="sparse_attention",
                length=22, exact="sparse_attention", backends=("flax",))  # fmt: skip


def _reader(family: str) -> Case:
    """Case of the hallucination lab's token scores, on a transformers model of a family."""
    return Case(f"hallucination/{family}", LLAMA, module="hallucination.token_scores", exact="hallucination",
                backends=("flax",))  # fmt: skip


def _oracle(name: str) -> Case:
    """Case of code that all backends share, compared with an outside oracle."""
    return Case(f"oracle/{name}", LLAMA, module=f"oracles.{name}", exact=f"oracles.{name}")


CASES: tuple[Case, ...] = (
    *map(_oracle, ("rotary", "philox", "initial", "schedules", "packing", "families")),
    _llama("llama-grouped", sampled=True)._replace(chunk=3),
    _llama("llama-run-step")._replace(step=RUN_STEP, batch=4),  # micro-batches of two rows
    _llama("llama-sgd")._replace(step=SGD_STEP),
    # Angles of a narrow type show far from the start alone (in bfloat16 1,500 is 1,496 or 1,504), where scores differ.
    _llama("llama-far", query_pre_attn_scalar=0.1, max_seq_len=2048)._replace(first=1500),
    _llama("llama-multi-head", num_kv_heads=4),
    _llama("llama-multi-query", num_kv_heads=1),
    _llama("llama-untied", tie_embeddings=False),
    _llama("llama-bias", use_bias=True),
    _llama("llama-window", sampled=True, sliding_window=5)._replace(chunk=3),
    _llama("llama-rope-linear", rope_scaling=RotaryScaling(kind="linear", factor=4.0)),
    _llama("llama-rope-llama3", rope_scaling=LLAMA3_SCALING, rope_theta=500000.0),
    _llama("llama-rope-yarn", rope_scaling=YARN_SCALING),
    _llama("llama-packed", packed=True),
    _llama("llama-blocked", options=BLOCKED),
    _llama("llama-blocked-window", options=BLOCKED, sliding_window=5, packed=True),
    _llama("llama-scan", options={"scan_layers": True}),
    _llama("llama-fused", options={"projection_groups": 2}, use_bias=True),  # two parts, as on a mesh with model=2
    _llama("llama-encoder", is_causal=False)._replace(prompt=0),
    _llama("llama-encoder-blocked", options=BLOCKED, packed=True, is_causal=False)._replace(prompt=0),
    _llama("qwen3", sampled=True, **QWEN3),
    _llama("qwen3-untied-scan", options={"scan_layers": True, "projection_groups": 2}, tie_embeddings=False, **QWEN3),
    _llama("qwen2", qkv_bias=True),
    _llama("qwen2-untied-scan", options={"scan_layers": True, "projection_groups": 2}, tie_embeddings=False,
           qkv_bias=True),
    _llama("gemma", **GEMMA),
    _llama("gemma2", sampled=True, **GEMMA2),
    _llama("gemma2-blocked", options=BLOCKED, packed=True, **GEMMA2),
    _llama("gemma3", num_layers=3, rope_scaling=RotaryScaling(kind="linear", factor=4.0), **GEMMA3),
    Case("transformer/llama-kernel", KERNEL, length=64, prompt=48, kernel="fused", device="gpu"),
    Case("transformer/llama-kernel-window-packed", KERNEL.model_copy(update={"sliding_window": 17}), length=64,
         packed=True, kernel="fused", device="gpu"),
    Case("transformer/llama-parts", LLAMA.model_copy(update=PARTS), length=160, prompt=150, chunk=4),
    Case("transformer/gpt2", GPT2, sampled=True, chunk=3, eos_id=EOS),
    Case("sample/filters", LLAMA, module="sample", exact="sampling", backends=("flax",)),
    Case("transformer/gpt2-untied-blocked", GPT2.model_copy(update={"tie_embeddings": False}),
         options=BLOCKED),
    _sparse("local", local=2),
    _sparse("local-first", local=2, first=1),
    _sparse("strided", local=1, first=1, stride=3),
    _mark("kgw", scheme="kgw"),
    _mark("kgw-left-5", scheme="kgw", context={"kind": "left", "width": 5}),
    _mark("kgw-min", scheme="kgw", context={"kind": "min", "width": 4}),
    _mark("kgw-skip", scheme="kgw", context={"kind": "skip", "width": 3}),
    _mark("kgw-self", scheme="kgw", context={"kind": "self", "width": 4}),
    _mark("unigram", scheme="unigram"),
    _mark("gumbel", scheme="gumbel"),
    _mark("gumbel-dual-key", scheme="gumbel", dual_key_alpha=0.25),
    _mark("gumbel-vllm", scheme="gumbel", prf="vllm"),
    _mark("synthid", scheme="synthid"),
    _mark("dip", scheme="dip"),
    _mark("morphmark", scheme="morphmark"),
    _mark("markllm", scheme="kgw_markllm", prefix_length=2),
    _mark("markllm-self", scheme="kgw_markllm", window_scheme="self"),
    _mark("transformers", scheme="kgw_transformers"),
    Case("watermark/neural", NeuralConfig(num_rows=64, d_model=16, num_pooled=8, d_hidden=12, dilations=(1, 2, 4)),
         module="watermark.detector.neural", task="watermark.detector.neural", data="watermark.detector.features",
         batch=4, prompt=0, backends=("flax",)),
    Case("hallucination/tokens", TokenConfig(num_columns=24, d_model=32),
         module="hallucination.token_classifier", task="hallucination.token_classifier",
         data="hallucination.token_inputs", batch=8, length=32, prompt=0, backends=("flax",)),
    Case("hallucination/tuned", TUNED, module="hallucination.tuned_reader", task="hallucination.tuned_reader",
         data="hallucination.tuned_inputs", prompt=0, backends=("flax",)),
    Case("compress/frozen", COMPRESSOR.model_copy(update={"prefix": 3}), **COMPRESS),
    Case("compress/lora", COMPRESSOR.model_copy(update={"lora": LoraConfig(rank=4, alpha=4.0)}), seed=7, **COMPRESS),
    *map(_reader, ("llama", "qwen3", "gpt2", "mistral", "gemma2")),
    _memory("neural", num_persistent=3, length=17),
    _memory("neural-padded", seed=1, depth=1, residual_norm=True, loss_reduction="mean", max_update_norm=0.5),
    _memory("neural-linear", depth=1, read="chunk", forgetting=False, qkv_activation="none", qk_norm=False,
            max_theta=0.1),
    _memory("neural-before", seed=1, read="before", activation="gelu_erf"),
    Case("memory/bank", BankConfig(d_model=20, num_heads=2, head_dim=8, block_size=4, memory_slots=4, ratio=2),
         module="memory.bank", task="memory.target", data="memory.bank_config", length=22, prompt=0, seed=1,
         backends=("flax",)),
    Case("memory/bank-learned", BankConfig(d_model=20, num_heads=2, head_dim=8, block_size=4, memory_slots=4, ratio=2,
         compression="learned"), module="memory.bank", task="memory.target", data="memory.bank_config", length=18,
         prompt=0, backends=("flax",)),
    Case("transformer/memory-gate", GATED, module="memory.decoder", length=12, prompt=7, chunk=2, sampled=True,
         backends=("flax",)),
    Case("transformer/lora", ADAPTED, module="lora.layers", sampled=True, backends=("flax",)),
    _block("mac", seed=1),
    _block("mag", length=7),
    _block("mag", seed=1, length=8, depth=0)._replace(id="memory/mag-none"),
    _block("mal", length=6),
    _block("lmm", length=5),
    _block("bank", length=9)._replace(id="memory/bank-window"),
    Case("transformer/smollm2", None, length=64, prompt=48, steps=0, gradients=False, sampled=True),
)  # fmt: skip


def find(case_id: str) -> Case:
    """Return the case of an id.

    Raises:
      ValueError: there is none; the message names the nearest ids.
    """
    table = {case.id: case for case in CASES}
    if case_id not in table:
        near = difflib.get_close_matches(case_id, table, n=3, cutoff=0.3) or sorted(table)
        raise ValueError(f"--case={case_id!r} is not a parity case; nearest: {', '.join(near)}")
    return table[case_id]


def load(case: Case, *, model: str | None = None) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a case's configuration and parameters: distinct random ones, the default model's, or those of `model`."""
    if case.data is not None:
        source = importlib.import_module(f"jaxbench.{case.data}")
        return case.config, source.initial_params(case.config, case.seed, distinct=True)
    if case.config is None or model is not None:
        from jaxbench.pretrained import weights

        checkpoint = weights.load_checkpoint(model)
        return checkpoint.config, dict(checkpoint.params)
    return case.config, initial.initial_params(case.config, case.seed, distinct=True)


class Arrays(NamedTuple):
    """Batch of one step in numpy, arrays [B T]; the fields of a backend's Batch."""

    tokens: np.ndarray  # int32
    targets: np.ndarray  # int32, the next tokens
    positions: np.ndarray  # int32, -1 = padding
    mask: np.ndarray  # bool, True where a target counts
    segments: np.ndarray | None = None  # int32, by document; None = one document a row


def arrays(case: Case, config: Any, *, step: int = 0) -> Any:
    """Batch of one step: random tokens, every second row starting with a quarter of padding."""
    if case.data is not None:
        source = importlib.import_module(f"jaxbench.{case.data}")
        return source.parity_arrays(config, batch=case.batch, length=case.length, seed=case.seed, step=step)
    random = np.random.default_rng((case.seed, step))
    shape = (case.batch, case.length)
    tokens = random.integers(0, config.vocab_size, (case.batch, case.length + 1), dtype=np.int32)
    positions = np.tile(np.arange(case.length, dtype=np.int32), (case.batch, 1))
    positions[1::2] = np.maximum(positions[1::2] - case.length // 4, -1)
    segments = None
    if case.packed:
        segments = np.zeros(shape, np.int32)
        segments[:, case.length // 2 :] = 1
        # Positions of the second document start at 0 again.
        positions[:, case.length // 2 :] -= positions[:, case.length // 2 :].min(axis=1, keepdims=True)
    mask = (positions >= 0) & (random.random(shape) < 0.9)
    positions = np.where(positions >= 0, positions + case.first, positions)
    return Arrays(tokens[:, :-1], tokens[:, 1:], positions, mask, segments)
