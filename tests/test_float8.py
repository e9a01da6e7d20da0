"""8-bit products against numpy with ml_dtypes, the scales' history, and the training step around them."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxbench import float8, initial, train, transformer
from jaxbench.config import TransformerConfig
from jaxbench.mesh import MeshConfig, ParallelConfig
from jaxbench.training import optimizer_step
from jaxbench.training.engine import Engine
from jaxbench.training.precision import DelayedScaling
from jaxbench.training.step_config import StepConfig
from jaxbench.training.train_config import TrainConfig
from torch_ref import transformer as torch_transformer
from torch_ref.training import optimizer_step as torch_update

pytestmark = pytest.mark.usefixtures("plain_codegen")

CONFIG = TransformerConfig(
    vocab_size=32, d_model=16, d_ff=24, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, max_seq_len=16
)
PARAMS = initial.initial_params(CONFIG, 0, distinct=True)
HOW = StepConfig(precision="float8", delayed_scaling=DelayedScaling(history=3), nonfinite="skip")
E4M3, E5M2 = (ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)
ROWS, LENGTH, SPECIAL = 4, 8, 31


def rounded(x, scale, kind):
    """Return x as 8 bits hold it, and the scale: its own where the given one is 0."""
    dtype, limit = kind
    scale = np.float32(scale or limit / np.abs(x).max())
    return np.clip(x * scale, -limit, limit).astype(dtype).astype(np.float64), float(scale)


def oracle(x, kernel, grad, scales):
    """Return the product, both gradients, and the largest magnitudes."""
    (a, sa), (b, sb), (g, sg) = map(rounded, (x, kernel, grad), scales, (E4M3, E4M3, E5M2))
    return a @ b / (sa * sb), g @ b.T / (sg * sb), a.T @ g / (sa * sg), [np.abs(t).max() for t in (x, kernel, grad)]


@pytest.mark.parametrize("is_column", [True, False])
@pytest.mark.parametrize("scales", [(0.0, 0.0, 0.0), (20.0, 300.0, 4096.0), (2000.0, 1.0, 1e9)])
def test_a_product_and_its_gradients_are_those_of_numpy_with_eight_bits(scales, is_column):
    if not is_column and 0.0 in scales:
        pytest.skip("a row holds scales that are known")
    random = np.random.default_rng(0)
    x, kernel, grad = (random.normal(size=shape).astype(np.float32) for shape in ((6, 5), (5, 7), (6, 7)))
    kernel, grad = kernel / 20, grad * np.float32(1e-4)

    @jax.jit
    def run(x, kernel, scales, grad):
        product, pull = jax.vjp(float8.matmul, x, kernel, scales)
        return product, *pull(grad)

    given = np.array(scales, np.float32)
    product, x_grad, kernel_grad, seen = run(x, kernel, given[:, None] if is_column else given, grad)
    assert seen.shape == ((3, 1) if is_column else (3,))
    for found, wanted in zip((product, x_grad, kernel_grad, np.ravel(seen)), oracle(x, kernel, grad, scales)):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6 * np.abs(wanted).max())
    if scales[0] == 20.0:
        exact = x.astype(np.float64) @ kernel
        assert 1e-3 < np.linalg.norm(product - exact) / np.linalg.norm(exact) < 0.06


def test_the_scale_puts_the_largest_magnitude_of_the_history_on_the_limit():
    history = {"layers.0.mlp.up_proj.scales": jnp.array([[1.0, 7.0, 2.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])}
    found = float8.scales(history, margin=1)["layers.0.mlp.up_proj.scales"]
    np.testing.assert_allclose(found, [448 / 7 / 2, 448 / 0.5 / 2, 0.0])


# The step


def batch(first=0):
    ids = np.random.default_rng(1).integers(0, SPECIAL, (ROWS, LENGTH + 1), dtype=np.int32)
    ids[0, 0] = first
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    mask = np.ones((ROWS, LENGTH), bool)
    return train.Batch(ids[:, :-1], ids[:, 1:], positions, mask, np.zeros((ROWS, LENGTH), np.int32))


def made(**settings):
    """Return an engine; settings: those of the run that are its own."""
    run = {"batch_size": ROWS, "steps": 1, "learning_rate": 1e-3, "data": {"seq_len": LENGTH}, "step": HOW}
    return Engine(TrainConfig(**(run | {"model": CONFIG.model_dump()} | settings)), CONFIG, PARAMS)


@pytest.mark.parametrize("is_known", [True, False])
def test_magnitudes_so_small_that_their_scale_would_be_infinite_give_no_nan(is_known):
    x, kernel = jnp.array([[0.0, 1e-36, -5e-37]]), jnp.full((3, 2), 0.05)
    seen = {"a": jnp.array([[1e-36, 0.0], [0.05, 0.0], [1e-36, 0.0]])}
    scales = float8.scales(seen, 0)["a"] if is_known else jnp.zeros((3, 1))
    product, pull = jax.vjp(lambda x, kernel: float8.matmul(x, kernel, scales), x, kernel)
    found = jax.tree.leaves((product, pull(jnp.full((1, 2), 1e-36))))
    assert all(bool(jnp.isfinite(each).all()) for each in found)
    assert not is_known or bool(jnp.isfinite(scales).all())


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_does_not_become_the_largest_value(value):
    scales = jnp.array([100.0, 100.0, 100.0])
    product, pull = jax.vjp(lambda x, kernel: float8.matmul(x, kernel, scales), jnp.ones((2, 3)), jnp.ones((3, 2)))
    grads = pull(jnp.ones((2, 2)).at[0, 0].set(value))
    assert np.isnan(grads[0][0]).all() and np.isnan(grads[1][:, 0]).all()  # all that it reaches
    assert np.isfinite(grads[0][1]).all() and np.isfinite(grads[1][:, 1]).all()
    found = float8.matmul(jnp.ones((2, 3)).at[0, 0].set(value), jnp.ones((3, 2)), scales)
    assert np.isnan(found[0]).all() and np.array_equal(found[1], product[1])


@pytest.fixture(scope="module")
def engine():
    """Return an engine whose steps are the tests' own; each test starts from its own copy of the state."""
    return made()


