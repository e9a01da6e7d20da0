"""Prove that a training step on a mesh computes what one device computes: the cases, and the proof of one.

A case trains a tiny decoder for three steps on a mesh of simulated devices and compares losses, gradients, optimiser
state and parameters with the unsharded program, in float64. Continuous integration proves PAIRWISE, in which every pair
of settings occurs, and MORE, settings beside them. `every_case` is the full product (experiments/parallel.py --all).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxbench import initial, philox, train, transformer
from jaxbench.config import TransformerConfig
from jaxbench.extension import Extension
from jaxbench.mesh import MeshConfig, ParallelConfig
from jaxbench.parallel import mesh_plan
from jaxbench.parity import distance
from jaxbench.training import optimizer_step, precision
from jaxbench.training.step_config import OptimizerConfig, RematConfig, StepConfig

BATCH, TOKENS, STEPS, MAX_DEVICES = 32, 8, 3, 8
ADAMW = OptimizerConfig(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, decay="all")
STEP = StepConfig(clip_norm=None, optimizer=ADAMW)
train_step = functools.partial(optimizer_step.train_step, learning_rate=0.01, step_config=STEP, is_guarded=False)
# A third of the compile time, and the partitioning is the same; from jaxlib 0.11 on there are fusion emitters alone.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
FAST_COMPILE |= {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
LLAMA = TransformerConfig(
    vocab_size=64, d_model=16, d_ff=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=4, max_seq_len=16
)
OTHER = {"num_kv_heads": 4, "norm": "layernorm", "activation": "gelu", "position": "learned", "use_bias": True}
FAMILIES = {"llama": LLAMA, "gpt2": LLAMA.model_copy(update=OTHER | {"tie_embeddings": False})}
FAMILIES |= {"qwen3": LLAMA.model_copy(update={"qk_norm": True, "head_dim": 8})}
GEMMA = {"activation": "geglu", "embedding_scale": 4.0, "post_norms": True, "query_pre_attn_scalar": 6.0}
FAMILIES |= {"gemma": LLAMA.model_copy(update=GEMMA | {"qkv_bias": True})}  # what pipelines support, and Qwen2's
CAPPED_SCORES = {"attention_softcap": 0.5, "logit_softcap": 3.0, "sliding_window": 4, "global_every": 2}
FAMILIES |= {"gemma2": LLAMA.model_copy(update=GEMMA | CAPPED_SCORES)}
# Values of the rows factor: devices that split the batch, and the ZeRO stage.
ROWS = {
    "one": {},
    "data": {"data": 2},
    "zero1": {"fsdp": 2, "zero": 1},
    "zero2": {"fsdp": 2, "zero": 2},
    "zero3": {"fsdp": 2, "zero": 3},
}
FACTORS: dict[str, tuple] = {
    "family": ("llama", "gpt2"),
    "stage": (1, 2, 4),
    "rounds": (1, 2, 4),  # micro-batches per stage
    "schedule": ("gpipe", "1f1b"),
    "model": (1, 2),
    "rows": tuple(ROWS),
}


class Case(NamedTuple):
    """One mesh, one parallelisation, one model."""

    id: str
    model: TransformerConfig
    parallel: ParallelConfig
    extension: Extension = Extension()  # what a workload adds to the model
    remat: RematConfig = RematConfig()  # of the step on the mesh; the unsharded one keeps every activation

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return int(np.prod(list(self.parallel.mesh.model_dump().values())))


def case(family: str, stage: int, rounds: int, schedule: str, model: int, rows: str) -> Case:
    """Make the case with one value of each of FACTORS."""
    sizes = {"data": 1, "stage": stage, "model": model} | ROWS[rows]
    zero = sizes.pop("zero", 3)
    parallel = ParallelConfig(mesh=MeshConfig(**sizes), zero=zero, schedule=schedule, micro_batches=stage * rounds)
    return Case(
        f"{family}-stage{stage}-micro{stage * rounds}-{schedule}-model{model}-{rows}", FAMILIES[family], parallel
    )


def form(name: str, decoder: TransformerConfig = LLAMA, *, zero: int = 3, **settings: Any) -> Case:
    """Make a case of any mesh; settings are its sizes and fields of ParallelConfig."""
    sizes = {axis: settings.pop(axis) for axis in list(settings) if axis in MeshConfig.model_fields}
    return Case(name, decoder, ParallelConfig(mesh=MeshConfig(**({"data": 1} | sizes)), zero=zero, **settings))


FORMS = (
    form("zero0", fsdp=8, zero=0),
    form("sequence-parallel", model=2, sequence=2, fsdp=2, sequence_parallel=True),
    form("ring", FAMILIES["qwen3"], sequence=4, data=2),
    form("gathered-sequence", FAMILIES["gpt2"], sequence=4, model=2, sequence_attention="gathered"),
    form("heads-replicated", FAMILIES["gpt2"], model=8, heads="replicated"),
    form("2d", FAMILIES["gpt2"], model_x=2, model_y=2),
    form("2d-long", model_x=4, model_y=2),
    form("2.5d", model_x=2, model_y=2, data=2),
    form("3d", FAMILIES["qwen3"], model_x=2, model_y=2, fsdp=2),
)
# Pipelines that split heads over `model`, where every head adds to the gradient of the shared scales; norms after the
# sum over `model`.
SHARED_SCALES = (case("qwen3", 2, 1, "1f1b", 2, "zero1"), case("gemma", 2, 1, "1f1b", 2, "zero1"))
# Pipelines whose rows are split too: with heads over `model`; with learned positions, blocks recomputed; in one stage,
# with a window and every head on every device.
WINDOWED = LLAMA.model_copy(update={"sliding_window": 3})
LONG = {"sequence": 2, "sequence_attention": "gathered"}
LONG_ROWS = (
    form("pipeline-sequence", FAMILIES["qwen3"], stage=2, model=2, micro_batches=4, **LONG),
    form(
        "pipeline-sequence-again", FAMILIES["gpt2"], stage=2, fsdp=2, micro_batches=2, schedule="gpipe", **LONG
    )._replace(remat=RematConfig(policy="block")),
    form("rounds-sequence", WINDOWED, data=2, model=2, heads="replicated", micro_batches=2, zero=1, **LONG),
)
# Pipelines whose stages recompute their blocks: one by one, two together with shared scales, and all but one value.
REMATERIALISED = (
    case("llama", 2, 2, "1f1b", 2, "data")._replace(id="remat-block", remat=RematConfig(policy="block")),
    case("qwen3", 2, 1, "1f1b", 2, "zero1")._replace(id="remat-group", remat=RematConfig(policy="group", group=2)),
    case("gpt2", 1, 2, "gpipe", 1, "zero3")._replace(
        id="remat-names", remat=RematConfig(policy="names", names=("attention",))
    ),
)
# Capped scores, over whole rows and over a ring.
CAPPED = (
    form("capped", FAMILIES["gemma2"], fsdp=2, model=2),
    form("capped-ring", FAMILIES["gemma2"], data=2, sequence=2),
)
MORE = (*SHARED_SCALES, *LONG_ROWS, *REMATERIALISED, *CAPPED)
PAIRWISE = FORMS + tuple(
    case(*values)
    for values in (
        ("llama", 1, 1, "gpipe", 1, "zero3"),
        ("llama", 1, 2, "1f1b", 2, "one"),
        ("llama", 1, 2, "gpipe", 2, "zero1"),
        ("gpt2", 1, 2, "1f1b", 1, "zero2"),
        ("gpt2", 1, 4, "gpipe", 2, "data"),
        ("gpt2", 2, 1, "1f1b", 2, "zero1"),
        ("llama", 2, 1, "gpipe", 2, "zero2"),
        ("llama", 2, 2, "1f1b", 2, "data"),
        ("llama", 2, 4, "gpipe", 1, "one"),
        ("gpt2", 2, 4, "1f1b", 2, "zero3"),
        ("llama", 4, 1, "gpipe", 1, "data"),
        ("gpt2", 4, 1, "1f1b", 2, "one"),
        ("gpt2", 4, 2, "gpipe", 1, "zero3"),
        ("gpt2", 4, 4, "1f1b", 1, "zero1"),
        ("llama", 4, 4, "1f1b", 1, "zero2"),
    )
)


def every_case() -> Iterator[Case]:
    """Yield the full product of the factors that fits 8 devices, the forms without a pipeline, and MORE."""
    yield from (*FORMS, *MORE)
    for values in itertools.product(*FACTORS.values()):
        listed = case(*values)
        if listed.num_devices <= MAX_DEVICES:
            yield listed


def find(name: str, *more: Case) -> Case:
    """Return the case of an id, from those here and `more`, the forms of workloads.

    Raises:
      ValueError: there is none.
    """
    cases = {listed.id: listed for listed in (*every_case(), *more)}
    if name not in cases:
        named = ", ".join(form.id for form in (*FORMS, *MORE, *more))
        raise ValueError(f"parallel: no case {name!r}; the forms are {named}; others like {PAIRWISE[-1].id}")
    return cases[name]


def batch_of(step: int, config: TransformerConfig) -> train.Batch:
    """Make a step's packed batch, BATCH rows of TOKENS: two documents per row, some masked targets."""
    words = philox.words(step, step=0, site="parallel_proof", rows=np.arange(BATCH), num_elements=2 * TOKENS + 1)
    ids = (words[:, : TOKENS + 1] % config.vocab_size).astype(np.int32)
    ends = 2 + np.arange(BATCH, dtype=np.int32)[:, None] % (TOKENS - 3)  # where the first document ends
    index = np.arange(TOKENS, dtype=np.int32)[None, :]
    positions, segments = np.where(index < ends, index, index - ends), 1 + (index >= ends).astype(np.int32)
    return train.Batch(ids[:, :-1], ids[:, 1:], positions, words[:, TOKENS + 1 :] % 5 > 0, segments)


