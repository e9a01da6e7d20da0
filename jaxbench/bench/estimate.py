"""Will it fit: memory of a workload estimated from the configuration, before anything is compiled (S file)."""

from __future__ import annotations

from jaxbench.bench import environment, flops
from jaxbench.bench.records import Workload
from jaxbench.bench.suite import Suite
from jaxbench.config import TransformerConfig

IMPORT_BYTES = 450 * 2**20  # resident set of one worker after its imports: 250 (jax) to 450 MB (transformers), measured


def inference_bytes(config: TransformerConfig, load: Workload) -> int:
    """Return what one worker needs for a prefill or decode workload: weights, cache, largest activations."""
    rows = load.batch * load.prompt_tokens
    scores = load.batch * config.num_heads * load.prompt_tokens**2 * 4  # float32, one layer at a time
    widest = rows * max(2 * config.d_ff, 4 * config.d_model) * 4
    logits = load.batch * config.vocab_size * 4
    cache = flops.kv_cache_bytes(
        config, batch=load.batch, length=load.prompt_tokens + load.new_tokens, dtype=load.dtype
    )
    return flops.parameter_bytes(config, load.dtype) + cache + scores + widest + logits


def train_bytes(config: TransformerConfig, load: Workload) -> int:
    """Return what one worker needs for an AdamW step: weights, gradients, two moments, every layer's activations."""
    size = flops.dtype_bytes(load.dtype)
    tokens = load.batch * load.prompt_tokens
    layer = tokens * (8 * config.d_model + 4 * config.d_ff) * size
    layer += 2 * load.batch * config.num_heads * load.prompt_tokens**2 * 4
    logits = 3 * tokens * config.vocab_size * 4  # logits, their softmax and gradient
    return 4 * flops.parameter_bytes(config, load.dtype) + config.num_layers * layer + logits


def needed_bytes(suite: Suite, config: TransformerConfig) -> tuple[int, str]:
    """Return the peak over the suite's stages with every arm's worker alive, and the workload it comes from."""
    worst, where = 0, "nothing"
    for load in suite.workloads():
        if load.kind == "train":
            shallow = config.model_copy(update={"num_layers": min(suite.train.num_layers, config.num_layers)})
            own, resting = train_bytes(shallow, load), 4 * flops.parameter_bytes(shallow, load.dtype)
        else:
            own, resting = inference_bytes(config, load), flops.parameter_bytes(config, load.dtype)
        total = own + (len(suite.arms) - 1) * resting + len(suite.arms) * IMPORT_BYTES
        if total > worst:
            worst, where = total, load.label()
    return worst, where


def check_fits(suite: Suite, config: TransformerConfig, *, available: int | None = None) -> int:
    """Return the estimated peak in bytes, or raise ValueError when it exceeds the memory that is available."""
    available = environment.available_memory_bytes() if available is None else available
    needed, where = needed_bytes(suite, config)
    if needed > available:
        raise ValueError(
            f"suite: {where} with {len(suite.arms)} arms needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} "
            "GiB are available; lower the batch or prompt_tokens, or name fewer arms"
        )
    return needed