def steps(engine, count):
    return [engine.fetch(engine.step(batch(), 1e-2)).loss for _ in range(count)]


def test_the_history_holds_what_the_last_steps_saw_and_lies_in_the_checkpoint(engine):
    start = engine.arrays()
    name = "layers.1.mlp.down_proj"
    start = {key: np.array(value) for key, value in start.items()}
    kernels = []
    for _ in range(4):
        kernel = np.asarray(engine.state.params[f"{name}.kernel"]).astype(ml_dtypes.bfloat16)
        kernels.append(np.abs(kernel.astype(np.float32)).max())
        steps(engine, 1)
    saved = {key: np.array(value) for key, value in engine.arrays().items()}
    history = saved[f"amax.{name}.scales"]
    np.testing.assert_array_equal(history[1], kernels[:0:-1])  # the newest first, the oldest gone
    assert (history > 0).all() and sum(key.startswith("amax.") for key in saved) == 7 * CONFIG.num_layers
    went_on = steps(engine, 2)
    engine.load(saved)
    assert steps(engine, 2) == went_on
    engine.load({key: value / 9 if key.startswith("amax.") else value for key, value in saved.items()})
    assert steps(engine, 2) != went_on
    engine.load(start)


def test_training_in_eight_bits_stays_near_float32(engine):
    start = {key: np.array(value) for key, value in engine.arrays().items()}
    narrow = np.array(steps(engine, 8))
    engine.load(start)
    how = HOW.model_copy(update={"precision": "float32"})
    model = transformer.build(CONFIG, PARAMS)
    state, step = (
        optimizer_step.init_state(model, PARAMS, how),
        jax.jit(functools.partial(optimizer_step.train_step, step_config=how)),
    )
    wide = []
    for _ in range(8):
        state, metrics = step(state, batch(), 1e-2)
        wide.append(float(metrics.loss))
    error = np.abs(narrow - wide)
    assert wide[-1] < wide[0] - 0.2 and 1e-5 < error[0] < 0.05 and error.max() < 0.15, error
    assert engine.evaluate(batch())[0] / (ROWS * LENGTH) == pytest.approx(wide[0], abs=0.05)


