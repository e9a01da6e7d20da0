"""JAX arms: the Flax NNX and the Equinox model, compiled ahead of time, with donated state."""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
import time
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxbench import outputs, prompts
from jaxbench.bench.arms import contract, twin_arm
from jaxbench.measure.records import Workload


class JaxArm(twin_arm.TwinArm):
    """Base of the Flax and Equinox arms: everything but the model itself."""

    functions = "jaxbench"

    def start(self) -> str:
        """Import JAX and the model's modules, and initialise the backend."""
        import jax

        self._import()
        self.jax, backend, self.peak_before = jax, jax.default_backend(), 0
        self.cache_hits = 0
        jax.monitoring.register_event_listener(self._count_cache_hits)
        if self.device != "cpu":  # there JAX computes float32 products in TF32 (TPU: bfloat16), PyTorch does not
            jax.config.update("jax_default_matmul_precision", "highest")
        return "" if backend == self.device else f"JAX runs on {backend} here, not on {self.device}"

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Load as every twin does; a training state holds the model's arrays itself, so drop the model."""
        super().load(dtype, num_layers=num_layers, train=train)
        if train is not None:
            self.model = None

    def _build(self, config: Any, params: dict[str, np.ndarray], *, is_trained: bool) -> Any:
        """Build the model, with the fused attention kernel where the platform has one for the type."""
        is_fused = self.device == "gpu" and self.dtype != "float32" and not is_trained
        is_fused = is_fused and config.attention_softcap is None
        return self.transformer.build(config, params, dtype=self.dtype, implementation="fused" if is_fused else "dense")

    def prepare(self, workload: Workload) -> dict:
        """Compile the workload's programs ahead of time and read the compiler's own counts.

        Programs that an earlier process of the run compiled are loaded instead, without counts, which it recorded.
        """
        if self.run_settings is not None:
            return self._make_engine()
        start = time.perf_counter()
        if workload.kind == "train":
            batch = self._batch(np.zeros((workload.batch, workload.prompt_tokens + 1), np.int32))
            program = self.step = self.jax.jit(self.step, donate_argnums=0).lower(self.state, batch).compile()
            return {"compile_s": time.perf_counter() - start, **compiler_counts(program)}
        path = pathlib.Path(self.programs) / f"{self.name} {workload.label()}.pickle"
        size = prompts.bucket(*sizes(workload))
        known = self.generator.programs.get(size, prompts.Programs(None, None))
        if self.programs and path.exists():
            pairs = zip(read_programs(path), known, strict=True)
            self.generator.programs[size] = prompts.Programs(*(loaded or other for loaded, other in pairs))
            return {"compile_s": time.perf_counter() - start}
        hits = self.cache_hits
        programs = self.generator.compile(*sizes(workload))
        seconds = time.perf_counter() - start
        # A program of an earlier workload is in that workload's file. One from JAX's compile cache (a resumed run)
        # cannot be written: loaded again, it lacks functions (jaxlib 0.10.2).
        if self.programs and self.cache_hits == hits:
            fresh = prompts.Programs(*(None if old else new for new, old in zip(programs, known)))
            try:
                write_programs(path, fresh)
            except Exception as error:  # noqa: BLE001 - a platform that cannot serialise programs compiles them again
                if self.device == "cpu":
                    raise
                print(f"{path.name}: not kept, {error}", file=sys.stderr)
        program = programs.prefill if workload.kind == "prefill" else programs.decode
        return {"compile_s": seconds, **compiler_counts(program)}

    def measure(self, workload: Workload, inputs: list, *, limit: int | None = None) -> dict:
        """Run the workload once, from host token ids to host token ids."""
        if workload.kind == "train":
            return self._step(inputs)
        return contract.generate(self.generator, inputs, workload, np.asarray, limit=limit)

    def token_seconds(self, workload: Workload, inputs: list) -> list[float]:
        """Seconds of each token after the first."""
        return contract.token_seconds(self.generator, inputs, workload, np.asarray)

    def logits(self, tokens: list[int]) -> Float[np.ndarray, " V"]:
        """Logits of the token after one row, without a cache."""
        row = np.asarray([tokens], np.int32)
        return np.asarray(self.model(row, np.arange(row.shape[1], dtype=np.int32)[None])[0, -1], np.float32)

    def unload(self) -> None:
        """Drop weights and programs."""
        self._drop()
        self.jax.clear_caches()

    def _count_cache_hits(self, event: str, **_: object) -> None:
        self.cache_hits += event == "/jax/compilation_cache/cache_hits"

    def synchronize(self) -> None:
        """Wait for the arrays that are still being computed."""
        self.jax.block_until_ready(self.jax.tree.leaves((self.model, self.state)))

    def device_memory(self) -> int | None:
        """Return the allocator's peak in bytes if it rose since reset_device_memory, else None.

        JAX cannot reset the peak, so it is unknown for a stage that needs less than an earlier one of its process. Also
        None on the CPU, whose allocator keeps no count.
        """
        peak = self._peak()
        return peak if peak > self.peak_before else None

    def reset_device_memory(self) -> None:
        """Note the peak so far."""
        self.peak_before = self._peak()

    def _peak(self) -> int:
        """Return the allocator's peak since the process began, in bytes; 0 if it keeps no count."""
        stats = self.jax.devices()[0].memory_stats() if self.device != "cpu" else None
        return 0 if stats is None else int(stats["peak_bytes_in_use"])

    def read_seconds(self, size: int, repeats: int) -> list[float]:
        """Times of summing a float32 array of `size` bytes."""
        jnp = self.jax.numpy
        array, total = jnp.ones(size // 4, jnp.float32), self.jax.jit(jnp.sum)
        return contract.call_seconds(lambda: total(array), self.jax.block_until_ready, repeats, device=self.device)

    def gemm_seconds(self, shape: tuple[int, int, int], dtype: str, repeats: int) -> list[float]:
        """Times of one matrix product; products of narrow types are accumulated in float32."""
        jnp, (m, k, n) = self.jax.numpy, shape
        # Random operands: products of ones draw less power, so that a GPU clocks higher.
        keys = self.jax.random.split(self.jax.random.key(0))
        left, right = (self.jax.random.normal(key, size).astype(dtype) for key, size in zip(keys, ((m, k), (k, n))))
        product = self.jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
        return contract.call_seconds(
            lambda: product(left, right), self.jax.block_until_ready, repeats, device=self.device
        )

    def profile(self, workload: Workload, inputs: list, folder: str) -> str:
        """Write a trace that TensorBoard's profile plugin (xprof) opens."""
        path = os.path.join(folder, f"{self.name}-{workload.label().replace(' ', '-')}")
        with self.jax.profiler.trace(path):
            self.measure(workload, inputs)
        return path

    def _batch(self, inputs: list):
        tokens, targets, positions = contract.targets(inputs)
        return self.train.Batch(tokens, targets, positions, np.ones(tokens.shape, bool))


class FlaxArm(JaxArm):
    """Flax NNX."""

    name, package, has_kernels = "flax", "jaxbench", True
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "python")


