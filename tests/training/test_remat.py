"""Rematerialisation in PyTorch: nothing but memory changes, which is counted in bytes and not measured."""

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jaxbench import config, functional, parameters, prng, train, transformer
from jaxbench import remat as jax_remat
from jaxbench.parity import cases, distance
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import OptimizerConfig, RematConfig, StepConfig
from jaxbench.training.train_config import TrainConfig
from tests.structure import ROOT
from torch_ref import functional as torch_functional
from torch_ref import prng as torch_prng
from torch_ref import remat
from torch_ref import train as torch_train
from torch_ref import transformer as torch_transformer
from torch_ref.training import engine as torch_engine
from torch_ref.training import optimizer_step as torch_update

CONFIG = cases.LLAMA.model_copy(update={"num_layers": 4, "dropout": 0.1})
CASE = cases.find("transformer/llama-multi-query")._replace(config=CONFIG, length=64)
PLAIN_SGD = OptimizerConfig(kind="sgd", momentum=0.0, weight_decay=0.0)
POLICIES = {"none": RematConfig(), "block": RematConfig(policy="block"), "group": RematConfig(policy="group", group=3)}
SEED = 7


def arrays():
    return cases.arrays(CASE, CONFIG)


def decoder(policy, dtype="float64"):
    """Decoder with a policy applied, and its batch."""
    model = torch_transformer.build(CONFIG, cases.load(CASE)[1], dtype=dtype)
    batch = torch_train.Batch(*(None if x is None else torch.tensor(x) for x in arrays()))
    return remat.apply(model.requires_grad_(True), **POLICIES[policy].model_dump()), batch


def gradients(policy):
    """Loss and gradients of every parameter, with dropout."""
    model, batch = decoder(policy)
    loss = torch_train.loss_fn(model, batch, dropout=torch_functional.DropoutStream(torch_prng.key_from_seed(SEED), 3))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def storage(tensor):
    return tensor.untyped_storage()


def handed_over(policy):
    """Bytes that the backward pass is handed: storages of saved tensors, each once, without the parameters."""
    model, batch = decoder(policy)
    own = {storage(p)._cdata for p in model.parameters()}
    found = weakref.WeakSet()  # what is saved for a part that no loss comes from is freed before the forward pass ends

    def pack(tensor):
        if storage(tensor)._cdata not in own:
            found.add(storage(tensor))
        return tensor.detach()  # the tensor itself would hold the node that holds it

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = torch_train.loss_fn(
            model, batch, dropout=torch_functional.DropoutStream(torch_prng.key_from_seed(SEED), 3)
        )
    assert loss.requires_grad
    return sum(one.nbytes() for one in found)


