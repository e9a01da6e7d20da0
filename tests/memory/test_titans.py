"""Both backends beside vectors of titans-pytorch 0.5.5 (golden/make_titans.py), in float64."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench.memory import neural
from jaxbench.memory.config import NeuralMemoryConfig
from torch_ref.memory import neural as torch_neural

pytestmark = pytest.mark.usefixtures("x64")

PEER = json.loads((Path(__file__).parent / "golden" / "titans.json").read_text())
X, SCALE = np.asarray(PEER["x"]), np.asarray([[PEER["parameters"]["store_norm.weight"]]])
SIZE = PEER["batch_size"]  # tokens whose gradients are taken at the same weights
SHAPE = NeuralMemoryConfig(
    d_model=6, num_heads=2, head_dim=3, chunk_size=SIZE, depth=2, hidden_factor=4, activation="gelu_erf",
    residual_norm=True, loss_reduction="mean", conv_size=1, qkv_activation="none", qk_norm=False, output="linear",
)  # fmt: skip
TOLERANCE = 2e-13  # of answers and weights, relative to the largest value; measured 7e-15 and 2e-14
GRADIENTS = 3e-12  # by the stream; measured 3e-13, through norms of three numbers


def params(*, momentum: bool = True, forgetting: bool = True) -> dict[str, np.ndarray]:
    """Return the peer's parameters by our names; its gate of a head's answer is held at a half."""
    own = {name: np.asarray(value) for name, value in PEER["parameters"].items()}
    gates = {"to_adaptive_step": "theta"}
    gates |= {"to_momentum": "eta"} if momentum else {}
    gates |= {"to_decay_factor": "alpha"} if forgetting else {}
    found = {f"{x[0]}_proj.kernel": own[f"to_{x}.weight"].T for x in ("queries", "keys", "values")}
    for name, gate in gates.items():
        found |= {f"{gate}.kernel": own[f"{name}.0.weight"].T, f"{gate}.bias": own[f"{name}.0.bias"]}
    found |= {f"memory.layers.{i}.kernel": own[f"memory_model_parameters.{i + 1}"] for i in range(2)}
    return found | {
        "memory.gain": own["memory_model_parameters.0"],
        "o_proj.kernel": 0.5 * own["combine_heads.weight"].T,
    }


def normalised(x, squares, scale):
    """Return what the peer projects: the stream, divided by its root mean square and scaled."""
    return x / (squares + np.finfo(np.float64).eps) ** 0.5 * scale


def by_flax(config: NeuralMemoryConfig, values: dict[str, np.ndarray]) -> tuple:
    """Return answers, the last kernels and gain, and the gradient of sum(sin(answers)) by the stream."""
    model = neural.build(config, values, dtype="float64")

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(x):
        answers, state = model(normalised(x, jnp.mean(x * x, axis=-1, keepdims=True), SCALE))
        return jnp.sum(jnp.sin(answers)), (answers, (*state.weights.kernels, state.weights.gain))

    gradient, (answers, weights) = run(jnp.asarray(X))
    return answers, weights, gradient


def by_torch(config: NeuralMemoryConfig, values: dict[str, np.ndarray]) -> tuple:
    """Return the same from the PyTorch twin."""
    model, x = torch_neural.build(config, values, dtype="float64"), torch.tensor(X, requires_grad=True)
    answers, state = model(normalised(x, torch.mean(x * x, dim=-1, keepdim=True), torch.tensor(SCALE)))
    answers.sin().sum().backward()
    weights = (*state.weights.kernels, state.weights.gain)
    return answers.detach(), [each.detach() for each in weights], x.grad


def distance(found, wanted) -> float:
    """Return the largest difference, relative to the largest value."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    return float(np.abs(found.reshape(wanted.shape) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("backend", [by_flax, by_torch])
def test_the_memory_equals_titans_pytorch_where_its_gates_are_those_of_a_token(backend):
    answers, (*kernels, gain), gradient = backend(SHAPE, params())
    wanted = PEER["token"]
    assert distance(answers, wanted["answers"]) < TOLERANCE
    assert distance(gradient, wanted["gradient"]) < GRADIENTS
    for i, kernel in enumerate(kernels):
        assert distance(kernel, wanted["weights"][f"model.weights.{i}"]) < TOLERANCE
    assert distance(gain, wanted["weights"]["norm.gamma"]) < TOLERANCE


@pytest.mark.parametrize("backend", [by_flax, by_torch])
def test_read_before_write_equals_titans_pytorch_asked_before_it_stores(backend):
    answers = backend(SHAPE.model_copy(update={"read": "before"}), params())[0]
    assert distance(answers, PEER["before"]) < TOLERANCE
    assert distance(answers, PEER["token"]["answers"]) > 1e-3


@pytest.mark.parametrize("backend", [by_flax, by_torch])
def test_titans_pytorch_reads_with_the_weights_before_a_chunk_but_at_its_last_token(backend):
    off = {"momentum": False, "forgetting": False}
    before, at = (
        np.asarray(backend(SHAPE.model_copy(update=off | {"read": read}), params(**off))[0])
        for read in ("chunk", "token")
    )
    is_last = np.arange(X.shape[1]) % SIZE == SIZE - 1
    wanted = np.asarray(PEER["chunk"])
    assert distance(before[:, ~is_last], wanted[:, ~is_last]) < TOLERANCE
    assert distance(at[:, is_last], wanted[:, is_last]) < TOLERANCE
    assert distance(before[:, is_last], wanted[:, is_last]) > 1e-3


def test_the_tanh_form_of_gelu_is_not_titans_pytorchs():
    answers = by_torch(SHAPE.model_copy(update={"activation": "gelu"}), params())[0]
    assert 1e-6 < distance(answers, PEER["token"]["answers"])
