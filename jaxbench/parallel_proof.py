"""Proofs that a step over a mesh computes what one device computes: the cases, and how one is proven.

A case trains a tiny decoder for three steps on a mesh of simulated devices and compares losses, gradients, optimiser
state and parameters with the unsharded program, in float64. PAIRWISE is what continuous integration proves: every pair
of settings occurs in one of its cases. `every_case` is the full product (experiments/parallel.py --all).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxbench import parallel, philox, train, transformer
from jaxbench.config import TransformerConfig
from jaxbench.memory import decoder_config
from jaxbench.memory.bank_config import BankConfig
from jaxbench.memory.config import NeuralMemoryConfig
from jaxbench.memory.decoder_config import DecoderMemory, with_memory
from jaxbench.mesh import MeshConfig, ParallelConfig
from jaxbench.parity import distance

BATCH, TOKENS, STEPS, MAX_DEVICES = 32, 8, 3, 8
OPTIMIZER = train.AdamW(learning_rate=0.01, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # half the compile time; the partitioning is the same
LLAMA = TransformerConfig(
    vocab_size=64, d_model=16, d_ff=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=4, max_seq_len=16
)
OTHER = {"num_kv_heads": 4, "norm": "layernorm", "activation": "gelu", "position": "learned", "use_bias": True}
ATTENTION = {"d_model": 16, "num_heads": 4, "head_dim": 4}
NEURAL = NeuralMemoryConfig(**ATTENTION, chunk_size=4)
BANK = BankConfig(**ATTENTION, block_size=2, memory_slots=2, ratio=2)
MEMORY = {  # in one layer of two; the batch's rows hold two documents
    "mac": DecoderMemory(kind="mac", layers=(1,), window=4, num_persistent=2, max_documents=2, neural=NEURAL),
    "bank": DecoderMemory(kind="bank", layers=(1,), window=4, max_documents=2, bank=BANK),
}
FAMILIES = {"llama": LLAMA, "gpt2": LLAMA.model_copy(update=OTHER | {"tie_embeddings": False})}
FAMILIES |= {name: with_memory(LLAMA.model_copy(update={"num_layers": 2}), each) for name, each in MEMORY.items()}
# What the rows axis does: devices that split the batch, and the ZeRO stage.
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
    "rounds": (1, 2, 4),  # micro-batches a stage
    "schedule": ("gpipe", "1f1b"),
    "model": (1, 2),
    "rows": tuple(ROWS),
}


class Case(NamedTuple):
    """One mesh, one way to use it, one model."""

    id: str
    family: str
    parallel: ParallelConfig

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return int(np.prod(list(self.parallel.mesh.model_dump().values())))


def case(family: str, stage: int, rounds: int, schedule: str, model: int, rows: str) -> Case:
    """Return the case of one value of each factor."""
    sizes = {"data": 1, "stage": stage, "model": model} | ROWS[rows]
    zero = sizes.pop("zero", 3)
    how = ParallelConfig(mesh=MeshConfig(**sizes), zero=zero, schedule=schedule, micro_batches=stage * rounds)
    return Case(f"{family}-stage{stage}-micro{stage * rounds}-{schedule}-model{model}-{rows}", family, how)


def form(name: str, family: str = "llama", *, zero: int = 3, **settings: Any) -> Case:
    """Return a case without a pipeline; settings are mesh sizes and fields of ParallelConfig."""
    sizes = {axis: settings.pop(axis) for axis in list(settings) if axis in MeshConfig.model_fields}
    return Case(name, family, ParallelConfig(mesh=MeshConfig(**({"data": 1} | sizes)), zero=zero, **settings))


FORMS = (
    form("zero0", fsdp=8, zero=0),
    form("sequence-parallel", model=2, sequence=2, fsdp=2, sequence_parallel=True),
    form("ring", sequence=4, data=2),
    form("gathered-sequence", "gpt2", sequence=4, model=2, sequence_attention="gathered"),
    form("heads-replicated", "gpt2", model=8, heads="replicated"),
    form("2d", "gpt2", model_x=2, model_y=2),
    form("2d-long", model_x=4, model_y=2),
    form("2.5d", model_x=2, model_y=2, data=2),
    form("3d", model_x=2, model_y=2, fsdp=2),
)
MEMORY_FORMS = (  # 15 to 25 CPU seconds each, most of it compiling
    form("mac", "mac", data=2, fsdp=2, model=2),
    form("bank", "bank", fsdp=2, sequence=2, model=2),
)
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
    """Yield the full product of the factors, as far as it fits 8 devices, and the forms without a pipeline."""
    yield from FORMS
    for values in itertools.product(*FACTORS.values()):
        listed = case(*values)
        if listed.num_devices <= MAX_DEVICES:
            yield listed


def find(name: str) -> Case:
    """Return a case by its id.

    Raises:
      ValueError: there is none.
    """
    cases = {one.id: one for one in (*every_case(), *MEMORY_FORMS)}
    if name not in cases:
        raise ValueError(
            f"parallel: no case {name!r}; the forms are {', '.join(form.id for form in (*FORMS, *MEMORY_FORMS))}"
        )
    return cases[name]


def batch_of(step: int, config: TransformerConfig) -> train.Batch:
    """Packed batch of a step, BATCH rows of TOKENS: two documents a row, some targets that do not count."""
    words = philox.words(step, step=0, site="parallel_proof", rows=np.arange(BATCH), num_elements=2 * TOKENS + 1)
    ids = (words[:, : TOKENS + 1] % config.vocab_size).astype(np.int32)
    ends = 2 + np.arange(BATCH, dtype=np.int32)[:, None] % (TOKENS - 3)  # where the first document ends
    index = np.arange(TOKENS, dtype=np.int32)[None, :]
    positions, segments = np.where(index < ends, index, index - ends), 1 + (index >= ends).astype(np.int32)
    return train.Batch(ids[:, :-1], ids[:, 1:], positions, words[:, TOKENS + 1 :] % 5 > 0, segments)


def initial_state(family: str, dtype: str) -> train.TrainState:
    """Return the state before the first step; every parameter is random."""
    config = FAMILIES[family]
    model = transformer.build(config, decoder_config.initial_params(config, 0, distinct=True), dtype=dtype)
    return train.init_state(model, OPTIMIZER)


Outcome = dict[str, dict[str, np.ndarray]]  # loss, gradients, params, first_moment, second_moment: by name


def run_case(one: Case, dtype: str) -> Outcome:
    """Return what three steps over the case's mesh give; see `_train`."""
    config, devices = FAMILIES[one.family], jax.devices()[: one.num_devices]
    plan = parallel.make_plan(config, one.parallel, batch=BATCH, tokens=TOKENS, devices=devices)
    state = parallel.place_state(plan, initial_state(one.family, dtype))
    lowered = parallel.make_step(plan, state).lower(state, parallel.place_batch(plan, batch_of(0, config)), {})
    step = lowered.compile(compiler_options=FAST_COMPILE)
    return _train(state, lambda state, batch: step(state, parallel.place_batch(plan, batch), {}), config)


