"""Will it fit: memory of a workload estimated from the configuration, before anything is compiled (S file)."""

from __future__ import annotations

from jaxbench import prompts
from jaxbench.bench import environment, flops
from jaxbench.bench.records import Workload
from jaxbench.bench.suite import Suite
from jaxbench.config import TransformerConfig

IMPORT_BYTES = 450 * 2**20  # resident set of one worker after its imports: 250 (jax) to 450 MB (transformers), measured


def inference_bytes(config: TransformerConfig, load: Workload) -> int:
    """Return what one worker needs for a prefill or decode workload: weights, cache, largest activations.

    Sizes are those of the padded bucket. The cache counts twice (prefill's and its padded copy), and so does each
    layer's widest intermediate (the value and what is computed from it).
    """
    size = prompts.bucket(load.batch, load.prompt_tokens, max(load.new_tokens, 1))
    rows = size.batch_size * size.prompt_length
    scores = size.batch_size * config.num_heads * size.prompt_length**2 * 4  # float32, one layer at a time
    widest = rows * max(2 * config.d_ff, 4 * config.d_model) * 4
    logits = 3 * size.batch_size * config.vocab_size * 4  # as computed, widened, and for the draw
    cache = flops.kv_cache_bytes(config, batch=size.batch_size, length=size.num_slots, dtype=load.dtype)
    return flops.parameter_bytes(config, load.dtype) + 2 * (cache + scores + widest) + logits


def train_bytes(config: TransformerConfig, load: Workload, *, weights: str | None = None) -> int:
    """Return what one worker needs for an AdamW step: weights, gradients, two moments, every layer's activations.

    `weights` is the type of weights and moments where it is not that of the products.
    """
    size = flops.dtype_bytes(load.dtype)
    tokens = load.batch * load.prompt_tokens
    layer = tokens * (8 * config.d_model + 4 * config.d_ff) * size
    layer += 2 * load.batch * config.num_heads * load.prompt_tokens**2 * 4
    logits = 3 * tokens * config.vocab_size * 4  # logits, their softmax and gradient
    return 4 * flops.parameter_bytes(config, weights or load.dtype) + config.num_layers * layer + logits


def needed_bytes(suite: Suite, config: TransformerConfig) -> tuple[int, str]:
    """Return the peak over the suite's stages with every arm's worker alive, and the workload it comes from."""
    worst, where = 0, "nothing"
    for load in suite.workloads():
        if load.kind == "train":
            shallow = config.model_copy(update={"num_layers": min(suite.train.num_layers, config.num_layers)})
            held = "float32" if suite.train.form == "run" else load.dtype
            micro = load.model_copy(update={"batch": load.batch // suite.train.accumulation})
            own, resting = train_bytes(shallow, micro, weights=held), 4 * flops.parameter_bytes(shallow, held)
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