class EquinoxArm(JaxArm):
    """Equinox."""

    name, package = "equinox", "jaxbench.eqx"
    packages = ("jax", "jaxlib", "equinox", "optax", "numpy", "python")


def sizes(workload: Workload) -> tuple[int, int, int]:
    """Return the rows, prompt tokens and new tokens that a workload's programs are compiled for."""
    return workload.batch, workload.prompt_tokens, max(workload.new_tokens, 1)


def read_programs(path: pathlib.Path) -> prompts.Programs:
    """Load programs that another process of the same code on the same machine compiled."""
    from jax.experimental.serialize_executable import deserialize_and_load

    return prompts.Programs(*(each and deserialize_and_load(*each) for each in pickle.loads(path.read_bytes())))


def write_programs(path: pathlib.Path, programs: prompts.Programs) -> None:
    """Write programs for later processes; None, for one that was not compiled, is kept as None."""
    from jax.experimental.serialize_executable import serialize

    with outputs.whole(path) as temporary:
        temporary.write_bytes(pickle.dumps([each and serialize(each) for each in programs]))


def compiler_counts(program) -> dict:
    """Return temporary and argument bytes and FLOPs of a program, as the compiler counts them (a loop's body once)."""
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    counts = {"flops": float(cost["flops"])} if cost.get("flops", 0) > 0 else {}
    if memory is not None:
        counts |= {"temp_bytes": memory.temp_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes}
    return counts
