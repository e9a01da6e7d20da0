"""The step of a run: parity over 60 steps, micro-batches, clipping, loss scaling, rematerialisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._dynamo import utils as torch_dynamo
from torch._subclasses import fake_tensor

from jaxbench import initial, parameters, prng, remat, train, transformer
from jaxbench.parity import cases, distance, gates
from jaxbench.training import engine, optimizer_step, precision, schedules
from jaxbench.training.step_config import OptimizerConfig, RematConfig, StepConfig
from jaxbench.training.train_config import TrainConfig
from tests import curves
from torch_ref import prng as torch_prng
from torch_ref import train as torch_train
from torch_ref import transformer as torch_transformer
from torch_ref.training import engine as torch_engine
from torch_ref.training import optimizer_step as torch_update

pytestmark = pytest.mark.usefixtures("plain_codegen")

CASE = cases.find("transformer/llama-multi-query")
PLAIN_SGD = OptimizerConfig(kind="sgd", momentum=0.0, weight_decay=0.0)
SPECIAL = 63  # a first token that makes `fragile` infinite


def fragile(library, where):
    """Return a loss that is infinite where the first token is SPECIAL."""

    def loss(model, batch, *, dropout=None):
        broken = where(batch.tokens[0, 0] == SPECIAL, np.float32(np.inf), np.float32(1.0))
        return library.loss_fn(model, batch, dropout=dropout) * broken

    return loss


class Flax:
    """The step in JAX."""

    fragile = staticmethod(fragile(train, jnp.where))
    predict = staticmethod(train.predict)

    def __init__(self, how, loss_fn=train.loss_fn):
        config, params = cases.load(CASE)
        model = transformer.build(config, params, dtype=precision.POLICIES[how.precision].compute)
        self.library, self.state = optimizer_step, optimizer_step.init_state(model, params, how)
        self._step = jax.jit(functools.partial(optimizer_step.train_step, step_config=how, loss_fn=loss_fn))

    def batch(self, arrays):
        return train.Batch(*(None if x is None else jnp.asarray(x) for x in arrays))

    def step(self, arrays, rate, seed=None):
        key = None if seed is None else prng.key_from_seed(seed)
        self.state, metrics = self._step(self.state, self.batch(arrays), rate, key)
        return optimizer_step.Metrics(*map(np.asarray, metrics))


class Torch:
    """The step in PyTorch."""

    fragile = staticmethod(fragile(torch_train, lambda c, a, b: torch.tensor(a if c else b)))
    predict = staticmethod(torch_train.predict)

    def __init__(self, how, loss_fn=torch_train.loss_fn):
        config, params = cases.load(CASE)
        model = torch_transformer.build(config, params, dtype=precision.POLICIES[how.precision].parameter)
        self.library, self.state = torch_update, torch_update.init_state(model, params, how)
        self._options = {"step_config": how, "loss_fn": loss_fn}

    def batch(self, arrays):
        return torch_train.Batch(*(None if x is None else torch.tensor(x) for x in arrays))

    def step(self, arrays, rate, seed=None):
        key = None if seed is None else torch_prng.key_from_seed(seed)
        self.state, metrics = torch_update.train_step(self.state, self.batch(arrays), rate, key, **self._options)
        return optimizer_step.Metrics(*(x.numpy() for x in metrics))


BACKENDS = pytest.mark.parametrize("backend", [Flax, Torch])


def data(step=0):
    return cases.arrays(CASE, CASE.config, step=step)


def params_of(runner):
    return runner.library.state_arrays(runner.state)["params"]


# Parity


@pytest.mark.parametrize(
    ("kind", "accumulation", "clip_norm", "decay"), [("adamw", 2, 1.0, "matrices"), ("sgd", 1, None, "all")]
)
def test_sixty_steps_are_the_same_in_float64(x64, kind, accumulation, clip_norm, decay):
    optimizer = OptimizerConfig(kind=kind, decay=decay, weight_decay=0.1)
    how = StepConfig(precision="float64", accumulation=accumulation, clip_norm=clip_norm, optimizer=optimizer)
    schedule = schedules.ScheduleConfig(kind="cosine", warmup_steps=5)
    curves, states, starts = [], [], params_of(Flax(how))
    for backend in (Flax, Torch):
        runner = backend(how)
        rates = [schedules.learning_rate(schedule, i, peak=3e-3, steps=60) for i in range(60)]
        curve = [runner.step(data(i % 4), rate, seed=7) for i, rate in enumerate(rates)]
        curves.append({f"loss {i}": m.loss for i, m in enumerate(curve)} | {f"norm {i}": m.grad_norm for i, m in enumerate(curve)})  # fmt: skip  # noqa: E501
        states.append(runner.library.state_arrays(runner.state))
        if clip_norm is not None:
            assert min(m.grad_norm for m in curve[:20]) > clip_norm, "clipping must be at work"
    found = distance.compare(*curves, kind="training curve")
    assert found.worst.error <= 1e-9, found.worst
    assert states[0].keys() == states[1].keys() and len(states[0]) == (3 if kind == "adamw" else 2)
    for part in states[0]:
        compared = distance.compare(states[0][part], states[1][part], kind=part)
        assert compared.worst.error <= 1e-9, (part, compared.worst)
    moved = [np.abs(states[0]["params"][name] - starts[name]).max() for name in starts]
    assert min(moved) > 1e-4, "every parameter must move far above the tolerance"


def test_pytorch_steps_by_its_fused_adamw():
    assert Torch(StepConfig()).state.moments.defaults["fused"]


def test_a_float32_step_errs_as_little_on_either_backend(x64):
    """Loss, gradient (the first moment over 1 - b1) and its norm, against float64, within 1.5 times of each other."""

    def stepped(backend, name):
        runner = backend(StepConfig(precision=name, accumulation=2))
        metrics = runner.step(data(), 1e-3, seed=7)
        held = runner.library.state_arrays(runner.state)["first_moment"]
        return {"loss": metrics.loss}, held | {"norm": metrics.grad_norm}

    (scalars, moments), (others, other_moments) = stepped(Flax, "float32"), stepped(Torch, "float32")
    wanted, wanted_moments = stepped(Torch, "float64")
    kinds = {"outputs": (scalars, others, wanted), "gradients": (moments, other_moments, wanted_moments)}
    for kind, trees in kinds.items():
        slack = gates.SLACK_EPSILONS[kind, "float32"]
        found = distance.compare_errors(*trees, kind=kind, dtype="float32", slack_epsilons=slack)
        assert found.passed, found.first_failure
        assert kind == "outputs" or found.worst.error > 1e-9, "float32 must differ from float64"


def settings_of(model, step, seed=0, **data):
    """Return the settings of an engine of two rows."""
    run = {"batch_size": 2, "steps": 1, "learning_rate": 1e-3, "data": {"seq_len": CASE.length} | data}
    return TrainConfig(model=model.model_dump(), step=step, seed=seed, **run)


def curves_of(flax_step=StepConfig(), steps=300):
    """Return the curves of a one-layer model; flax_step is the configuration that Flax is given."""
    torch.set_num_threads(1)  # on a busy machine threads that wait for each other take minutes
    config = CASE.config.model_copy(update={"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2, "dropout": 0.0})
    makers = {
        "flax": lambda params: engine.Engine(settings_of(config, flax_step), config, params),
        "torch": lambda params: torch_engine.Engine(settings_of(config, StepConfig()), config, params),
    }
    batches = [cases.arrays(CASE, config, step=step) for step in range(8)]
    rows = [x._replace(segments=np.where(x.positions >= 0, 1, 0).astype(np.int32)) for x in batches]
    params = initial.initial_params(config, 0)
    return curves.record(makers, params, lambda: (rows[i % 8] for i in range(steps)), [3e-3] * steps, num_perturbed=4)


def test_three_hundred_float32_steps_stay_inside_the_noise_of_one_ulp():
    found = curves_of()
    assert found.torch[-1] < found.torch[0] - 0.5, "it must learn"
    assert min(np.abs(curve - found.torch).max() for curve in found.perturbed) > 0, "one ulp must show"
    assert all(gate.passed for gate in found.gates()), (found.gates(), found.gaps())


def test_the_noise_band_catches_a_step_that_is_slightly_wrong():
    wrong = StepConfig(optimizer=OptimizerConfig(eps=1e-6))  # instead of 1e-8
    found = curves_of(wrong, steps=40)
    assert not found.gates()[0].passed, found.gaps()


@pytest.fixture(scope="module")
def steps_of_rows():
    """Return a function: one step's loss, gradient norm and held-out sum of rows of documents, on a backend."""
    config = CASE.config.model_copy(update={"num_layers": 1, "dropout": 0.0})
    params = initial.initial_params(config, 0, distinct=True)
    arrays = cases.arrays(CASE, config)
    place = np.tile(np.arange(CASE.length, dtype=np.int32), (2, 1))

    @functools.cache
    def stepped(backend, cut, is_masked):
        is_behind = (place >= cut).astype(np.int32)
        rows = arrays._replace(positions=place - cut * is_behind, segments=1 + is_behind)
        settings = settings_of(config, StepConfig(accumulation=2), document_mask=is_masked)
        made = {"flax": engine, "torch": torch_engine}[backend].Engine(settings, config, params)
        held_out = made.evaluate(rows)
        metrics = made.fetch(made.step(rows, 1e-3))
        return {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "held_out": held_out[0]}

    return stepped


