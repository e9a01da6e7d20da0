"""The step over a mesh equals the step on one device; what each setting places where; bad settings."""

from __future__ import annotations

import functools
import gc
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxbench import initial, remat, sharding, train, transformer
from jaxbench.measure import hlo
from jaxbench.mesh import MeshConfig, ParallelConfig
from jaxbench.parallel import distributed, mesh_plan
from jaxbench.parallel.step_plan import Plan
from jaxbench.parity import distance, memory_meshes, meshes
from jaxbench.training import engine, optimizer_step, precision
from jaxbench.training.train_config import TrainConfig

LLAMA = meshes.LLAMA
ENCODER = LLAMA.model_copy(update={"is_causal": False})
IDS = [one.id for one in meshes.PAIRWISE]
PROVEN = (*meshes.PAIRWISE, *meshes.MORE, *memory_meshes.FORMS)


# The proofs


@pytest.mark.parametrize("one", PROVEN, ids=[one.id for one in PROVEN])
def test_a_step_over_a_mesh_equals_the_unsharded_step_in_float64(x64, one):
    for comparison in meshes.prove(one).values():
        assert comparison.passed, f"{comparison.kind}: {comparison.first_failure}"


@pytest.mark.parametrize("name", ["3d", "llama-stage2-micro4-1f1b-model2-data"])
def test_in_float32_a_mesh_errs_no_more_than_one_device(name, monkeypatch):
    # With the proofs' eps of 1e-8, a gradient near 0 steps by its sign, and the next ones' errors are chance: 3.7 times
    # those of one device on a processor without AVX-512, 0.6 with this eps.
    smooth = meshes.STEP.model_copy(update={"optimizer": meshes.ADAMW.model_copy(update={"eps": 1e-3})})
    monkeypatch.setattr(meshes, "train_step", functools.partial(meshes.train_step, step_config=smooth))
    one, run_alone = meshes.find(name), meshes.run_unsharded.__wrapped__  # not what is kept of the other eps
    with jax.enable_x64(True):
        exact = run_alone(one.model, "float64")
    alone, meshed = run_alone(one.model, "float32"), meshes.run_case(one, "float32")
    for kind in ("loss", "gradients"):
        errors = [
            [distance.relative_error(found[kind][name], value, floor=distance.norm_floor(exact[kind]))
             for name, value in exact[kind].items()]
            for found in (alone, meshed)
        ]  # fmt: skip
        # The 20 to 60 tensors' errors are a few roundings each; their root mean square is steady.
        typical, found = (float(np.sqrt(np.mean(np.square(one)))) for one in errors)
        assert found <= distance.ERROR_RATIO * typical + 4 * distance.MACHINE_EPSILON["float32"], kind


def test_a_wrong_step_fails_its_proof(x64, monkeypatch):
    one = meshes.find("llama-stage2-micro4-1f1b-model2-data")
    monkeypatch.setattr(mesh_plan.pipeline, "_counted_once", lambda x: x)  # adds embeddings' gradients up twice
    proof = meshes.prove(one)
    assert proof["loss"].entries[0].passed
    assert proof["gradients"].first_failure.name == "step 0: embed.embedding"


def test_fused_projections_split_over_model_without_sending_more(x64):
    config, how = LLAMA, ParallelConfig(mesh=MeshConfig(data=1, fsdp=2, model=2), zero=2)
    sizes = {"batch": meshes.BATCH, "tokens": meshes.TOKENS}
    plan = mesh_plan.make_plan(config, how, **sizes, devices=jax.devices()[:4])
    batch, params = meshes.batch_of(0, config), initial.initial_params(config, 0, distinct=True)
    found, sent = [], []
    for groups in (0, mesh_plan.projection_groups(how, 4)):
        model = transformer.build(config, params, dtype="float64", projection_groups=groups)
        state = optimizer_step.init_state(model, params, meshes.STEP, policy=precision.uniform("float64"))
        state = mesh_plan.place_state(plan, state)
        jitted = mesh_plan.make_step(plan, state, step=meshes.train_step)
        step = jitted.lower(state, mesh_plan.place_batch(plan, batch), {}).compile(compiler_options=meshes.FAST_COMPILE)
        sent.append(sum(one.sent_bytes for one in hlo.collectives(step.as_text(), 4).values()))
        state, metrics = step(state, mesh_plan.place_batch(plan, batch), {})
        found.append({"loss": np.asarray(metrics.loss)} | optimizer_step.state_arrays(state)["first_moment"])
    assert distance.compare(found[1], found[0], kind="gradients").worst.error <= 1e-9
    assert sent[1] <= sent[0]
    with pytest.raises(ValueError, match="fused_projections with zero=3 and fsdp=2"):
        mesh_plan.projection_groups(how.model_copy(update={"zero": 3}), 4)


