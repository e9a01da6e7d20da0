"""Pruning: which weights go, smaller decoders that compute what a masked one does, and training that keeps zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_ref.train
import torch_ref.training.optimizer_step
import torch_ref.transformer
from jaxbench import initial, train, transformer
from jaxbench.parity import cases, distance
from jaxbench.pretrained import weights
from jaxbench.quantization import pruning, structured
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import TWIN_OPTIMIZERS, OptimizerConfig, StepConfig

LLAMA, GPT2 = cases.LLAMA, cases.GPT2
QWEN2 = LLAMA.model_copy(update={"qkv_bias": True})
FAMILIES = pytest.mark.parametrize("config", [LLAMA, GPT2, QWEN2], ids=["llama", "gpt2", "qwen2"])


def params_of(config, seed=0):
    return initial.initial_params(config, seed, distinct=True)


def kernel(seed, inputs=8, outputs=6):
    return {"layers.0.mlp.up_proj.kernel": np.random.default_rng(seed).standard_normal((inputs, outputs))}


def norms_for(params, seed=0):
    random = np.random.default_rng(seed)
    return {name: random.uniform(0.1, 10.0, params[name].shape[0]) for name in pruning.prunable(params)}


# Masks


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_and_not_removed(value):
    params = kernel(0)
    params["layers.0.mlp.up_proj.kernel"][2, 3] = value
    with pytest.raises(ValueError, match="layers.0.mlp.up_proj.kernel has NaN or infinite values, 97.917% are finite"):
        pruning.scores(params)


@FAMILIES
def test_kernels_inside_layers_are_pruned_and_nothing_else(config):
    params = params_of(config)
    kept = pruning.smallest_fraction(pruning.scores(params), 0.5, scope="matrix")
    pruned = pruning.apply(params, kept)
    assert set(kept) == {name for name in params if name.startswith("layers.") and name.endswith(".kernel")}
    assert len(kept) == config.num_layers * (7 if config.is_gated else 6)
    for name, value in params.items():
        if name not in kept:
            assert pruned[name] is value
        else:
            assert pruned[name].dtype == value.dtype
            np.testing.assert_array_equal(pruned[name], np.where(kept[name], value, 0))
    counted = pruning.count(pruned)
    assert counted.share == pytest.approx(0.5, abs=0.01) and counted.matrices == len(kept)
    assert pruning.count(params).zeros == 0


@given(st.integers(0, 99), st.floats(0, 0.99))
def test_the_smallest_weights_of_a_matrix_go_and_exactly_as_many_as_asked(seed, fraction):
    values = pruning.scores(kernel(seed))
    kept = pruning.smallest_fraction(values, fraction, scope="matrix")
    (name, mask), value = *kept.items(), *values.values()
    assert np.count_nonzero(~mask) == min(round(fraction * value.size), value.size - 1) and name in values
    if not mask.all():
        assert value[~mask].max() <= value[mask].min()


@given(st.integers(0, 99), st.floats(0, 0.99))
def test_by_output_every_column_loses_equally_many(seed, fraction):
    values = pruning.scores(kernel(seed))
    (mask,) = pruning.smallest_fraction(values, fraction, scope="output").values()
    (value,) = values.values()
    assert ((~mask).sum(axis=0) == min(round(fraction * 8), 7)).all()
    for column in range(value.shape[1]):
        left, gone = value[mask[:, column], column], value[~mask[:, column], column]
        assert not len(gone) or gone.max() <= left.min()


def test_globally_a_matrix_of_small_weights_loses_more_than_one_of_large_weights():
    small, large = kernel(0), {"layers.1.mlp.up_proj.kernel": 100 * kernel(1)["layers.0.mlp.up_proj.kernel"]}
    values = pruning.scores(small | large)
    kept = pruning.smallest_fraction(values, 0.4, scope="global")
    removed = {name: np.count_nonzero(~mask) for name, mask in kept.items()}
    joined = np.concatenate([value.ravel() for value in values.values()])
    assert sum(removed.values()) == round(0.4 * joined.size)
    limit = np.sort(joined)[sum(removed.values())]
    assert all((values[name][~mask] < limit).all() for name, mask in kept.items())
    assert removed["layers.0.mlp.up_proj.kernel"] > removed["layers.1.mlp.up_proj.kernel"]


@pytest.mark.parametrize("scope", pruning.SCOPES)
def test_of_equal_scores_those_that_lie_first_go_first(scope):
    values = {"layers.0.mlp.up_proj.kernel": np.ones((4, 2))}
    (mask,) = pruning.smallest_fraction(values, 0.5, scope=scope).values()
    assert mask.tolist() == [[False, False], [False, False], [True, True], [True, True]]


@given(st.integers(0, 99), st.sampled_from([(2, 4), (1, 4), (4, 8), (1, 2)]))
def test_of_every_group_of_inputs_the_largest_stay(seed, pattern):
    count, group = pattern
    values = pruning.scores(kernel(seed))
    (mask,) = pruning.largest_of_groups(values, count, group).values()
    (value,) = values.values()
    for start in range(0, 8, group):
        part, kept = value[start : start + group], mask[start : start + group]
        assert (kept.sum(axis=0) == count).all()
        assert (np.sort(part, axis=0)[-count:] == np.sort(np.where(kept, part, -1), axis=0)[-count:]).all()


def test_wandas_score_is_the_weight_times_the_norm_of_its_input():
    params = {"layers.0.mlp.up_proj.kernel": np.array([[3.0, -1.0], [1.0, -2.0]])}
    found = pruning.scores(params, {"layers.0.mlp.up_proj.kernel": np.array([1.0, 10.0])})
    assert found["layers.0.mlp.up_proj.kernel"].tolist() == [[3.0, 1.0], [10.0, 20.0]]
    (mask,) = pruning.smallest_fraction(found, 0.5, scope="output").values()
    assert mask.tolist() == [[False, False], [True, True]], "by magnitude the first row's 3 would stay"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v: pruning.smallest_fraction(v, 1.0, scope="matrix"), "fraction=1.0 is outside"),
        (lambda v: pruning.smallest_fraction(v, -0.1, scope="matrix"), "fraction=-0.1"),
        (lambda v: pruning.smallest_fraction(v, float("nan"), scope="matrix"), "fraction=nan"),
        (lambda v: pruning.smallest_fraction(v, 0.5, scope="row"), "scope='row' is not one of matrix, output, global"),
        (lambda v: pruning.largest_of_groups(v, 4, 4), "4:4 keeps 4 of 4, wanted 1 to 3"),
        (lambda v: pruning.largest_of_groups(v, 2, 5), "has 8 inputs, which are no groups of 5"),
        (
            lambda v: pruning.apply(v, {"other": np.ones((2, 2), bool)}),
            "the mask of other is .2, 2., its parameter None",
        ),
        (lambda v: pruning.scores({"embed.embedding": np.ones((2, 2))}), "none of 1 parameters is a kernel"),
        (lambda v: pruning.scores(v, {}), "input norms of layers.0.mlp.up_proj.kernel are missing"),
        (lambda v: pruning.scores(v, {name: np.ones(7) for name in v}), r"are \(7,\), wanted \(8,\)"),
        (lambda v: pruning.scores(v, {name: np.full(8, np.nan) for name in v}), "from nan to nan, wanted finite"),
        (lambda v: pruning.scores(v, {name: np.full(8, -1.0) for name in v}), "from -1.0 to -1.0"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(kernel(0))


# Smaller decoders


@functools.cache
def program(config):
    def run(params, tokens):
        model = transformer.build(config, params_of(config), dtype="float64")
        graph, _ = optimizer_step.parameters.split(model)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        return optimizer_step.parameters.merge(graph, params)(tokens, positions)

    return jax.jit(run)


def logits(config, params):
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, (2, 12), dtype=np.int32)
    return np.asarray(program(config)({name: jnp.asarray(x) for name, x in params.items()}, tokens))


@FAMILIES
@pytest.mark.parametrize("use_norms", [False, True])
def test_a_smaller_decoder_computes_what_the_whole_one_does_without_the_removed_parts(x64, config, use_norms):
    params = params_of(config)
    norms = norms_for(params) if use_norms else None
    fewer, by_heads = structured.keep_heads(config, params, config.num_kv_heads // 2, input_norms=norms)
    smaller, found = structured.keep_width(fewer, by_heads, 20, input_norms=norms)
    assert (smaller.num_heads, smaller.num_kv_heads, smaller.d_ff) == (2, config.num_kv_heads // 2, 20)
    initial.check_params(initial.parameter_shapes(smaller), found)
    masked = dict(params)
    for i in range(config.num_layers):
        masked |= _without(masked, f"layers.{i}.attention.o_proj.kernel", found)
        masked |= _without(masked, f"layers.{i}.mlp.down_proj.kernel", found)
    np.testing.assert_allclose(logits(smaller, found), logits(config, masked), rtol=0, atol=1e-12)
    assert np.abs(logits(smaller, found) - logits(config, params)).max() > 1e-3


def _without(params, name, found):
    """Return a kernel with zeros in the rows that a smaller one does not have."""
    is_kept = (params[name][:, None, :] == found[name][None]).all(axis=2).any(axis=1)
    assert is_kept.sum() == len(found[name])
    return {name: np.where(is_kept[:, None], params[name], 0)}


def test_heads_go_with_their_key_value_head_and_the_weakest_goes_first(x64):
    params = params_of(LLAMA)
    weak = dict(params)
    width, group = LLAMA.head_dim, LLAMA.num_heads // LLAMA.num_kv_heads
    for name, columns in (("q_proj", group * width), ("k_proj", width), ("v_proj", width)):
        value = params[f"layers.1.attention.{name}.kernel"].copy()
        value[:, :columns] *= 1e-3  # the first key-value head of the second layer
        weak[f"layers.1.attention.{name}.kernel"] = value
    output = params["layers.1.attention.o_proj.kernel"].copy()
    output[: group * width] *= 1e-3
    weak["layers.1.attention.o_proj.kernel"] = output
    assert np.argmin(structured.head_scores(LLAMA, weak, "layers.1")) == 0
    _, found = structured.keep_heads(LLAMA, weak, 1)
    for name, columns in (("q_proj", group * width), ("k_proj", width), ("v_proj", width)):
        wanted = params[f"layers.1.attention.{name}.kernel"][:, columns:]
        np.testing.assert_array_equal(found[f"layers.1.attention.{name}.kernel"], wanted)


def test_units_are_judged_by_their_inputs_where_norms_are_given():
    params = params_of(LLAMA)
    norms = norms_for(params)
    norms["layers.0.mlp.down_proj.kernel"] = np.where(np.arange(LLAMA.d_ff) < 10, 1e6, 1e-6)
    _, found = structured.keep_width(LLAMA, params, 10, input_norms=norms)
    wanted = params["layers.0.mlp.gate_proj.kernel"][:, :10]
    np.testing.assert_array_equal(found["layers.0.mlp.gate_proj.kernel"], wanted)


def test_all_heads_and_units_kept_are_the_decoder_itself():
    params = params_of(QWEN2)
    for config, found in (structured.keep_heads(QWEN2, params, 2), structured.keep_width(QWEN2, params, 48)):
        assert config == QWEN2
        assert all(np.array_equal(found[name], params[name]) for name in params)


@pytest.mark.parametrize(("config", "heads"), [(LLAMA, 1), (QWEN2, 1), (GPT2, 4)], ids=["llama", "qwen2", "gpt2"])
def test_a_smaller_decoder_is_saved_and_read_again(tmp_path, config, heads):
    smaller, found = structured.keep_heads(config, params_of(config), heads)
    smaller, found = structured.keep_width(smaller, found, 20)
    read = weights.load_checkpoint(weights.save_checkpoint(tmp_path / "smaller", smaller, found))
    assert read.config == smaller.model_copy(update={"dropout": 0.0})
    assert all(np.array_equal(read.params[name], found[name]) for name in found)


UNGROUPED = LLAMA.model_copy(update={"num_kv_heads": 4})  # three of its heads do not divide its width


@pytest.mark.parametrize(
    ("config", "heads"), [(LLAMA, 1), (QWEN2, 1), (UNGROUPED, 3)], ids=["llama", "qwen2", "three heads"]
)
def test_transformers_computes_the_same_logits_of_a_smaller_decoder(tmp_path, config, heads):
    import transformers

    with jax.enable_x64(True):
        smaller, found = structured.keep_width(*structured.keep_heads(config, params_of(config), heads), 20)
        mine = logits(smaller, found)
    folder = weights.save_checkpoint(tmp_path / "smaller", smaller, {k: v.astype(np.float32) for k, v in found.items()})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, (2, 12), dtype=np.int32)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens).long()).logits.numpy()
    np.testing.assert_allclose(theirs, mine, rtol=0, atol=1e-5)


def test_gpt2_without_a_head_is_no_architecture_and_saving_says_so(tmp_path):
    smaller, found = structured.keep_heads(GPT2, params_of(GPT2), 3)
    with pytest.raises(ValueError, match="no Hugging Face architecture has .*num_heads=3"):
        weights.save_checkpoint(tmp_path / "smaller", smaller, found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: structured.keep_heads(LLAMA, p, 0), "num_kv_heads=0 is not between 1 and the decoder's 2"),
        (lambda p: structured.keep_heads(LLAMA, p, 3), "num_kv_heads=3"),
        (lambda p: structured.keep_width(LLAMA, p, 49), "d_ff=49 is not between 1 and the decoder's 48"),
        (lambda p: structured.keep_width(GPT2, p, 20), "parameters do not fit"),
        (lambda p: structured.keep_width(cases.GATED, p, 20), "layers of kind mag are not made smaller"),
    ],
)
def test_a_decoder_that_cannot_be_made_smaller_so_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(params_of(LLAMA))


# Training that keeps the zeros


def pruned_params(config):
    params = params_of(config)
    return pruning.apply(params, pruning.largest_of_groups(pruning.scores(params), 2, 4))


def trained(library, how, steps):
    """Return the training state's arrays after some steps of a backend, 2 of 4 weights zero before the first."""
    case = cases.find("transformer/llama-grouped")
    params = pruned_params(case.config)
    build, task, array = {
        "flax": (transformer.build, train, jnp.asarray),
        "torch": (torch_ref.transformer.build, torch_ref.train, torch.tensor),
    }[library]
    step_module = optimizer_step if library == "flax" else torch_ref.training.optimizer_step
    state = step_module.init_state(build(case.config, params, dtype=how.precision), params, how)
    step = functools.partial(step_module.train_step, step_config=how)
    step = jax.jit(step) if library == "flax" else step
    norms = []
    for i in range(steps):
        batch = task.Batch(*(None if x is None else array(x) for x in cases.arrays(case, case.config, step=i)))
        state, metrics = step(state, batch, 3e-3)
        norms.append(float(metrics.grad_norm))
    if how.optimizer.kind not in TWIN_OPTIMIZERS:  # whose moments have no names of their own
        return {"params": {name: np.asarray(x) for name, x in state.params.items()}}
    return step_module.state_arrays(state) | {"norms": {str(i): np.array(x) for i, x in enumerate(norms)}}


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_zeros_stay_and_both_backends_train_the_rest_alike_in_float64(x64, kind):
    how = StepConfig(precision="float64", accumulation=2, hold_zeros=True, optimizer=OptimizerConfig(kind=kind))
    mine, theirs = (trained(library, how, 12) for library in ("flax", "torch"))
    start = pruned_params(LLAMA)
    for part in mine:
        assert distance.compare(mine[part], theirs[part], kind=part).worst.error <= 1e-9, part
    for name in pruning.prunable(start):
        for params in (mine["params"], theirs["params"]):
            assert ((params[name] == 0) == (start[name] == 0)).all(), "the zeros are the same ones, no more, no fewer"
            assert np.abs(params[name] - start[name]).max() > 1e-3, "the rest moves"
        assert (mine["first_moment"][name][start[name] == 0] == 0).all(), "moments of zeros never start"


