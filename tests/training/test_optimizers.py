"""Optimisers against their papers in numpy, and what weight decay spares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench import initial
from jaxbench.memory import decoder_config
from jaxbench.parity import memory_meshes, meshes
from jaxbench.training import optimizers
from jaxbench.training.precision import DelayedScaling, LossScaling
from jaxbench.training.step_config import HYPERPARAMETERS, OptimizerConfig, RematConfig, StepConfig, holds_zeros
from torch_ref.memory import decoder as torch_decoder
from torch_ref.training import optimizer_step as torch_update

# Optimisers that the twin lacks, against their papers in numpy


def optimised(kind, gradients, start, given=None, **how):
    """Return the parameters after each gradient, with optax in float64."""
    config = OptimizerConfig(kind=kind, **how) if given is None else given
    params = {name: jnp.asarray(value) for name, value in start.items()}
    state = optimizers.transform(config, 0.0, params).init(params)
    for gradient in gradients:
        step = optimizers.transform(config, jnp.asarray(0.1), params)
        updates, state = step.update({name: jnp.asarray(g) for name, g in gradient.items()}, state, params)
        params = {name: params[name] + updates[name] for name in params}
    return {name: np.asarray(value) for name, value in params.items()}


def examples(*shapes, steps=3):
    random = np.random.default_rng(0)
    return [{name: random.normal(size=shape) for name, shape in shapes} for _ in range(steps + 1)]


def test_lion_takes_the_sign_of_its_interpolation(x64):
    start, *gradients = examples(("layers.0.kernel", (3, 4)), ("layers.0.bias", (4,)))
    found = optimised("lion", gradients, start, b1=0.9, b2=0.99, weight_decay=0.2)
    for name, value in start.items():
        moment = np.zeros_like(value)
        for gradient in gradients:
            sign = np.sign(0.9 * moment + 0.1 * gradient[name])
            value = value - 0.1 * (sign + (0.2 * value if value.ndim == 2 else 0.0))
            moment = 0.99 * moment + 0.01 * gradient[name]
        np.testing.assert_allclose(found[name], value, rtol=1e-12)


def test_adafactor_factors_its_second_moment_and_scales_by_the_parameter(x64):
    start, *gradients = examples(("layers.0.kernel", (130, 129)))
    found = optimised("adafactor", gradients, start, weight_decay=0.5)["layers.0.kernel"]
    value, rows, columns = start["layers.0.kernel"], np.zeros(130), np.zeros(129)
    for step, gradient in enumerate(gradients, start=1):
        decay = 1.0 - step**-0.8
        square = np.square(gradient["layers.0.kernel"]) + 1e-30
        rows, columns = decay * rows + (1 - decay) * square.mean(1), decay * columns + (1 - decay) * square.mean(0)
        change = gradient["layers.0.kernel"] / np.sqrt(np.outer(rows, columns) / rows.mean())
        change /= max(1.0, np.sqrt(np.square(change).mean()))
        change *= 0.1 * max(1e-3, np.sqrt(np.square(value).mean()))
        value = value - change - 0.1 * 0.5 * value
    np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-8)  # optax keeps its decay in float32


def test_muon_orthogonalises_kernels_and_leaves_the_rest_to_adamw(x64):
    start, *gradients = examples(("layers.0.kernel", (6, 8)), ("embed.embedding", (5, 4)), steps=1)
    found = optimised("muon", gradients, start, momentum=0.95, weight_decay=0.0, b1=0.9, b2=0.95)
    x = gradients[0]["layers.0.kernel"]
    x = x / np.linalg.norm(x)
    for _ in range(5):  # Newton-Schulz with Jordan's coefficients
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    moved = start["layers.0.kernel"] - found["layers.0.kernel"]
    np.testing.assert_allclose(moved, 0.1 * np.sqrt(8 / 6) * x, rtol=1e-5, atol=1e-7)
    adam = gradients[0]["embed.embedding"] / (np.abs(gradients[0]["embed.embedding"]) + 1e-8)
    np.testing.assert_allclose(start["embed.embedding"] - found["embed.embedding"], 0.1 * adam, rtol=1e-9)


KEPT = ("scale", "bias", "gate", "gain", "persistent", "q_conv.kernel", "k_conv.kernel", "v_conv.kernel")


def memory_decoder():
    """Return a decoder with every kind of parameter that a memory may have, and its parameters."""
    neural = memory_meshes.NEURAL.model_copy(update={"residual_norm": True})
    memory = memory_meshes.MEMORY["mac"].model_copy(update={"neural": neural})
    plain = meshes.LLAMA.model_copy(update={"num_layers": 2})
    config = decoder_config.with_memory(plain, memory)
    params = initial.initial_params(config, 0, distinct=True)
    return config, params | {"layers.0.block.bank.gate": np.ones((4, 4)), "layers.0.mlp.down_proj.bias": np.ones(4),
                             "layers.0.attention.q_norm.scale": np.ones(4)}  # fmt: skip


@pytest.mark.parametrize("kind", ["adamw", "lion", "sgd", "adafactor", "muon"])
def test_weight_decay_of_matrices_spares_gains_gates_persistent_tokens_and_depthwise_convolutions(kind):
    _, params = memory_decoder()
    params = {name: jnp.asarray(value) for name, value in params.items()}
    step = optimizers.transform(OptimizerConfig(kind=kind, weight_decay=0.5), 0.1, params)
    updates, _ = step.update(jax.tree.map(jnp.zeros_like, params), step.init(params), params)
    moved = {name for name, value in updates.items() if np.any(value)}
    assert moved == {name for name in params if not name.endswith(KEPT)}
    assert {name.rpartition("block.")[2] for name in params.keys() - moved} >= {
        "memory.memory.gain", "bank.gate", "attention.persistent", "memory.k_conv.kernel",
    }  # fmt: skip


def test_depthwise_convolutions_that_begin_as_the_identity_are_no_pruned_kernels_whose_zeros_are_held():
    config, _ = memory_decoder()
    start = initial.initial_params(config, 0)
    begin = {name for name, value in start.items() if name.endswith("_conv.kernel") and not np.all(value)}
    assert begin and not any(holds_zeros(name) for name in begin)
    assert holds_zeros("layers.0.mlp.up_proj.kernel") and holds_zeros("layers.1.block.memory.q_proj.kernel")
    assert not holds_zeros("layers.0.mlp.up_proj.bias") and not holds_zeros("head.kernel")


def test_the_twin_decays_the_same_parameters():
    config, params = memory_decoder()
    params = {name: value for name, value in params.items() if name in initial.parameter_shapes(config)}
    model = torch_decoder.build(config, params)
    groups = torch_update._optimizer(model, StepConfig()).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    kept = {names[id(parameter)] for parameter in groups[1]["params"]}
    assert kept == {name for name in params if name.endswith(KEPT)}


# Settings that a choice does not read


def test_a_setting_that_the_chosen_optimizer_policy_or_precision_does_not_read_is_refused():
    told = r"kind=sgd does not read b1=0.5 \(read by adamw, lion, muon; default 0.9\), muon_ratio=3.0 .*; leave it out"
    with pytest.raises(ValueError, match=told):
        OptimizerConfig(kind="sgd", b1=0.5, muon_ratio=3.0)
    with pytest.raises(ValueError, match=r"policy=none does not read group=4 \(read by group; default 2\)"):
        RematConfig(group=4)
    with pytest.raises(ValueError, match=r"precision=bfloat16 does not read loss_scaling=.*'initial': 2.0.*, only"):
        StepConfig(precision="bfloat16", loss_scaling=LossScaling(initial=2.0))
    with pytest.raises(ValueError, match=r"precision=float16 does not read delayed_scaling=.*'history': 3.*, only"):
        StepConfig(precision="float16", delayed_scaling=DelayedScaling(history=3))


@pytest.mark.parametrize("kind", HYPERPARAMETERS)
def test_every_setting_that_an_optimizer_may_have_changes_its_steps_and_no_other(kind, x64):
    start, *gradients = examples(("layers.0.kernel", (6, 8)), ("embed.embedding", (5, 4)))
    others = {"b1": 0.3, "b2": 0.4, "eps": 1e-2, "momentum": 0.5, "muon_ratio": 3.0}

    def moved(**how):
        given = OptimizerConfig(kind=kind).model_copy(update=how)  # which checks nothing
        return optimised(kind, gradients, start, given=given)

    plain = moved()
    read = {name for name, value in others.items() if any(
        np.any(after != plain[key]) for key, after in moved(**{name: value}).items())}  # fmt: skip
    assert read == set(HYPERPARAMETERS[kind])