def test_micro_batches_see_the_largest_of_all_and_a_skipped_step_is_not_remembered():
    def fragile(model, data, *, dropout=None):
        return train.loss_fn(model, data) * jnp.where(data.tokens[0, 0] == SPECIAL, jnp.inf, 1.0)

    found = []
    for count in (1, 2):
        how = HOW.model_copy(update={"accumulation": count})
        state = optimizer_step.init_state(transformer.build(CONFIG, PARAMS, dtype="bfloat16"), PARAMS, how)
        step = jax.jit(functools.partial(optimizer_step.train_step, step_config=how, loss_fn=fragile))
        state, _ = step(state, batch(), 1e-2)
        found.append(state.amax)
        skipped, metrics = step(state, batch(SPECIAL), 1e-2)
        assert not metrics.is_finite
        jax.tree.map(np.testing.assert_array_equal, skipped.amax, state.amax)
    name = "layers.0.attention.q_proj.scales"
    np.testing.assert_array_equal(found[0][name][:2, 0], found[1][name][:2, 0])


def test_norms_of_queries_and_keys_stay_wide():
    config = CONFIG.model_copy(update={"qk_norm": True})
    params = initial.initial_params(config, 0)
    attention = float8.apply(transformer.build(config, params)).layers[0].attention
    assert attention.q_proj.scales is not None and not hasattr(attention.q_norm, "scales")
    assert float8.names(params) == float8.names(PARAMS)


def test_what_does_not_go_with_eight_bits_is_refused():
    with pytest.raises(ValueError, match="fused_projections=1 is not supported"):
        float8.apply(transformer.build(CONFIG, PARAMS, projection_groups=1))
    with pytest.raises(ValueError, match="precision=float8 is not in torch_ref"):
        torch_update.init_state(torch_transformer.build(CONFIG, PARAMS), PARAMS, HOW)
    for how in (ParallelConfig(micro_batches=2), ParallelConfig(gradient_type="bfloat16")):
        with pytest.raises(
            ValueError, match="precision=float8 needs stage=1, micro_batches=1 and gradient_type=full, got"
        ):
            made(batch_size=16, parallel=how)


def test_what_a_checkpoint_keeps_of_a_product_are_its_bits():
    random = np.random.default_rng(2)
    x, kernel = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((6, 5), (5, 7)))
    assert float(jnp.abs(float8.quantise(x, jnp.zeros(1), float8.FORWARD)[0].astype(jnp.float32)).max()) == 448.0

    def gradients(around):
        loss = around(lambda x, kernel: jnp.sum(jnp.sin(float8.matmul(x, kernel, jnp.zeros((3, 1))))))
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernel)

    everything = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
    jax.tree.map(np.testing.assert_array_equal, gradients(everything), gradients(lambda loss: loss))


@pytest.mark.parametrize("zero", [2, 3])
def test_a_mesh_rounds_by_the_magnitudes_of_all_its_devices(engine, zero):
    start = engine.arrays()
    start = {key: np.array(value) for key, value in start.items()}
    how = ParallelConfig(mesh=MeshConfig(data=2, fsdp=2, model=2), zero=zero)
    meshed = made(parallel=how)
    alone, found = steps(engine, 1), steps(meshed, 1)
    seen, wanted = meshed.arrays(), engine.arrays()
    for name in (key for key in wanted if key.startswith("amax.")):
        ratio = np.asarray(seen[name])[:, 0] / np.asarray(wanted[name])[:, 0]
        assert ratio[1] == 1.0, name  # the kernel's: no rounding of another order reaches it
        assert abs(ratio - 1).max() < 0.1, name
    first = "amax.layers.0.attention.q_proj.scales"
    np.testing.assert_array_equal(np.asarray(seen[first])[0], np.asarray(wanted[first])[0])
    assert alone + steps(engine, 3) == pytest.approx(found + steps(meshed, 3), rel=5e-3)
    engine.load(start)