def test_every_pair_of_settings_is_in_the_list():
    def pairs(one: meshes.Case) -> set:
        return set(itertools.combinations(one.id.split("-"), 2))

    assert len(meshes.PAIRWISE) <= 24 and len(set(IDS)) == len(IDS)
    keys = list(meshes.FACTORS)
    listed = [one for one in meshes.PAIRWISE if one not in meshes.FORMS]
    assert {one.id for one in listed} <= {one.id for one in meshes.every_case()}

    def values(one: meshes.Case) -> dict:
        family, stage, micro, schedule, model, rows = one.id.split("-")
        rounds = int(micro[5:]) // int(stage[5:])
        return dict(zip(keys, (family, int(stage[5:]), rounds, schedule, int(model[5:]), rows)))

    full = [one for one in meshes.every_case() if one not in (*meshes.FORMS, *meshes.MORE)]
    wanted, covered = (
        {pair for one in cases for pair in itertools.combinations(values(one).items(), 2)} for cases in (full, listed)
    )
    assert wanted == covered


def test_proof_batches_have_packed_documents_and_uncounted_targets():
    batch = meshes.batch_of(0, LLAMA)
    assert set(np.unique(batch.segments)) == {1, 2} and 0.6 < batch.mask.mean() < 0.95
    assert (batch.positions[:, 0] == 0).all() and (np.sort(batch.positions[batch.segments == 2])[:32] == 0).all()
    assert not np.array_equal(batch.tokens, meshes.batch_of(1, LLAMA).tokens)


# Who holds what


def plan_of(config=LLAMA, *, batch=32, tokens=8, **settings) -> Plan:
    """Return the plan of mesh sizes and fields of ParallelConfig."""
    return mesh_plan.make_plan(config, meshes.form("here", **settings).parallel, batch=batch, tokens=tokens)


def share(arrays: dict) -> float:
    """Return the part of all elements that one device holds."""
    held = sum(np.prod(x.sharding.shard_shape(x.shape)) for x in arrays.values())
    return float(held / sum(x.size for x in arrays.values()))


@pytest.mark.parametrize(
    ("zero", "params", "moments"), [(0, 1.0, 1.0), (1, 1.0, 1 / 8), (2, 1.0, 1 / 8), (3, 1 / 8, 1 / 8)]
)
def test_zero_splits_optimiser_state_then_parameters(zero, params, moments):
    plan = plan_of(fsdp=8, zero=zero)
    state = mesh_plan.place_state(plan, meshes.initial_state(LLAMA, "float32"))
    first = optax.tree_utils.tree_get(state.moments, "mu")
    kernels = {name for name in state.params if "norm" not in name}
    assert kernels and share({name: state.params[name] for name in kernels}) == pytest.approx(params)
    assert share({name: first[name] for name in kernels}) == pytest.approx(moments)
    assert (
        plan.gradients["layers.0.mlp.up_proj.kernel"].spec
        == (plan.moments if zero >= 2 else plan_of(fsdp=8, zero=0).params)["layers.0.mlp.up_proj.kernel"].spec
    )


def test_stages_store_a_part_of_every_layer_and_of_the_embedding():
    plan = plan_of(stage=4, fsdp=2, micro_batches=4)
    held = {name: where.shard_shape(initial.parameter_shapes(LLAMA)[name]) for name, where in plan.params.items()}
    assert held["embed.embedding"] == (64, 2) and held["layers.3.mlp.up_proj.kernel"] == (2, 32)