def test_without_hold_zeros_the_zeros_are_lost(x64):
    how = StepConfig(precision="float64")
    for library in ("flax", "torch"):
        assert pruning.count(trained(library, how, 2)["params"]).zeros == 0


@pytest.mark.parametrize("kind", ["muon", "lion", "adafactor"])
def test_zeros_stay_under_every_optimiser(kind):
    """Muon moves each weight by the whole matrix, so that a gradient of zero does not keep a weight at zero."""
    how = StepConfig(hold_zeros=True, optimizer=OptimizerConfig(kind=kind))
    found, start = trained("flax", how, 4)["params"], pruned_params(LLAMA)
    for name in pruning.prunable(start):
        assert ((found[name] == 0) == (start[name] == 0)).all()
        assert not np.array_equal(found[name], start[name].astype(np.float32))


@pytest.mark.parametrize("library", ["flax", "torch"])
def test_zero_biases_and_norms_are_trained_all_the_same(library):
    params = initial.initial_params(GPT2, 0)  # biases start from zeros
    case = cases.find("transformer/gpt2")
    how = StepConfig(hold_zeros=True)
    step_module = optimizer_step if library == "flax" else torch_ref.training.optimizer_step
    build, task, array = (transformer.build, train, jnp.asarray)
    if library == "torch":
        build, task, array = torch_ref.transformer.build, torch_ref.train, torch.tensor
    state = step_module.init_state(build(GPT2, params), params, how)
    batch = task.Batch(*(None if x is None else array(x) for x in cases.arrays(case, GPT2)))
    step = functools.partial(step_module.train_step, step_config=how)
    state, _ = (jax.jit(step) if library == "flax" else step)(state, batch, 1e-2)
    found = step_module.state_arrays(state)["params"]
    assert (params["layers.0.mlp.up_proj.bias"] == 0).all()
    assert np.count_nonzero(found["layers.0.mlp.up_proj.bias"]) > 0
