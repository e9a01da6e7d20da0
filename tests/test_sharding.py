"""Sharding tables: complete, deterministic, and without effect on the numbers (8 simulated devices)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxbench import initial, sharding
from jaxbench.config import TransformerConfig
from jaxbench.parallel import mesh_programs

LLAMA = TransformerConfig(
    vocab_size=96, d_model=48, d_ff=64, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=16, max_seq_len=32
)
GPT2 = LLAMA.model_copy(
    update={
        "num_kv_heads": 3, "norm": "layernorm", "activation": "gelu", "position": "learned", "use_bias": True,
        "tie_embeddings": False,
    }
)  # fmt: skip
QWEN3 = LLAMA.model_copy(update={"qk_norm": True, "head_dim": 32})
GEMMA2 = LLAMA.model_copy(update={"activation": "geglu", "post_norms": True, "qkv_bias": True})  # and Qwen2's biases
FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "qwen3": QWEN3, "gemma2": GEMMA2}


# What stores a part of every kernel, and what splits feed-forward width and vocabulary.
LAYOUTS = {"replicated": (None, None), "fsdp": ("data", None), "tensor": (None, "model"), "both": ("data", "model")}


def rules_of(config: TransformerConfig, layout: str):
    """Return the table for a configuration."""
    stored, out = LAYOUTS[layout]
    return sharding.decoder_table(config, stored=stored, out=out, heads=None, width=None)


def place(config: TransformerConfig, num_devices: int, **how):
    """Return plan, host values and placed values of a model's parameters, for 8 rows of 16 tokens."""
    plan = mesh_programs.make_plan(config, jax.devices()[:num_devices], batch=8, tokens=16, **how)
    host = {k: v.astype(np.float32) for k, v in initial.initial_params(config, 0, distinct=True).items()}
    return plan, host, {k: jax.device_put(v, plan.params[k]) for k, v in host.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_has_a_rule_and_every_rule_a_parameter(family, layout):
    shapes = initial.parameter_shapes(FAMILIES[family])
    specs = sharding.parameter_specs(shapes, rules_of(FAMILIES[family], layout), {"data": 4, "model": 2})
    assert specs.keys() == shapes.keys()
    for name, spec in specs.items():
        for dim, axis in enumerate(spec):
            assert axis is None or shapes[name][dim] % {"data": 4, "model": 2}[axis] == 0, name


def test_scales_that_all_heads_share_are_on_every_device():
    rules = sharding.decoder_table(QWEN3, stored="fsdp", out="model", heads="model", width=None)
    specs = sharding.parameter_specs(initial.parameter_shapes(QWEN3), rules, {"fsdp": 2, "model": 3})
    assert specs["layers.1.attention.q_proj.kernel"] == P("fsdp", "model")
    assert all(specs[f"layers.1.attention.{name}_norm.scale"] == P(None) for name in "qk")


def test_missing_and_idle_rules_are_named():
    rules = [r for r in rules_of(LLAMA, "fsdp") if "embed" not in r[0]] + [(r"nothing\.here", P(None))]
    with pytest.raises(ValueError, match=r"without a rule: \['embed.embedding'\].*nothing") as error:
        sharding.parameter_specs(initial.parameter_shapes(LLAMA), rules, {"data": 4})
    assert "layers.0" not in str(error.value)


def test_fsdp_splits_every_kernel_and_tensor_only_mlp_and_vocabulary():
    shapes = initial.parameter_shapes(LLAMA)
    fsdp = sharding.parameter_specs(shapes, rules_of(LLAMA, "fsdp"), {"data": 8, "model": 1})
    assert all("data" in tuple(spec) for name, spec in fsdp.items() if name.endswith(("kernel", "embedding")))
    tensor = sharding.parameter_specs(shapes, rules_of(LLAMA, "tensor"), {"data": 1, "model": 8})
    split = {name for name, spec in tensor.items() if "model" in tuple(spec)}
    assert split == {n for n in shapes if ".mlp." in n and n.endswith("kernel")} | {"embed.embedding"}
    assert tensor["layers.0.mlp.up_proj.kernel"] == P(None, "model")
    assert tensor["layers.0.mlp.down_proj.kernel"] == P("model", None)


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P("data", None), (16, 6), P("data", None)),  # divides: as the rule says
        (P("data", None), (6, 16), P(None, "data")),  # moved to the dim that divides
        (P("data", None, None), (6, 8, 16), P(None, None, "data")),  # to the largest of them
        (P("data", None, None), (6, 8, 8), P(None, "data", None)),  # the first of equals
        (P("data", "model"), (6, 16), P(None, "model")),  # a dim another axis splits is taken: replicated
        (P("data"), (6,), P(None)),  # nothing divides: replicated
    ],
)
def test_a_size_that_does_not_divide_moves_the_axis_or_replicates(spec, shape, expected):
    assert sharding.fit_spec(spec, shape, {"data": 4, "model": 2}) == expected