@pytest.mark.parametrize(
    ("settings", "layers", "ends"),
    [
        ({"stage": 2, "micro_batches": 2, "model": 2}, 2, 1),  # two layers of four, halved; embedding and norm whole
        ({"micro_batches": 2, "model": 2}, 4, 1),
        ({"model": 2}, 4, 2),
    ],
)
def test_a_chip_of_a_pipeline_uses_its_stages_layers_and_the_whole_embedding(settings, layers, ends):
    one = meshes.form("here", **settings)
    how = {"batch": 32, "tokens": 8, "devices": jax.devices()[: one.num_devices]}
    _, used = mesh_plan.make_plan(LLAMA, one.parallel, **how).elements_per_chip()
    kernels = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32  # of a layer, split over model; its two norms are not
    assert used == layers * (kernels // 2 + 2 * 16) + 64 * 16 // ends + 16


def test_the_state_is_used_up_and_stays_where_it_was():
    plan = plan_of(fsdp=4, model=2)
    state = mesh_plan.place_state(plan, meshes.initial_state(LLAMA, "float32"))
    step = mesh_plan.make_step(plan, state, step=meshes.train_step)
    kernel = state.params["layers.0.mlp.up_proj.kernel"]
    after, _ = step(state, mesh_plan.place_batch(plan, meshes.batch_of(0, LLAMA)), {})
    assert kernel.is_deleted()
    moved = after.params["layers.0.mlp.up_proj.kernel"]
    assert moved.sharding.shard_shape(moved.shape) == (4, 16)


def noted(monkeypatch):
    """List of the bytes on the first device: now, and before any array is placed from now on."""
    held, place = [], distributed.place

    def note():
        there = [array for array in jax.live_arrays() if jax.devices()[0] in array.sharding.device_set]
        held.append(sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in there))

    gc.collect()
    note()
    monkeypatch.setattr(distributed, "place", lambda *given: (note(), place(*given))[1])
    return held


def test_no_device_ever_holds_what_others_keep_while_a_run_is_set_up(monkeypatch):
    config = LLAMA.model_copy(update={"d_model": 64, "d_ff": 256})
    run = TrainConfig(
        model=config.model_dump() | {"vocab_size": None}, data={"seq_len": 8}, batch_size=8, steps=1,
        learning_rate=1e-3, parallel={"mesh": {"data": 1, "fsdp": 8}},
    )  # fmt: skip
    held, stop = noted(monkeypatch), RuntimeError("before anything is compiled")

    def ready(plan, state, **settings):
        distributed.place(0, NamedSharding(plan.mesh, PartitionSpec()))
        assert all(value.sharding.is_equivalent_to(plan.params[n], value.ndim) for n, value in state.params.items())
        raise stop

    monkeypatch.setattr(mesh_plan, "make_step", ready)
    with pytest.raises(RuntimeError, match=str(stop)):
        engine.Engine(run, config, initial.initial_params(config, 0))
    state = 3 * 4 * initial.num_parameters(config) / 8  # parameters and two moments
    assert state <= held[-1] - held[0] <= max(held) - held[0] <= 1.5 * state


def test_a_checkpoint_s_state_takes_the_place_of_the_one_before_array_by_array(monkeypatch):
    run = types.SimpleNamespace(state=mesh_plan.place_state(plan_of(fsdp=8), meshes.initial_state(LLAMA, "float32")))
    saved = {name: np.asarray(value) + 1 for name, value in engine.Engine.arrays(run).items()}
    held = noted(monkeypatch)
    engine.Engine.load(run, saved)
    largest = max(value.nbytes for value in saved.values())  # whole, for a moment
    assert len(held) == 1 + len(saved) and max(held) - held[0] <= largest
    assert all(np.array_equal(value, saved[name]) for name, value in engine.Engine.arrays(run).items())


def compiled_step(plan: Plan, config=LLAMA):
    """Return the compiled step, from shapes alone."""
    params = initial.initial_params(config, 0)
    fresh = lambda: optimizer_step.init_state(transformer.build(config, params), params, meshes.STEP)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), meshes.batch_of(0, config))
    step = mesh_plan.make_step(plan, jax.eval_shape(fresh), step=meshes.train_step)
    return step.lower(jax.eval_shape(fresh), batch, {}).compile(compiler_options=meshes.FAST_COMPILE)