def initial_state(
    config: TransformerConfig, dtype: str, extension: Extension = Extension(), remat: RematConfig = RematConfig()
) -> optimizer_step.TrainState:
    """State before the first step; every parameter is random."""
    params = initial.initial_params(config, 0, distinct=True)
    model = transformer.build(config, params, dtype=dtype, make_layer=extension.make_layer)
    step_config = STEP.model_copy(update={"remat": remat})
    return optimizer_step.init_state(model, params, step_config, policy=precision.uniform(dtype))


Outcome = dict[str, dict[str, np.ndarray]]  # loss, gradients, params, first_moment, second_moment: by name


def run_case(proved: Case, dtype: str) -> Outcome:
    """Losses, gradients, parameters and moments of STEPS steps over the case's mesh."""
    config, devices = proved.model, jax.devices()[: proved.num_devices]
    plan = mesh_plan.make_plan(
        config, proved.parallel, batch=BATCH, tokens=TOKENS, devices=devices, extension=proved.extension
    )
    state = mesh_plan.place_state(plan, initial_state(config, dtype, proved.extension, proved.remat))
    jitted = mesh_plan.make_step(plan, state, step=train_step)
    lowered = jitted.lower(state, mesh_plan.place_batch(plan, batch_of(0, config)), {})
    step = lowered.compile(compiler_options=FAST_COMPILE)
    return _train(state, lambda state, batch: step(state, mesh_plan.place_batch(plan, batch), {}), config)