def test_a_rule_longer_than_the_shape_is_an_error():
    with pytest.raises(ValueError, match=r"final_norm.scale has 2 dims.*\(48,\)"):
        sharding.fit_spec(P("data", None), (48,), {"data": 2}, name="final_norm.scale")


def test_wrong_mesh_size_and_batch_are_errors_with_values():
    with pytest.raises(ValueError, match="needs 6 devices, there are 8"):
        sharding.make_mesh({"data": 3, "model": 2}, jax.devices())
    with pytest.raises(ValueError, match=r"batch=6 is not a multiple of data=8"):
        mesh_programs.make_plan(LLAMA, jax.devices(), batch=6, tokens=16)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how", [{"is_split": True}, {"model_axis": 8}, {"is_split": True, "model_axis": 2}], ids=["fsdp", "tensor", "both"]
)
def test_sharded_logits_equal_unsharded(family, how):
    config = FAMILIES[family]
    plan, host, params = place(config, 8, **how)
    model = mesh_programs.abstract_model(config, dtype="float32", scan_layers=False)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (8, 16)).astype(np.int32)
    positions = np.tile(np.arange(16, dtype=np.int32), (8, 1))

    def logits(params, tokens, positions):
        used = {k: sharding.place_both_ways(v, plan.used[k], plan.gradients[k]) for k, v in params.items()}
        return model.merge(used)(tokens, positions)

    with jax.default_matmul_precision("highest"):
        rows = plan.batch
        sharded = jax.jit(logits, out_shardings=rows)(
            params, jax.device_put(tokens, rows), jax.device_put(positions, rows)
        )
        alone = jax.jit(lambda p, t, q: model.merge(p)(t, q))(host, tokens, positions)
    difference = np.linalg.norm(np.asarray(sharded) - np.asarray(alone)) / np.linalg.norm(np.asarray(alone))
    assert len(sharded.sharding.device_set) == 8
    assert difference <= 1e-6


def test_sharded_train_step_equals_one_device_and_keeps_weights_split():
    outcomes = {}
    for layout, num_devices in {"fsdp": 8, "replicated": 1}.items():
        plan, host, params = place(LLAMA, num_devices, is_split=True)
        placed = plan.params
        model = mesh_programs.abstract_model(LLAMA, dtype="float32", scan_layers=False)
        program = mesh_programs.train(model, plan, batch=8, tokens=16)
        tokens = np.random.default_rng(1).integers(0, LLAMA.vocab_size, (8, 17)).astype(np.int32)
        zeros = {k: jax.device_put(np.zeros(v.shape, np.float32), placed[k]) for k, v in host.items()}
        more = {k: jax.device_put(np.zeros(v.shape, np.float32), placed[k]) for k, v in host.items()}
        positions = np.tile(np.arange(16, dtype=np.int32), (8, 1))
        batch = [jax.device_put(x, plan.batch) for x in (tokens[:, :-1], tokens[:, 1:], positions)]
        with jax.default_matmul_precision("highest"):
            outcomes[layout] = program.jitted(params, zeros, more, jnp.zeros((), jnp.int32), *batch)
    split, alone = outcomes["fsdp"], outcomes["replicated"]
    assert float(split[4]) == pytest.approx(float(alone[4]), rel=1e-6)
    for name, value in alone[1].items():  # first moments: a tenth of the gradients
        error = np.linalg.norm(np.asarray(split[1][name]) - np.asarray(value)) / np.linalg.norm(np.asarray(value))
        assert error <= 3e-6, name
    kernel = split[0]["layers.0.mlp.up_proj.kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (6, 64)


def test_make_mesh_orders_axes_and_devices():
    mesh = sharding.make_mesh({"data": 4, "model": 2}, jax.devices())
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