@functools.lru_cache(maxsize=8)
def run_unsharded(family: str, dtype: str) -> Outcome:
    """Return what the same steps give on one device."""
    return _train(initial_state(family, dtype), jax.jit(train.train_step), FAMILIES[family])


def _train(state: train.TrainState, step: Any, config: TransformerConfig) -> Outcome:
    """Return losses, every step's gradients, and parameters and moments after the last, each by name."""
    losses, gradients = {}, {}
    before: Mapping[str, np.ndarray] = {}
    for number in range(STEPS):
        state, loss = step(state, batch_of(number, config))
        losses[f"step {number}"] = np.asarray(loss)
        arrays = train.state_arrays(state)
        for name, moment in arrays["first_moment"].items():  # b1 * the one before + (1 - b1) * gradient
            kept = OPTIMIZER.b1 * before[name].astype(np.float64) if before else 0.0
            gradients[f"step {number}: {name}"] = (moment.astype(np.float64) - kept) / (1 - OPTIMIZER.b1)
        before = arrays["first_moment"]
    return {"loss": losses, "gradients": gradients, **arrays}


def prove(one: Case) -> dict[str, distance.Comparison]:
    """Return the distances of losses, gradients, parameters and moments in float64; call with 64-bit types on."""
    found, wanted = run_case(one, "float64"), run_unsharded(one.family, "float64")
    return {kind: distance.compare(values, wanted[kind], kind=kind) for kind, values in found.items()}
