"""JAX arms: the Flax NNX and the Equinox model, ahead-of-time compiled, state donated."""

from __future__ import annotations

import functools
import importlib
import os
import time

import numpy as np

from jaxbench.bench.arms import contract, run_step
from jaxbench.measure import worker
from jaxbench.measure.records import Workload


class JaxArm(contract.Arm):
    """What both share: all but the model itself."""

    package = ""  # where transformer lives

    def start(self) -> str:
        """Import JAX and the model's modules, and make the backend."""
        import jax

        self.transformer = importlib.import_module(f"{self.package}.transformer")
        self.sample = importlib.import_module("jaxbench.sample")
        self.train = importlib.import_module("jaxbench.train")
        self.update = importlib.import_module("jaxbench.training.optimizer_step")
        self.model = self.generator = self.state = self.step = self.run_step = None
        found = jax.default_backend()
        wanted = {"cpu": "cpu", "gpu": "gpu", "tpu": "tpu"}[self.device]
        return "" if found == wanted else f"JAX runs on {found} here, not on {wanted}"

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Read the checkpoint and build the model; the train step's state too where asked."""
        import jax

        from jaxbench.pretrained import weights
        from jaxbench.training import precision

        self.dtype = dtype
        checkpoint = weights.load_checkpoint(self.checkpoint)
        if train is not None and train["form"] == "run":
            self.run_step = run_step.RunStep(self.package, checkpoint, dtype, train | {"num_layers": num_layers})
            return
        config, params = contract.shallow(checkpoint.config, checkpoint.params, num_layers)
        self.model = self.transformer.build(config, params, dtype=dtype)
        if train is None:
            self.generator = self.sample.Generator(self.model, eos_id=None, sampling=self.sample.SamplingParams())
        else:
            self.learning_rate, policy = train["learning_rate"], precision.uniform(dtype)
            self.state = self.update.init_state(self.model, params, contract.PLAIN_STEP, policy=policy)
            self.model = None
        jax.block_until_ready(jax.tree.leaves((self.model, self.state)))

    def prepare(self, workload: Workload) -> dict:
        """Compile the workload's programs ahead of time and read the compiler's own counts."""
        if self.run_step is not None:
            return self.run_step.prepare()
        if workload.kind == "train":
            return self._prepare_step(workload)
        start = time.perf_counter()
        programs = self.generator.compile(workload.batch, workload.prompt_tokens, max(workload.new_tokens, 1))
        seconds = time.perf_counter() - start
        program = programs.prefill if workload.kind == "prefill" else programs.decode
        return {"compile_s": seconds, **compiler_counts(program)}

    def measure(self, workload: Workload, inputs: list) -> dict:
        """Run one workload: host token ids in, host token ids out."""
        if workload.kind == "train":
            return self._run_step(inputs)
        return contract.generate(self.generator, inputs, workload, np.asarray)

    def warm(self, workload: Workload, inputs: list) -> dict:
        """Run the compiled programs once, a few tokens of decoding."""
        if workload.kind == "train":
            return self._run_step(inputs)
        return contract.generate(self.generator, inputs, workload, np.asarray, limit=contract.WARM_TOKENS)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Run the model on one row, without a cache."""
        row = np.asarray([tokens], np.int32)
        return np.asarray(self.model(row, np.arange(row.shape[1], dtype=np.int32)[None])[0, -1], np.float32)

    def unload(self) -> None:
        """Drop weights and programs."""
        import jax

        self.model = self.generator = self.state = self.step = self.run_step = None
        jax.clear_caches()

    def device_memory(self) -> int | None:
        """Return the allocator's peak, None on the CPU, whose allocator keeps no count."""
        import jax

        stats = jax.devices()[0].memory_stats() if self.device != "cpu" else None
        return None if stats is None else int(stats["peak_bytes_in_use"])

    def read_seconds(self, size: int, repeats: int) -> list[float]:
        """Sum a float32 array."""
        import jax
        import jax.numpy as jnp

        array = jnp.ones(size // 4, jnp.float32)
        total = jax.jit(jnp.sum)
        return worker.timed(lambda: total(array).block_until_ready(), repeats)["seconds"]

    def gemm_seconds(self, shape: tuple[int, int, int], dtype: str, repeats: int) -> list[float]:
        """Multiply two matrices, products of narrow types accumulated in float32."""
        import jax
        import jax.numpy as jnp

        m, k, n = shape
        left, right = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
        product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
        return worker.timed(lambda: product(left, right).block_until_ready(), repeats)["seconds"]

    def profile(self, workload: Workload, inputs: list, folder: str) -> str:
        """Write a trace that TensorBoard's profile plugin (xprof) opens."""
        import jax

        path = os.path.join(folder, f"{self.name}-{workload.label().replace(' ', '-')}")
        with jax.profiler.trace(path):
            self.measure(workload, inputs)
        return path

    def _batch(self, inputs: list):
        tokens, wanted, positions = contract.targets(inputs)
        return self.train.Batch(tokens, wanted, positions, np.ones(tokens.shape, bool))

    def _prepare_step(self, workload: Workload) -> dict:
        import jax

        rows = np.zeros((workload.batch, workload.prompt_tokens + 1), np.int32)
        start = time.perf_counter()
        how = {"learning_rate": self.learning_rate, "step_config": contract.PLAIN_STEP, "is_guarded": False}
        step = jax.jit(functools.partial(self.update.train_step, **how), donate_argnums=0)
        self.step = step.lower(self.state, self._batch(rows)).compile()
        return {"compile_s": time.perf_counter() - start, **compiler_counts(self.step)}

    def _run_step(self, inputs: list) -> dict:
        import jax

        if self.run_step is not None:
            return self.run_step.measure(inputs)
        batch = self._batch(inputs)
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, batch)
        value = float(metrics.loss)
        jax.block_until_ready(jax.tree.leaves(self.state))
        return {"step_s": time.perf_counter() - start, "loss": value}


class FlaxArm(JaxArm):
    """Flax NNX."""

    name, package = "flax", "jaxbench"
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "python")


class EquinoxArm(JaxArm):
    """Equinox."""

    name, package = "equinox", "jaxbench.eqx"
    packages = ("jax", "jaxlib", "equinox", "optax", "numpy", "python")


def compiler_counts(program) -> dict:
    """Return temp and argument bytes and FLOPs of a compiled program, as the compiler counts (a loop's body once)."""
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    counts = {"flops": float(cost["flops"])} if cost.get("flops", 0) > 0 else {}
    if memory is not None:
        counts |= {"temp_bytes": memory.temp_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes}
    return counts