def test_zero_three_gathers_weights_twice_and_zero_two_gathers_updates_once():
    gathers = {}
    for zero in (0, 2, 3):
        compiled = compiled_step(plan_of(fsdp=8, zero=zero))
        gathers[zero] = hlo.collectives(compiled.as_text(), 8).get("all-gather")
    split = sum("norm" not in name for name in initial.parameter_shapes(LLAMA))
    assert gathers[0] is None
    assert split <= gathers[2].count <= split + 2  # every new kernel once; the embedding's lookup may take another
    # Forward and backward; the tied table's last use is its first in the backward pass and XLA keeps it for that.
    assert 2 * split - 2 <= gathers[3].count <= 2 * split + 2


@pytest.mark.parametrize("scan_layers", [False, True])
def test_rematerialised_layers_gather_their_own_weights_and_keep_nothing_but_their_inputs(x64, scan_layers):
    batch = jax.tree.map(jnp.asarray, meshes.batch_of(0, LLAMA))
    params = initial.initial_params(LLAMA, 0, distinct=True)
    kept = {}
    for policy, zero in (("none", 2), ("block", 2), ("block", 3)):
        model = transformer.build(LLAMA, params, dtype="float64", scan_layers=scan_layers)
        graph, weights = nnx.split(remat.apply(model, policy=policy), nnx.Param)
        how = meshes.form("here", fsdp=4, zero=zero).parallel
        plan = mesh_plan.make_plan(LLAMA, how, batch=32, tokens=8, devices=jax.devices()[:4])

        def loss(weights, plan=plan, graph=graph):
            return mesh_plan.loss_on(plan)(nnx.merge(graph, weights), batch)

        residuals = jax.tree.leaves(jax.eval_shape(lambda weights: jax.vjp(loss, weights)[1], weights))
        kept[policy, zero] = sum(leaf.size for leaf in residuals)
    inputs = LLAMA.num_layers * 32 * 8 * LLAMA.d_model
    assert kept["block", 3] <= kept["block", 2] < kept["none", 2] - 8 * inputs
    # The plan of the last one: ZeRO 3, blocks computed again.
    paths = nnx.to_flat_state(weights)
    split = [(path, leaf.replace(jax.device_put(leaf[...], plan.params[".".join(map(str, path))])))
             for path, leaf in paths]  # fmt: skip
    placed = nnx.from_flat_state(split)
    step = jax.jit(jax.grad(loss)).lower(placed).compile(compiler_options=meshes.FAST_COMPILE)
    wanted = jax.jit(jax.grad(lambda weights: train.loss_fn(nnx.merge(graph, weights), batch)))(weights)
    by_name = lambda grads: {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(grads)}
    comparison = distance.compare(by_name(step(placed)), by_name(wanted), kind="gradients")
    assert comparison.passed, comparison.first_failure
    gathers = hlo.collectives(step.as_text(), 4)["all-gather"]
    layers = sum(name.startswith("layers.0") and "norm" not in name for name in plan.used) * LLAMA.num_layers
    assert 2 * layers <= gathers.count <= 2 * layers + 4 and gathers.unknown_loops == 0