@functools.lru_cache(maxsize=8)
def run_unsharded(config: TransformerConfig, dtype: str, extension: Extension = Extension()) -> Outcome:
    """Losses, gradients, parameters and moments of the same steps on one device."""
    return _train(initial_state(config, dtype, extension), jax.jit(train_step), config)


def _train(state: optimizer_step.TrainState, step: Any, config: TransformerConfig) -> Outcome:
    """Losses and gradients of every step, and parameters and moments after the last, each by name."""
    losses, gradients = {}, {}
    before: Mapping[str, np.ndarray] = {}
    for i in range(STEPS):
        state, metrics = step(state, batch_of(i, config))
        losses[f"step {i}"] = np.asarray(metrics.loss)
        arrays = optimizer_step.state_arrays(state)
        for name, moment in arrays["first_moment"].items():  # b1 * the one before + (1 - b1) * gradient
            kept = ADAMW.b1 * before[name].astype(np.float64) if before else 0.0
            gradients[f"step {i}: {name}"] = (moment.astype(np.float64) - kept) / (1 - ADAMW.b1)
        before = arrays["first_moment"]
    return {"loss": losses, "gradients": gradients, **arrays}


def prove(proved: Case) -> dict[str, distance.Comparison]:
    """Compute distances between mesh and one device of losses, gradients, parameters and moments, by kind, in float64.

    Call with JAX's 64-bit types enabled.
    """
    sharded, unsharded = run_case(proved, "float64"), run_unsharded(proved.model, "float64", proved.extension)
    return {kind: distance.compare(values, unsharded[kind], kind=kind) for kind, values in sharded.items()}