@pytest.mark.parametrize("cut", [5, CASE.length], ids=["packed", "one document"])
def test_without_a_document_mask_both_backends_take_the_same_step(steps_of_rows, cut):
    assert steps_of_rows("flax", cut, False) == pytest.approx(steps_of_rows("torch", cut, False), rel=1e-5)


@pytest.mark.parametrize("backend", ["flax", "torch"])
def test_a_document_mask_changes_rows_of_several_documents_and_no_other(steps_of_rows, backend):
    whole = steps_of_rows(backend, CASE.length, True)
    assert steps_of_rows(backend, CASE.length, False) == pytest.approx(whole, rel=1e-6)
    assert steps_of_rows(backend, 5, False) == pytest.approx(whole, rel=1e-6), "a token sees all of its row before it"
    for name, value in steps_of_rows(backend, 5, True).items():
        assert abs(value - whole[name]) > 1e-4 * abs(value), name


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_compiled_torch_step_is_the_eager_one_in_two_programs(monkeypatch, is_masked):
    """Traced whole, dropout included, once to begin a step's gradients and once to add to them; Inductor is slow, and
    left to the training suite."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch_dynamo.counters.clear()
    config = CASE.config.model_copy(update={"num_layers": 1})
    params = initial.initial_params(config, 0, distinct=True)
    eager, compiled = (
        torch_engine.Engine(settings_of(config, step, seed=7, document_mask=is_masked), config, params)
        for step in (StepConfig(accumulation=2, torch_compile=is_compiled) for is_compiled in (False, True))
    )
    assert eager.compile_seconds == 0 < compiled.compile_seconds
    for step in range(3):
        batch = cases.arrays(CASE, config, step=step)._replace(segments=np.ones((2, CASE.length), np.int32))
        losses = [engine.fetch(engine.step(batch, 1e-2)).loss for engine in (eager, compiled)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert distance.compare(compiled.params(), eager.params(), kind="params", tolerance=1e-5).passed
    assert torch_dynamo.counters["stats"]["unique_graphs"] == 2, "a step must not compile anew"


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_narrow_steps_stay_near_float32_on_both_backends(name):
    def curve(backend, precision_name):
        runner = backend(StepConfig(precision=precision_name))
        return np.array([runner.step(data(), 1e-2).loss for _ in range(8)], np.float64)

    wide = curve(Flax, "float32")
    assert wide[-1] < wide[0] - 0.2
    first, later = {"bfloat16": (1e-2, 5e-2), "float16": (1e-3, 3e-2)}[name]
    for backend in (Flax, Torch):
        error = np.abs(curve(backend, name) - wide)
        assert 1e-6 < error[0] < first and error.max() < later, error


# Micro-batches and clipping


@BACKENDS
def test_micro_batches_give_the_whole_batch_s_loss_and_gradient(backend):
    arrays = data()
    mask = arrays.mask.copy()
    mask[0, 3:] = False  # micro-batches with different numbers of targets
    found = []
    for count in (1, 2):
        runner = backend(StepConfig(accumulation=count, clip_norm=None, optimizer=PLAIN_SGD))
        before = params_of(runner)
        metrics = runner.step(arrays._replace(mask=mask), 1.0)
        found.append((metrics, {name: before[name] - value for name, value in params_of(runner).items()}))
    (one, gradient), (two, accumulated) = found
    assert two.loss == pytest.approx(one.loss, rel=1e-6) and two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert distance.compare(accumulated, gradient, kind="gradients").worst.error < 1e-5


@BACKENDS
@pytest.mark.parametrize("rows", [1, 2])
def test_micro_batches_without_targets_add_nothing_to_a_loss_of_one_s_own(backend, rows):
    def mean_logit(model, batch, *, dropout=None):  # 0 / 0 without targets
        logits = backend.predict(model, batch, dropout=dropout)[:, :, 0]
        return (logits * batch.mask).sum() / batch.mask.sum()

    arrays = data()
    mask = arrays.mask * (np.arange(2) >= rows)[:, None]
    second = arrays._replace(mask=arrays.mask * np.array([[False], [True]]))
    found, gradients = [], []
    for count, given in ((2, arrays._replace(mask=mask)), (1, second)):
        runner = backend(StepConfig(accumulation=count, clip_norm=None, optimizer=PLAIN_SGD), mean_logit)
        before = params_of(runner)
        found.append(runner.step(given, 1.0))
        gradients.append({name: before[name] - value for name, value in params_of(runner).items()})
    assert found[0].is_finite and found[0].loss == pytest.approx(found[1].loss if rows == 1 else 0, rel=1e-6)
    wanted = gradients[1] if rows == 1 else {name: np.zeros_like(x) for name, x in gradients[1].items()}
    assert all(np.allclose(gradients[0][name], x, rtol=1e-5, atol=1e-7) for name, x in wanted.items())


@BACKENDS
def test_rows_that_do_not_divide_into_micro_batches_are_refused(backend):
    with pytest.raises(ValueError, match="2 rows does not divide into accumulation=3"):
        backend(StepConfig(accumulation=3)).step(data(), 1.0)


@BACKENDS
@pytest.mark.parametrize("limit", [0.25, 1e6])
def test_the_gradient_is_scaled_down_to_the_limit_and_never_up(backend, limit):
    runner = backend(StepConfig(clip_norm=limit, optimizer=PLAIN_SGD))
    before = params_of(runner)
    norm = runner.step(data(), 1.0).grad_norm
    moved = np.sqrt(sum(np.square(before[name] - value).sum() for name, value in params_of(runner).items()))
    assert moved == pytest.approx(min(float(norm), limit), rel=1e-4)


# Loss scaling and steps that are not finite


@BACKENDS
def test_the_loss_scale_follows_grad_scaler_s_rules(backend):
    rules = precision.LossScaling(initial=2.0**22, growth=4.0, backoff=0.25, interval=2)
    runner = backend(StepConfig(precision="float16", loss_scaling=rules))
    steps = []
    for i in range(12):
        before = params_of(runner)
        steps.append(runner.step(data(i % 4), 1e-3))
        is_same = all((before[name] == value).all() for name, value in params_of(runner).items())
        assert is_same == (not steps[-1].is_finite)
    scale, good, skipped = 2.0**22, 0, 0
    for metrics in steps:
        assert metrics.loss_scale == scale
        good = good + 1 if metrics.is_finite else 0
        skipped += not metrics.is_finite
        scale = scale * 0.25 if not metrics.is_finite else scale * 4.0 if good == 2 else scale
        good = 0 if good == 2 else good
        assert metrics.skipped == skipped and np.isfinite(metrics.loss)
    assert 0 < skipped < 12 and max(m.loss_scale for m in steps[skipped:]) > min(m.loss_scale for m in steps)


@BACKENDS
@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_step_that_is_not_finite_changes_nothing_and_stop_lasts(backend, policy):
    runner = backend(StepConfig(nonfinite=policy), backend.fragile)
    broken = data()._replace(tokens=np.full_like(data().tokens, SPECIAL))
    whole = data()._replace(tokens=np.minimum(data().tokens, SPECIAL - 1))
    runner.step(whole, 1e-2)
    kept = runner.library.state_arrays(runner.state)
    metrics = runner.step(broken, 1e-2)
    assert not metrics.is_finite and metrics.skipped == 1 and np.isinf(metrics.loss)
    for part, values in runner.library.state_arrays(runner.state).items():
        assert all((values[name] == kept[part][name]).all() for name in values)
    metrics = runner.step(whole, 1e-2)
    is_same = all((value == kept["params"][name]).all() for name, value in params_of(runner).items())
    assert metrics.is_finite and is_same == (policy == "stop") and metrics.skipped == (2 if policy == "stop" else 1)


def test_a_run_s_step_writes_parameters_and_moments_where_they_lay():
    """Flax: the compiled step's results alias all of the state but scalars. PyTorch: every address stays."""
    config, params = cases.load(CASE)
    settings = settings_of(config, StepConfig())
    flax = engine.Engine(settings, config, params)
    held = sum(x.nbytes for x in jax.tree.leaves(flax.state) if x.ndim)
    assert held == 3 * 4 * sum(x.size for x in params.values())  # parameters and two moments in float32
    assert flax._step.memory_analysis().alias_size_in_bytes >= held
    runner = Torch(StepConfig())
    runner.step(data(), 1e-3)  # which makes the moments
    tensors = list(runner.state.params.parameters())
    tensors += [x for of in runner.state.moments.state.values() for x in of.values() if x.ndim]
    places, values = [x.data_ptr() for x in tensors], [x.detach().clone() for x in tensors]
    runner.step(data(1), 1e-3)
    assert [x.data_ptr() for x in tensors] == places
    assert not any(torch.equal(x, old) for x, old in zip(tensors, values, strict=True))