def test_tensor_parallelism_moves_activations_only():
    wide = LLAMA.model_copy(update={"d_ff": 256, "vocab_size": 512})
    plan = plan_of(wide, model=2, data=4)
    compiled = compiled_step(plan, wide)
    found = hlo.collectives(compiled.as_text(), 8)
    # No kernel and no head is gathered: the only thing that moves is sums, two a layer forward and two backward.
    assert found.keys() == {"all-reduce"}
    assert found["all-reduce"].count >= 4 * LLAMA.num_layers
    weights = sum(4 * int(np.prod(where.shard_shape(initial.parameter_shapes(wide)[name])))
                  for name, where in plan.params.items())  # fmt: skip
    activation = 4 * (32 // 4) * 8 * 16  # bytes of the residual stream of one device
    assert found["all-reduce"].result_bytes <= weights + (4 * LLAMA.num_layers + 4) * activation + 2**16


# Bad settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": 8, "batch": 12}, "batch=12 is not a multiple of data=8"),
        ({"data": 2, "micro_batches": 4, "batch": 12, "stage": 4}, r"batch=12 is not .* micro_batches=4 = 8"),
        ({"model": 8}, "num_heads=4 and num_kv_heads=2 are not both multiples of model=8; heads=replicated"),
        ({"stage": 8, "micro_batches": 8}, "num_layers=4 do not split evenly into stage=8"),
        ({"stage": 4, "data": 2, "micro_batches": 6, "batch": 24}, "micro_batches=6 is not a multiple of stage=4"),
        ({"stage": 2, "sequence": 4, "micro_batches": 2}, "sequence=4 needs sequence_attention=gathered, got ring"),
        (
            {"config": ENCODER, "stage": 2, "sequence": 4, "micro_batches": 2, "sequence_attention": "gathered"},
            "sequence=4 needs a causal decoder, got is_causal=False",
        ),
        (
            {"stage": 2, "sequence": 2, "model": 2, "micro_batches": 2, "sequence_attention": "gathered", "tokens": 6},
            "divide d_ff=32 and the 3 tokens of a device's part of a row",
        ),
        (
            {"stage": 2, "model": 2, "data": 2, "micro_batches": 2, "sequence_parallel": True},
            "not with sequence_parallel=True or the 2d form",
        ),
        ({"sequence": 8, "tokens": 12}, "rows of 12 tokens do not split into the 8 parts of sequence=8"),
        ({"data": 4, "model": 2, "sequence_parallel": True, "tokens": 7}, "2 parts of sequence=1 \\* model=2"),
        ({"data": 3}, "data=3 needs 3 devices, there are 8; possible: data=8"),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error_with_values(settings, message):
    with pytest.raises(ValueError, match=message):
        plan_of(**settings)


@pytest.mark.parametrize("kernel", ["fused", "splash"])
def test_a_ring_refuses_a_platforms_kernel_which_it_would_not_run(kernel):
    plan = plan_of(sequence=4, data=2)
    model = transformer.build(LLAMA, initial.initial_params(LLAMA, 0), implementation=kernel)
    with pytest.raises(ValueError, match=f"implementation={kernel} with sequence_attention=ring over sequence=4"):
        jax.eval_shape(mesh_plan.loss_on(plan), model, meshes.batch_of(0, LLAMA))


def test_dropout_over_micro_batches_is_refused():
    with pytest.raises(ValueError, match="dropout=0.1 is not supported over micro-batches"):
        plan_of(LLAMA.model_copy(update={"dropout": 0.1}), stage=4, data=2, micro_batches=4)


@pytest.mark.parametrize("part", [{"sliding_window": 4, "global_every": 2}, {"logit_softcap": 3.0}])
def test_a_pipeline_refuses_layers_that_differ_and_capped_logits(part):
    with pytest.raises(ValueError, match="needs layers that are alike and plain logits, got global_every="):
        plan_of(LLAMA.model_copy(update=part), stage=4, data=2, micro_batches=4)


def test_unknown_cases_and_activation_points_are_named():
    with pytest.raises(ValueError, match="no case 'four-d'.*2.5d"):
        meshes.find("four-d")
    assert meshes.find("bank", *memory_meshes.FORMS) == memory_meshes.FORMS[1]
    with pytest.raises(ValueError, match="no activation point 'residuals', known: residual"):
        sharding.constrain(jnp.zeros(()), "residuals")
    with pytest.raises(ValueError, match=r"no activation points \['norms'\]"), sharding.activations({"norms": abs}):
        pass


def test_points_do_nothing_outside_a_step_and_end_with_it():
    x = jnp.zeros((2, 3))
    assert sharding.constrain(x, "residual") is x and sharding.mesh_attention() is None
    with sharding.activations({"residual": lambda x: x + 1}):
        assert float(sharding.constrain(x, "residual")[0, 0]) == 1.0
    assert sharding.constrain(x, "residual") is x


def test_mesh_and_model_settings_exclude_each_other_early():
    with pytest.raises(ValueError, match="exclude each other"):
        ParallelConfig(mesh=MeshConfig(model=2, model_x=2))
