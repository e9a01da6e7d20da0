"""Stability of deep neural memories over a long training run: do loss, gradient and weights stay finite?

A language model of bytes, embedding + memory + tied head, is trained with AdamW and no clipping of the outer gradient.
Every step's loss, gradient norm and largest memory weight are recorded.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jaxtyping import Float, Int
from pydantic import Field

from jaxbench import outputs
from jaxbench.config import Base
from jaxbench.measure import environment
from jaxbench.memory import config, neural
from jaxbench.memory.study.fields import Length, Seed, Several
from jaxbench.text import packing

BYTES = 256


class Stability(Base):
    """Settings of the training runs: configs/memory/stability.yaml."""

    memory: config.NeuralMemoryConfig
    depths: Several[Annotated[int, Field(ge=1, le=4)]] = (2, 4)  # layers of the memory's network, one run each
    steps: int = Field(default=2000, ge=1)
    length: Length = 1024  # tokens per row
    batch: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)  # of AdamW, constant
    seed: Seed = 0


def run(settings: Stability, workdir: str | Path) -> dict[str, Any]:
    """Train once for each depth, write summary.json, and return it.

    Raises:
      ValueError: the text is not longer than a row.
    """
    size = len(_text())
    if settings.length >= size:
        raise ValueError(f"stability: length={settings.length} must be below the {size} bytes of the default text")
    Path(workdir).mkdir(parents=True, exist_ok=True)
    rows = [train(settings, depth) for depth in settings.depths]
    about = environment.describe(threads=environment.usable_cores())
    summary = {"about": about, "settings": settings.model_dump(mode="json"), "rows": rows}
    outputs.set_aside(Path(workdir) / "summary.json")
    outputs.write_json(Path(workdir) / "summary.json", summary)
    return summary


def train(settings: Stability, depth: int) -> dict[str, Any]:
    """Train one memory; return losses in nats per byte, largest gradient norm and weight, whether all are finite."""
    shape = settings.memory.model_copy(update={"depth": depth})
    model = neural.build(shape, config.initial_params(shape, settings.seed))
    graph, params = nnx.split(model)
    random = np.random.default_rng(settings.seed)
    embedding = jnp.asarray(random.standard_normal((BYTES, shape.d_model)) * 0.5, jnp.float32)
    optimizer = optax.adamw(settings.learning_rate)
    learned = (params, embedding)

    def loss_of(learned: tuple, tokens: Int[Array, "B S"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        params, embedding = learned
        x = embedding[tokens[:, :-1]]
        memory_out, state = nnx.merge(graph, params)(_rms_norm(x))
        logits = jnp.einsum("BTD,VD->BTV", _rms_norm(x + memory_out), embedding)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses), jnp.max(jnp.stack([jnp.max(jnp.abs(kernel)) for kernel in state.weights.kernels]))

    @jax.jit
    def step(learned: tuple, moments: Any, tokens: Int[Array, "B S"]) -> tuple[tuple, Any, Float[Array, " 3"]]:
        (loss, weight), grads = jax.value_and_grad(loss_of, has_aux=True)(learned, tokens)
        updates, moments = optimizer.update(grads, moments, learned)
        return optax.apply_updates(learned, updates), moments, jnp.stack([loss, optax.tree.norm(grads), weight])

    text = _text()
    moments, curves, start = optimizer.init(learned), [], time.perf_counter()
    for index in range(settings.steps):
        places = random.integers(len(text) - settings.length, size=settings.batch)
        tokens = np.stack([text[place : place + settings.length + 1] for place in places])
        learned, moments, metrics = step(learned, moments, tokens)
        curves.append(metrics)
        if (index + 1) % 100 == 0:
            progress = f"    depth {depth}, step {index + 1} of {settings.steps}: loss {float(metrics[0]):.3f}"
            print(progress, file=sys.stderr, flush=True)
    return {"depth": depth, "steps": settings.steps, "seconds": time.perf_counter() - start} | _summary(
        np.stack(curves)
    )


def _text() -> np.ndarray:
    """Bytes of the default text, int32 [N]."""
    return np.frombuffer("\n".join(packing.load_text()).encode(), np.uint8).astype(np.int32)


def _summary(curves: Float[np.ndarray, "N 3"]) -> dict[str, Any]:
    """Mean losses of the first and last tenth, largest gradient norm and weight, whether all are finite.

    curves: loss, gradient norm and largest weight of each step, [N 3].
    """
    few = max(len(curves) // 10, 1)
    return {
        "first_loss": float(curves[:few, 0].mean()),
        "last_loss": float(curves[-few:, 0].mean()),
        "largest_gradient": float(curves[:, 1].max()),
        "largest_weight": float(curves[:, 2].max()),
        "is_finite": bool(np.isfinite(curves).all()),
    }


def _rms_norm(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def table(summary: dict[str, Any]) -> Any:
    """Rich table of a summary."""
    from rich.table import Table

    names = ("depth", "steps", "first loss", "last loss", "largest gradient", "largest weight", "finite", "seconds")
    shown = Table(*names, title="Training a neural memory on bytes, nats a byte", title_justify="left")
    for row in summary["rows"]:
        losses = (f"{row[name]:.3f}" for name in ("first_loss", "last_loss", "largest_gradient", "largest_weight"))
        finite = "yes" if row["is_finite"] else "NO"
        shown.add_row(str(row["depth"]), str(row["steps"]), *losses, finite, f"{row['seconds']:.0f}")
    return shown