@pytest.mark.parametrize("how", [
    StepConfig(clip_norm=1.0, nonfinite="stop"), StepConfig(precision="float16", accumulation=2),
    StepConfig(optimizer=OptimizerConfig(kind="sgd")),
], ids=["adamw", "float16", "sgd"])  # fmt: skip
def test_a_step_in_pytorch_reads_no_value_from_the_device(how):
    """Tensors without values: reading one, for which the host of a GPU would wait, is an error."""
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        runner = Torch(how)
        key = torch_prng.key_from_seed(0)
        for _ in range(2):
            _, metrics = torch_update.train_step(runner.state, runner.batch(data()), 1e-3, key, step_config=how)
        with pytest.raises(fake_tensor.DataDependentOutputException):
            bool(metrics.is_finite)


def test_the_twin_says_what_it_lacks():
    with pytest.raises(ValueError, match="optimizer 'lion' is not in torch_ref, which has adamw, sgd;"):
        Torch(StepConfig(optimizer=OptimizerConfig(kind="lion")))


# Rematerialisation


def test_remat_keeps_gradients_and_what_the_backward_pass_is_handed_shrinks():
    config = cases.LLAMA.model_copy(update={"num_layers": 6, "dropout": 0.0})
    case = CASE._replace(config=config, length=64)
    _, params = cases.load(case)
    batch = train.Batch(*(None if x is None else jnp.asarray(x) for x in cases.arrays(case, config)))
    found, kept = {}, {}
    policies = {"none": {}, "block": {}, "group": {"group": 3}, "names": {"names": ("attention",)}}
    for policy, settings in policies.items():
        how = StepConfig(clip_norm=None, optimizer=PLAIN_SGD, remat=RematConfig(policy=policy, **settings))
        state = optimizer_step.init_state(transformer.build(config, params), params, how)
        loss = lambda values, graph=state.graph: train.loss_fn(parameters.merge(graph, values), batch)
        kept[policy] = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(loss, state.params)[1]))
        step = jax.jit(functools.partial(optimizer_step.train_step, step_config=how))
        found[policy] = optimizer_step.state_arrays(step(state, batch, jnp.float32(1.0))[0])["params"]
    for policy in ("block", "group", "names"):
        assert distance.compare(found[policy], found["none"], kind="params").worst.error < 1e-6
    assert kept["block"] < kept["names"] < kept["none"] / 2
    assert kept["group"] < kept["block"]


def test_remat_in_a_scan_keeps_the_loss_and_groups_are_refused():
    config, params = cases.load(CASE)
    model = transformer.build(config, params, scan_layers=True)
    batch = train.Batch(*(None if x is None else jnp.asarray(x) for x in data()))
    plain = train.loss_fn(model, batch)
    assert float(train.loss_fn(remat.apply(model, policy="block"), batch)) == pytest.approx(float(plain))
    with pytest.raises(ValueError, match="groups of 2 blocks need scan_layers=False"):
        remat.apply(model, policy="group", group=2)
    with pytest.raises(ValueError, match=r"names \['query'\] are unknown"):
        remat.apply(model, policy="names", names=("query", "mlp"))