class Peak(TorchDispatchMode):
    """Most bytes of tensors made within it that were alive at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self._known = 0, 0, weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {storage(x)._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and storage(tensor)._cdata not in given:
                self._count(storage(tensor))
        return result

    def _count(self, made):
        if made not in self._known:
            size = made.nbytes()
            self._known[made] = size
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(made, self._free, size)

    def _free(self, size):
        self.alive -= size


def peak_bytes(policy):
    """Most bytes alive at once in one forward and backward pass, without parameters and batch."""
    model, batch = decoder(policy)
    with Peak() as counted:
        torch_train.loss_fn(
            model, batch, dropout=torch_functional.DropoutStream(torch_prng.key_from_seed(SEED), 3)
        ).backward()
    assert counted.alive == sum(p.nbytes for p in model.parameters()), "gradients alone are left"
    return counted.peak


# What stays the same


@pytest.mark.parametrize("policy", ["block", "group"])
def test_loss_and_all_gradients_are_bit_for_bit_those_without_it(policy):
    (plain_loss, plain), (loss, found) = gradients("none"), gradients(policy)
    assert loss == plain_loss and found.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


@pytest.mark.parametrize("policy", ["block", "group"])
def test_loss_and_gradients_are_those_of_flax_with_the_same_policy(x64, policy):
    how = StepConfig(precision="float64", clip_norm=None, optimizer=PLAIN_SGD, remat=POLICIES[policy])
    params = cases.load(CASE)[1]
    state = optimizer_step.init_state(transformer.build(CONFIG, params, dtype="float64"), params, how)
    batch = train.Batch(*(None if x is None else jnp.asarray(x) for x in arrays()))
    dropout = functional.DropoutStream(prng.key_from_seed(SEED), 3)
    run = lambda values: train.loss_fn(parameters.merge(state.graph, values), batch, dropout=dropout)
    expected_loss, expected = jax.jit(jax.value_and_grad(run))(state.params)
    loss, found = gradients(policy)
    assert abs(float(loss) / float(expected_loss) - 1) <= distance.TOLERANCE_FLOAT64
    named = [{name: np.asarray(x) for name, x in one.items()} for one in (found, expected)]
    compared = distance.compare(*named, kind="gradients")
    assert compared.passed, compared.worst


def test_a_step_takes_its_policy_from_its_configuration():
    states = []
    for policy in ("none", "block"):
        how = StepConfig(precision="float64", remat=POLICIES[policy])
        model, batch = decoder("none")
        state = torch_update.init_state(model, cases.load(CASE)[1], how)
        assert state.params.remat_group == (policy == "block")
        key = torch_prng.key_from_seed(SEED)
        state, metrics = torch_update.train_step(state, batch, 1e-2, key, step_config=how)
        states.append(torch_update.state_arrays(state)["params"])
        assert metrics.is_finite
    assert all((states[0][name] == states[1][name]).all() for name in states[0])


@pytest.mark.parametrize("group", [0, -1])
def test_groups_of_no_block_are_refused(group):
    """-1 would leave out every block."""
    models = (transformer, jax_remat), (torch_transformer, remat)
    for build, own in ((module.build, own) for module, own in models):
        model = build(CONFIG, cases.load(CASE)[1])
        with pytest.raises(ValueError, match=f"remat: policy='group' with group={group}, wanted at least 1 block"):
            own.apply(model, policy="group", group=group)


def test_a_policy_that_neither_twin_has_is_refused():
    model = transformer.build(CONFIG, cases.load(CASE)[1])
    with pytest.raises(ValueError, match="remat: policy='blocks' is unknown, wanted one of none, block, group, names"):
        jax_remat.apply(model, policy="blocks")


def test_without_gradients_and_with_a_cache_blocks_run_as_ever():
    found = []
    for policy in POLICIES:
        model, batch = decoder(policy)
        with torch.no_grad():
            hidden, cache = model.features(batch.tokens, None)
            again, _ = model.features(batch.tokens[:, -1:], None, cache=padded(cache), slot=CASE.length)
        found.append((hidden, again))
    assert all(torch.equal(x, y) for one in found[1:] for x, y in zip(one, found[0]))


def padded(cache):
    """Cache with one empty slot more."""
    grown = [tuple(torch.nn.functional.pad(x, (0, 1) if i == 0 else (0, 0, 0, 1)) for x in cache[i]) for i in (0, 1)]
    return cache._replace(keys=grown[0], values=grown[1])


def test_a_later_policy_takes_the_place_of_an_earlier_one():
    model, _ = decoder("group")
    remat.apply(model, policy="none")
    assert model.remat_group == 0
    remat.apply(model, policy="group", group=2)
    assert model.remat_group == 2


# What it saves, in bytes


def test_the_backward_pass_is_handed_less_by_block_and_least_by_group():
    none, block, group = (handed_over(policy) for policy in POLICIES)
    inputs = CONFIG.num_layers * arrays().tokens.size * CONFIG.d_model * 8
    assert group < block < none / 10
    assert block - group == inputs - inputs // 2, "two groups keep two of the four inputs"


def test_most_bytes_alive_at_once_are_fewer_than_half_with_block():
    none, block, group = (peak_bytes(policy) for policy in POLICIES)
    assert block < none / 2
    assert block < group < none, "a group's blocks are all computed before the backward pass goes through them"


# What is refused, and the compiler


@pytest.mark.parametrize("policy", ["names", "offload"])
def test_policies_of_named_values_are_refused(policy):
    how = StepConfig(remat=RematConfig(policy=policy, names=("mlp",)))
    settings = config.load(ROOT / "configs/lm/tiny.yaml", [f"step.remat.policy={policy}"], TrainConfig)
    model, _ = decoder("none", "float32")
    with pytest.raises(ValueError, match=f"policy='{policy}' with names .'mlp'.*have no names for values"):
        torch_update.init_state(model, cases.load(CASE)[1], how)
    with pytest.raises(ValueError, match="names 'mlp', wanted none"):
        remat.checkpointed(torch.sin, ("mlp",), offload=False)
    with pytest.raises(ValueError, match=f"step.remat.policy={policy} is not in torch_ref, which has none, block"):
        torch_engine.Engine(settings, CONFIG, cases.load(CASE)[1])


@pytest.mark.parametrize("policy", ["block", "group"])
def test_the_traced_loss_has_the_same_gradients(monkeypatch, policy):
    """Traced whole; what Inductor makes of it is left to the training suite."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    expected_loss, expected = gradients("none")
    model, batch = decoder(policy)
    loss = torch_engine._CompiledLoss()(
        model, batch, dropout=torch_functional.DropoutStream(torch_prng.key_from_seed(SEED), 3)
    )
    loss.backward()
    named = [{"loss": np.asarray(one)} for one in (loss.detach(), expected_loss)]
    assert distance.compare(*named, kind="loss").passed
    found = {name: p.grad.numpy() for name, p in model.named_parameters()}
    compared = distance.compare(found, {name: x.numpy() for name, x in expected.items()}, kind="gradients")
    assert compared.passed, compared.worst
