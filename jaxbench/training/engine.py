"""The training run's backend in JAX: state on devices, compiled step and evaluation.

Twin: torch_ref/training/engine.py.
The run (trainer.py) handles only numpy arrays and names. On a mesh, `parallel` decides the placement: the step's
mathematics (optimizer_step.py) stays the same, and only this module compiles it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench import functional, parameters, prng, train, transformer
from jaxbench.config import Compute, TransformerConfig
from jaxbench.extension import Extension
from jaxbench.measure import worker
from jaxbench.mesh import ParallelConfig
from jaxbench.native import products
from jaxbench.parallel import distributed, mesh_plan, offload
from jaxbench.training import observe, optimizer_step, precision, state_shapes
from jaxbench.training.intercept import intercepted, nnx_modules
from jaxbench.training.train_config import TrainConfig

GEMM_REPEATS = 4  # of the matrix product that measures the device's rate if no table lists it
EXACT = ("highest", "float32", "F32_F32_F32")  # precisions in which a GPU's products of float32 are of float32


class Engine:
    """One model in training."""

    def __init__(
        self,
        settings: TrainConfig,
        config: TransformerConfig,
        params: Mapping[str, np.ndarray],
        *,
        extension: Extension = Extension(),
    ):
        """Place the parameters of the decoder `config` and compile the step of a run.

        extension: what a workload adds to the decoder.

        Raises:
          ValueError: sizes, mesh, optimiser or rematerialisation do not fit each other; the message names the values.
        """
        parallel, place = settings.parallel, jax.default_backend()
        step_config = products.resolved(settings.step, is_on_mesh=parallel is not None, device=place)
        self.step_config, self.policy = step_config, precision.POLICIES[step_config.precision]
        offload.check(step_config.on_host(), jax.local_devices()[0])
        groups = 1
        if parallel is not None and settings.fused_projections:
            groups = mesh_plan.projection_groups(parallel, len(jax.devices()))
        compute = settings.compute(self.policy.compute, groups)
        self.dropout_key = prng.key_from_seed(settings.seed) if settings.has_dropout else None
        self.extension, self.plan, self.num_devices = extension, None, 1
        self.batch_size, self.rows = settings.batch_size, (0, settings.batch_size)
        shape = (settings.batch_size, settings.data.seq_len)
        if parallel is None and jax.process_count() > 1:
            raise ValueError(f"engine: {jax.process_count()} processes need parallel.mesh, got parallel={parallel}")
        if parallel is None:
            model = transformer.build(config, params, make_layer=extension.make_layer, **compute._asdict())
            self.state = optimizer_step.init_state(model, params, step_config)
            del model  # its values are not those that are trained
        else:
            self._place_on_mesh(config, compute, parallel, params, shape)
        step = functools.partial(optimizer_step.train_step, step_config=step_config)
        evaluate = functools.partial(optimizer_step.eval_step, graph=self.state.graph, step_config=step_config)
        if parallel is None:
            jitted = jax.jit(lambda state, batch, extras: step(state, batch, **extras), donate_argnums=0)
            self._eval = jax.jit(evaluate)
        else:
            jitted = mesh_plan.make_step(self.plan, self.state, step=step)
            self._eval = mesh_plan.make_evaluation(
                self.plan, evaluate, loss_fn=optimizer_step.held_out_loss, accumulation=step_config.accumulation
            )
        ids, mask = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, bool)
        started = time.perf_counter()
        self._is_masked = settings.data.document_mask
        packed = ids if self._is_masked else None
        self._step = jitted.lower(self.state, train.Batch(ids, ids, packed, mask, packed), self._extras(0.0)).compile()
        self.compile_seconds = time.perf_counter() - started
        self._watch = None
        if extension.watch is not None:
            self._watch = jax.jit(functools.partial(extension.watch, graph=self.state.graph, step_config=step_config))

    def _place_on_mesh(
        self, config: TransformerConfig, compute: Compute, parallel: ParallelConfig, params: Mapping[str, np.ndarray],
        shape: tuple[int, int],
    ) -> None:  # fmt: skip
        """Plan the mesh for a step's batch of rows and tokens, and make the state on it."""
        micro = {"batch": shape[0] // self.step_config.accumulation, "tokens": shape[1]}
        self.plan = mesh_plan.make_plan(config, parallel, **micro, extension=self.extension)
        mesh_plan.check_precision(self.plan, self.step_config.precision)
        init = state_shapes.initialiser(config, compute, self.step_config, extension=self.extension)
        host = jax.sharding.NamedSharding(self.plan.mesh, jax.sharding.PartitionSpec())
        shapes = state_shapes.abstract_state(config, compute, self.step_config, host=host, extension=self.extension)
        self.state, self.num_devices = mesh_plan.new_state(self.plan, init, params, shapes), self.plan.mesh.size
        self.rows = distributed.rows_of(self.plan.batch, shape)

    def _extras(self, learning_rate: float) -> dict[str, Any]:
        """Learning rate and dropout key of a step, on every device."""
        extras = {"learning_rate": jnp.asarray(learning_rate), "dropout_key": self.dropout_key}
        if self.plan is None:
            return extras
        everywhere = jax.sharding.NamedSharding(self.plan.mesh, jax.sharding.PartitionSpec())
        return jax.tree.map(lambda value: distributed.place(value, everywhere), extras)

    def step(self, batch: Any, learning_rate: float) -> optimizer_step.Metrics:
        """Start one step; its metrics arrive later (see `fetch`).

        batch holds this process's rows of the step: `rows` is the first of them and their number.
        """
        placed = self._batch(batch, self.rows[0])
        self.state, metrics = self._step(self.state, placed, self._extras(learning_rate))
        return metrics

    def fetch(self, metrics: optimizer_step.Metrics) -> optimizer_step.Metrics:
        """Wait for a step and return its metrics as Python numbers."""
        return optimizer_step.Metrics(*(np.asarray(value).item() for value in metrics))

    def evaluate(self, batch: Any) -> tuple[float, int]:
        """Return the sum of a whole batch's losses in nats, and its number of targets."""
        total, count = self._eval(self.state.params, self._batch(batch))
        return float(total), int(count)

    def watched(self, batch: Any) -> dict[str, float]:
        """Figures of what a workload's layers hold after a whole batch, by name; for a single process only."""
        if self._watch is None or jax.process_count() > 1:
            return {}
        return self.extension.scalars(jax.device_get(self._watch(self.state.params, self._batch(batch))))

    def arrays(self) -> dict[str, Any]:
        """Arrays of the whole training state by name, for a checkpoint."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.state)
        return {parameters.dotted(path): leaf for path, leaf in leaves}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load a checkpoint's state, onto whatever mesh this engine has; the state before it is used up."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(self.state)
        loaded = []
        for path, leaf in leaves:
            # A copy that JAX owns: the step donates its state.
            loaded.append(distributed.place(jnp.array(arrays[parameters.dotted(path)]), leaf.sharding))
            leaf.delete()  # two whole states may need more memory than a step
        self.state = jax.tree_util.tree_unflatten(structure, loaded)

    def params(self) -> dict[str, np.ndarray]:
        """Parameters by dotted name, in the policy's parameter type."""
        return {name: distributed.whole(value) for name, value in self.state.params.items()}

    def memory(self) -> dict[str, int]:
        """Device memory in bytes: `live` now, and `step`, the compiled step's total."""
        stats = jax.local_devices()[0].memory_stats() or {}
        live = stats.get("bytes_in_use") or sum(array.nbytes for array in jax.live_arrays())
        analysis = self._step.memory_analysis()
        needed = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
        needed += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        return {"live": int(live), "step": int(needed)}

    def device_kind(self) -> str:
        """Name of the device, such as cpu or NVIDIA H200."""
        return jax.devices()[0].device_kind

    def matmul_rate(self) -> float:
        """Measure the rate of a square matrix product in the compute type, FLOP/s."""
        size, product = observe.gemm_size(jax.default_backend()), jax.jit(jnp.matmul)
        # Not ones: their products draw less power, so that a GPU clocks higher.
        x = jnp.sin(jnp.arange(size**2, dtype=jnp.float32)).reshape(size, size).astype(self.policy.compute)
        times = worker.timed(lambda: product(x, x).block_until_ready(), GEMM_REPEATS)
        return 2 * size**3 / min(times["seconds"])

    def product_type(self) -> str:
        """Type of the operands of products: the compute type, but tf32 where a GPU rounds float32 to that."""
        is_exact = jax.config.jax_default_matmul_precision in EXACT
        is_rounded = self.policy.compute == "float32" and jax.default_backend() == "gpu" and not is_exact
        return "tf32" if is_rounded else self.policy.compute

    def diagnose(self, batch: Any, step: int) -> str:
        """Name the first non-finite value of a step: a parameter, a module's output, or a gradient.

        Modules are watched in the order in which they finish.
        """
        params = self.state.params if jax.process_count() == 1 else self.params()  # each process checks all of them
        broken = [name for name, value in params.items() if not bool(jnp.isfinite(value).all())]
        if broken:
            return f"parameter {broken[0]} is not finite (and {len(broken) - 1} more)"
        narrow = optimizer_step.cast_to_compute(params, self.policy)
        found: list[str] = []

        def watch(name: str, call: Any, args: tuple, kwargs: dict) -> Any:
            result = call(*args, **kwargs)
            value = result[0] if isinstance(result, tuple) else result
            if not found and not bool(jnp.isfinite(value).all()):
                found.append(f"the output of module {name} is the first that is not finite")
            return result

        model, count = parameters.merge(self.state.graph, narrow), self.step_config.accumulation
        model.remat_group, model.scan_layers = 0, False
        for k in range(count):
            arrays = train.Batch(*batch) if self._is_masked else self._batch(batch)
            micro = train.Batch(*(None if x is None else jnp.asarray(x[k::count]) for x in arrays))
            key = self.dropout_key
            dropout = None if key is None else functional.DropoutStream(key, jnp.int32(step * count + k))
            with intercepted(nnx_modules(model, root="model"), watch):
                loss = train.loss_fn(model, micro, dropout=dropout)
            if not found and not bool(jnp.isfinite(loss)):
                found.append("every module is finite, the loss over model's logits is not")
        return found[0] if found else "every module's output is finite: a gradient overflowed in the backward pass"

    def start_profile(self, folder: str) -> None:
        """Begin a trace, for TensorBoard's profile page."""
        jax.profiler.start_trace(folder)

    def stop_profile(self) -> None:
        """End the trace and write it."""
        jax.profiler.stop_trace()

    def _batch(self, batch: Any, first: int = 0) -> train.Batch:
        """Place a batch on the devices; it holds this process's rows, from row `first` of the step's on."""
        arrays = train.Batch(*batch)
        if not self._is_masked:
            return arrays._replace(positions=None, segments=None)
        if self.plan is None:
            return arrays
        sharding, rows = self.plan.batch, self.batch_size
        return jax.tree.map(lambda x: distributed.place_rows(x, sharding, first=first, rows=rows), arrays)
