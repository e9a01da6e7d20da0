"""Estimate a workload's memory from the configuration, before anything is compiled (S file)."""

from __future__ import annotations

from jaxbench import initial, prompts
from jaxbench.bench.suite import Roofline, Suite
from jaxbench.config import TransformerConfig
from jaxbench.measure import environment, flops
from jaxbench.measure.records import Workload
from jaxbench.training.train_config import TrainConfig

IMPORT_BYTES = 450 * 2**20  # resident set of one worker after imports, measured: 250 (jax) to 450 MB (transformers)


def inference_bytes(config: TransformerConfig, workload: Workload) -> int:
    """Bytes that one worker needs for a prefill or decode workload: weights, cache, largest activations.

    Sizes are those of the padded bucket. The cache counts twice (prefill's and its padded copy), and so do one layer's
    scores and widest intermediate (the value and what is computed from it).
    """
    size = prompts.bucket(workload.batch, workload.prompt_tokens, max(workload.new_tokens, 1))
    rows = size.batch_size * size.prompt_length
    scores = size.batch_size * config.num_heads * size.prompt_length**2 * 4  # float32, one layer at a time
    widest = rows * max(2 * config.d_ff, 4 * config.d_model) * 4
    logits = 3 * size.batch_size * config.vocab_size * 4  # as computed, widened, and for the draw
    cache = flops.kv_cache_bytes(config, batch=size.batch_size, length=size.num_slots, dtype=workload.dtype)
    return flops.parameter_bytes(config, workload.dtype) + 2 * (cache + scores + widest) + logits


def train_bytes(config: TransformerConfig, workload: Workload, *, weights: str | None = None) -> int:
    """Bytes that one worker needs for an AdamW step: weights, gradients, two moments, every layer's activations.

    `weights` is the type of weights and moments if it differs from that of the products.
    """
    size = flops.dtype_bytes(workload.dtype)
    tokens = workload.batch * workload.prompt_tokens
    layer = tokens * (8 * config.d_model + 4 * config.d_ff) * size
    layer += 2 * workload.batch * config.num_heads * workload.prompt_tokens**2 * 4
    logits = 3 * tokens * config.vocab_size * 4  # logits, their softmax and gradient
    return 4 * flops.parameter_bytes(config, weights or workload.dtype) + config.num_layers * layer + logits


def check_run(settings: TrainConfig) -> int:
    """Return the least bytes that a training run takes on this host, whatever its mesh and options.

    Initial values are created on the host in float64. A step's rows are arrays of tokens, targets, positions and
    segments (int32) and a mask. A vocabulary size that is left to the tokenizer counts as one token.

    Raises:
      ValueError: the parameters or a step's rows need more memory than this machine has.
    """
    model = settings.decoder(settings.model.vocab_size or 1)
    parameters = initial.num_parameters(model)
    needed = {
        f"{parameters:,} parameters (model.num_layers={model.num_layers}, d_model={model.d_model}, d_ff={model.d_ff}, "
        f"vocab_size={model.vocab_size})": 8 * parameters,
        f"a step's rows (batch_size={settings.batch_size}, data.seq_len={settings.data.seq_len})": (
            17 * settings.batch_size * settings.data.seq_len
        ),
    }
    room = environment.total_memory_bytes()
    for what, size in needed.items():
        if size > room:
            raise ValueError(f"train: {what} take {size / 2**30:.3g} GiB, this machine has {room / 2**30:.1f} GiB")
    return sum(needed.values())


def check_roofline(settings: Roofline) -> int:
    """Return the bytes of the largest arrays that the roofline measures; ValueError if they do not fit."""
    products = [4 * (m * k + k * n + m * n) for m, k, n in settings.gemm_sizes]
    available = environment.available_memory_bytes()
    for name, size in {"read_bytes": settings.read_bytes, "gemm_sizes": max(products, default=0)}.items():
        if size > available:
            room = f"{available / 2**30:.1f} GiB are available"
            raise ValueError(f"suite: roofline.{name} needs {size / 2**30:.3g} GiB, {room}; take less")
    return max(settings.read_bytes, *products, 0)


def needed_bytes(suite: Suite, config: TransformerConfig) -> tuple[int, str]:
    """Return the peak bytes over the suite's stages with every arm's worker alive, and the workload that causes it."""
    totals = [(0, "nothing")]
    for workload in suite.workloads():
        if workload.kind == "train":
            shallow = config.model_copy(update={"num_layers": min(suite.train.num_layers, config.num_layers)})
            held = "float32" if suite.train.form == "run" else workload.dtype
            micro = workload.model_copy(update={"batch": workload.batch // suite.train.accumulation})
            own, resting = train_bytes(shallow, micro, weights=held), 4 * flops.parameter_bytes(shallow, held)
        else:
            own, resting = inference_bytes(config, workload), flops.parameter_bytes(config, workload.dtype)
        totals.append((own + (len(suite.arms) - 1) * resting + len(suite.arms) * IMPORT_BYTES, workload.label()))
    return max(totals, key=lambda total: total[0])


def check_fits(suite: Suite, config: TransformerConfig, *, available: int | None = None) -> int:
    """Return the estimated peak of a comparison in bytes; ValueError if it exceeds the available memory."""
    available = environment.available_memory_bytes() if available is None else available
    needed, where = needed_bytes(suite, config)
    if needed > available:
        raise ValueError(
            f"suite: {where} with {len(suite.arms)} arms needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} "
            "GiB are available; lower the batch or prompt_tokens, or name fewer arms"
        )
    return needed
