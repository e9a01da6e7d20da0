"""The memory bank against lists in numpy, and what must hold of it, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench.memory import bank, bank_config, layout, resize
from jaxbench.memory.bank_config import AGE_EDGES, BankConfig, initial_params, memory_stats
from jaxbench.training import checkpoint
from tests.memory.bank_oracle import Oracle
from tests.structure import ROOT
from torch_ref.memory import bank as torch_bank
from torch_ref.memory import resize as torch_resize

pytestmark = pytest.mark.usefixtures("x64")

TINY = BankConfig(d_model=10, num_heads=2, head_dim=6, block_size=4, recent_blocks=2, memory_slots=4, ratio=2)
KINDS = ("mean", "max", "conv", "most_used", "learned")
LENGTH = 27  # 6 blocks and 3 tokens: 2 recent blocks, 4 compressed ones, of which 2 are evicted


@functools.cache
def layer(config=TINY, dtype="float64"):
    """Return a compiled bank as read(x, state, is_token), the model, its PyTorch twin and the parameters."""
    params = initial_params(config, 0, distinct=True)
    params = {name: 3.0 * x if name != "o_proj.kernel" else x for name, x in params.items()}  # attention that chooses
    model = bank.build(config, params, dtype=dtype)

    @jax.jit
    def read(x, state=None, is_token=None):
        return model(x, state, is_token=is_token)

    return read, model, torch_bank.build(config, params, dtype=dtype), params


def kind_of(kind):
    return TINY.model_copy(update={"compression": kind})


def stream(length=LENGTH, rows=2, dtype="float64", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, length, TINY.d_model)), dtype)


def worst(one, other):
    """Return the largest difference of the leaves of two trees."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()) for a, b in pairs)


def project(answer, params, own=0.0):
    gate = 1 / (1 + np.exp(-params["gate"]))
    mixed = gate * answer + (1 - gate) * own
    return mixed.reshape(*mixed.shape[:-2], -1) @ params["o_proj.kernel"]


def test_surprise_decides_how_many_slots_a_block_gets():
    config = TINY.model_copy(update={"block_size": 6, "ratio": 1, "memory_slots": 12, "min_surprise": 0.6})
    read, _, twin, params = layer(config)
    # The second half of the first row repeats itself: its blocks become one slot each.
    x = stream(length=45).at[0, 12:].set(jnp.linspace(1.0, 2.0, 33)[:, None] * stream()[0, :1])
    answers, state, loss = read(x)
    oracles = [Oracle(config, params) for _ in range(2)]
    wanted = [project(oracle.read_all(np.asarray(row)), params) for oracle, row in zip(oracles, x)]
    assert worst(answers, np.stack(wanted)) < 1e-12
    assert float(loss) == pytest.approx(np.mean([oracle.losses for oracle in oracles]), rel=1e-12)
    for row, oracle in enumerate(oracles):
        number = len(oracle.slots)
        assert (int(state.num_slots[row]), int(state.evicted[row])) == (number, oracle.evicted)
        assert worst(state.slots[row, :number], np.stack(oracle.slots)) < 1e-12
        assert float(jnp.abs(state.slots[row, number:]).sum()) == 0.0
    made = [len(oracle.slots) + oracle.evicted for oracle in oracles]
    ratios = memory_stats(state).compression_ratio
    assert ratios.tolist() == [30 / made[0], 30 / made[1]] and ratios[0] > 1.5 * ratios[1] > 1.5
    assert [int(n) for n in state.compressed] == [oracle.compressed for oracle in oracles] == [30, 30]
    with torch.no_grad():
        assert worst(tuple(twin(as_torch(x))), (answers, state, loss)) < 1e-12
        plain = layer(config.model_copy(update={"min_surprise": None}))[2](as_torch(x))[1]
    assert memory_stats(plain).compression_ratio.tolist() == [1.0, 1.0]


def test_a_surprise_limit_that_nothing_stays_under_changes_no_bit():
    config = TINY.model_copy(update={"compression": "mean", "min_surprise": 0.0})
    found, wanted = layer(config)[0](stream()), layer(kind_of("mean"))[2]
    with torch.no_grad():
        assert worst(found, tuple(wanted(as_torch(stream())))) < 1e-12


def test_equal_states_share_a_slot_whatever_the_cosine_rounds_to():
    config = TINY.model_copy(update={"block_size": 8, "ratio": 1, "memory_slots": 8, "min_surprise": 0.0})
    _, model, twin, _ = layer(config, "float32")
    x = np.random.default_rng(0).standard_normal((64, 1, TINY.d_model)).astype("float32")
    x = np.repeat(x, 8, axis=1) * np.linspace(0.3, 3.0, 8, dtype="float32")[:, None]  # of one direction
    assert np.asarray(jax.jit(model._allocate_slots)(x)[1]).tolist() == [1] * 64
    assert twin._allocate_slots(torch.from_numpy(x))[1].tolist() == [1] * 64


@pytest.mark.parametrize("kind", KINDS)
def test_the_bank_answers_what_lists_answer(kind):
    config = kind_of(kind)
    read, model, twin, params = layer(config)
    with torch.no_grad():
        answers, state, loss = twin(as_torch(stream()))
    if kind in ("conv", "most_used"):
        assert worst(read(stream()), (answers, tuple(state), loss)) < 1e-12
    oracles = [Oracle(config, params) for _ in range(2)]
    wanted = [project(oracle.read_all(np.asarray(row)), params) for oracle, row in zip(oracles, stream())]
    assert worst(answers, np.stack(wanted)) < 1e-12
    assert float(loss) == pytest.approx(np.mean([oracle.losses for oracle in oracles]), rel=1e-12)
    for name in ("slots", "recent", "mass"):
        assert worst(getattr(state, name), np.stack([getattr(oracle, name) for oracle in oracles])) < 1e-12
    assert [oracle.evicted for oracle in oracles] == state.evicted.tolist() == [4, 4]
    block, mass = stream(length=4), np.random.default_rng(3).random((2, 4))
    found = model._compress(block, jnp.asarray(mass))
    assert worst(found, np.stack([o.compress(*each) for o, *each in zip(oracles, np.asarray(block), mass)])) < 1e-12


def test_own_attention_is_mixed_in_through_the_gate():
    _, model, _, params = layer()
    own = np.random.default_rng(1).standard_normal((2, LENGTH, 2, 6))
    answers, _, _ = jax.jit(lambda x, own: model(x, attention_out=own))(stream(), jnp.asarray(own))
    wanted = [Oracle(TINY, params).read_all(np.asarray(row)) for row in stream()]
    assert worst(answers, project(np.stack(wanted), params, own)) < 1e-12


def test_an_empty_bank_answers_zero_and_its_gradient_is_finite():
    _, model, _, _ = layer()
    answers, grad = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.abs(model(x)[0]))))(stream(length=4))
    assert float(answers) == 0.0 and bool(jnp.isfinite(grad).all())


def test_token_by_token_equals_whole_blocks_and_a_sequence_may_be_cut_anywhere():
    read, _, _, _ = layer(kind_of("most_used"))
    wanted, end, _ = read(stream())
    answers, state = [], None
    for t in range(LENGTH):
        answer, state, _ = read(stream()[:, t : t + 1], state)
        answers.append(answer)
    assert worst((jnp.concatenate(answers, axis=1), state), (wanted, end)) < 1e-12
    first, state, _ = read(stream()[:, :10])
    rest, state, _ = read(stream()[:, 10:], state)
    assert worst((jnp.concatenate([first, rest], axis=1), state), (wanted, end)) < 1e-12


def test_padding_changes_nothing_and_is_answered_with_zeros():
    read, _, _, params = layer()
    is_token = np.random.default_rng(2).random((2, LENGTH)) < 0.8
    x = jnp.where(is_token[:, :, None], stream(), 1e3)
    answers, state, _ = read(x, None, jnp.asarray(is_token))
    assert float(jnp.abs(answers[~is_token]).max()) == 0.0
    for row in range(2):
        wanted = project(Oracle(TINY, params).read_all(np.asarray(x[row, is_token[row]])), params)
        assert worst(answers[row, is_token[row]], wanted) < 1e-12
    assert state.count.tolist() == (is_token.sum(axis=1) % TINY.block_size).tolist()


def test_a_token_changes_no_answer_before_it():
    read, _, _, _ = layer()
    x = stream(rows=1)
    answers, _, _ = read(jnp.concatenate([x, *(x.at[:, t].add(0.5) for t in range(LENGTH))]))
    change = jnp.abs(answers[1:] - answers[:1]).max(axis=-1)  # [changed token, answer]
    assert float(change[np.tril(np.ones((LENGTH, LENGTH), bool), -1)].max()) == 0.0
    behind = [float(change[t, t + 4 :].max()) for t in range(LENGTH - 8)]
    assert min(behind) > 1e-9


def test_rows_are_independent_and_reset_one_by_one():
    read, model, _, _ = layer(kind_of("most_used"))
    _, state, _ = read(stream()[:, :10])
    state = jax.jit(model.reset)(state, jnp.asarray([False, True]))
    rest = stream()[:, 10:]
    answers, after, _ = read(rest, state)
    assert float(jnp.abs(answers[1, :4]).max()) == 0.0 and after.num_slots.tolist() == [4, 4]
    others, _, _ = read(rest.at[1].set(7.0), state)
    assert bool((others[0] == answers[0]).all()) and bool((others[1] != answers[1]).any())


def test_the_loss_trains_the_compression_and_nothing_else():
    _, model, _, _ = layer()
    graph, params = bank.nnx.split(model)

    def loss(params, x):
        return bank.nnx.merge(graph, params)(x)[2]

    grads, by_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, stream())
    found = {".".join(map(str, path)): float(jnp.abs(leaf[...]).max()) for path, leaf in bank.nnx.to_flat_state(grads)}
    assert found.pop("compress.kernel") > 1e-6
    assert set(found.values()) == {0.0} and float(jnp.abs(by_x).max()) == 0.0


def test_growing_and_shrinking_by_empty_slots_change_no_bit():
    """In float32, where another order of sums would show."""
    config, x = kind_of("most_used"), stream(length=1, dtype="float32")
    _, state, _ = layer(config)[0](stream())
    state = jax.tree.map(lambda leaf: leaf.astype("float32") if leaf.dtype == jnp.float64 else leaf, state)
    larger = resize.grow_slots(state, 6)
    answers = []
    for each in (state, larger, resize.shrink_slots(larger, 2)):
        sized = config.model_copy(update={"memory_slots": each.slots.shape[1]})
        answers.append(layer(sized, "float32")[0](x, each)[0])
    assert sized.memory_slots == 8 and float(jnp.abs(answers[0]).min()) > 0
    assert bool((answers[0] == answers[1]).all()) and bool((answers[0] == answers[2]).all())
    assert worst(resize.shrink_slots(larger, 6), state) == 0.0


def test_a_bank_from_a_checkpoint_is_grown_and_reads_on(tmp_path):
    """The way through Orbax: saved by field, restored at its old size, grown, saved anew."""
    config = kind_of("most_used")
    _, model, _, _ = layer(config)
    _, state, _ = layer(config)[0](stream())
    saved = checkpoint.Checkpoints(tmp_path, keep=2)
    saved.save(1, state._asdict(), {"memory_slots": 4})
    saved.wait()
    larger = resize.grow_slots(model.init_state(2), 4)._asdict()
    with pytest.raises(ValueError, match=r"slots is \(2, 4, 10\) float64, wanted \(2, 8, 10\) float64"):
        saved.restore(larger, check_meta=lambda meta: None)
    found = saved.restore(model.init_state(2)._asdict(), check_meta=lambda meta: None)
    moved = resize.grow_slots(bank.BankState(**{k: jnp.asarray(v) for k, v in found.arrays.items()}), 4)
    saved.save(2, moved._asdict(), {"memory_slots": 8})
    saved.wait()
    again = bank.BankState(**saved.restore(larger, check_meta=lambda meta: None).arrays)
    saved.close()
    sized, x = config.model_copy(update={"memory_slots": 8}), as_torch(stream(length=1))
    with torch.no_grad():
        one, other = layer(config)[2](x, as_torch(state))[0], layer(sized)[2](x, as_torch(again))[0]
    assert bool((one == other).all()) and float(one.abs().min()) > 0


def test_shrinking_a_full_bank_keeps_the_slots_of_most_mass_in_order():
    read, _, twin, _ = layer()
    _, state, _ = read(stream())
    mass = state.mass.at[:, 8:].set(jnp.asarray([[0.3, 0.1, 0.2, 0.4], [0.1, 0.1, 0.0, 0.2]]))
    state = state._replace(mass=mass, age=state.age + 1)
    less = resize.shrink_slots(state, 2)
    kept = np.asarray([[0, 3], [1, 3]])
    assert worst(less.slots, layout.gathered(state.slots, jnp.asarray(kept))) == 0.0
    assert less.num_slots.tolist() == [2, 2] and less.evicted.tolist() == [6, 6]
    np.testing.assert_array_equal(less.mass[:, 8:], [[0.3, 0.4], [0.1, 0.2]])
    assert worst(torch_resize.shrink_slots(as_torch(state), 2), less) == 0.0


def test_shrinking_keeps_the_newest_slots_which_nothing_has_attended_to_yet():
    _, _, twin, _ = layer()
    with torch.no_grad():
        state = twin(as_torch(stream()))[1]
    assert state.age.tolist() == [[1, 1, 0, 0]] * 2 and not state.mass[:, 10:].any()
    for found in (torch_resize.shrink_slots(state, 2), resize.shrink_slots(jax_state(state), 2)):
        assert found.age.tolist() == [[0, 0]] * 2
        assert worst(found.slots, state.slots[:, 2:]) == 0.0
    for found in (torch_resize.shrink_slots(state, 1), resize.shrink_slots(jax_state(state), 1)):
        assert worst(found.mass[:, 8:9], state.mass[:, 8:10].amax(dim=1, keepdim=True)) == 0.0


def jax_state(state):
    return bank.BankState(*(jnp.asarray(x.numpy()) for x in state))


def test_nothing_is_compiled_again_as_the_bank_fills():
    read, model, _, _ = layer()
    state = model.init_state(2)
    _, state, _ = read(stream(length=8), state)
    before = read._cache_size()
    for _ in range(2):
        _, state, _ = read(stream(length=8), state)
    assert read._cache_size() == before and state.num_slots.tolist() == [4, 4]


# Statistics


def test_statistics_are_those_of_a_state_made_by_hand():
    state = layer()[1].init_state(2)
    mass = state.mass.at[0, 8:].set(jnp.asarray([0.5, 0.5, 0.001, 0.0]))
    age = jnp.asarray([[9, 5, 1, 0], [0, 0, 0, 0]], jnp.int32)
    state = state._replace(
        mass=mass,
        age=age,
        num_slots=jnp.asarray([4, 0]),
        evicted=jnp.asarray([6, 0]),
        cosine=jnp.asarray([0.9, 0.0]),
        compressed=jnp.asarray([25, 0]),
    )
    stats = memory_stats(state)
    assert stats.occupancy.tolist() == [1.0, 0.0] and stats.evictions.tolist() == [6, 0]
    # The third slot's share is under a tenth of an even one; the fourth has just been written.
    assert stats.dead_slots.tolist() == [1, 0] and stats.utilisation.tolist() == [0.75, 0.0]
    share = np.asarray([0.5, 0.5, 0.001]) / 1.001
    assert stats.effective_slots == pytest.approx([np.exp(-(share * np.log(share)).sum()), 0.0])
    assert stats.age_histogram[0].tolist() == [1, 1, 0, 1, 1, *[0] * (len(AGE_EDGES) - 5)]
    assert stats.age_histogram[1].sum() == 0
    assert stats.compression_ratio.tolist() == [2.5, 0.0] and stats.reconstruction_cosine.tolist() == [0.9, 0.0]


@pytest.mark.parametrize("share", [0, 1, -0.1, 5])
def test_a_share_that_no_slot_or_every_slot_is_below_is_refused(share):
    with pytest.raises(ValueError, match=rf"dead_share={share} is outside \(0, 1\)"):
        memory_stats(layer()[1].init_state(1), dead_share=share)


@pytest.mark.parametrize(("length", "slots"), [(11, 6), (LENGTH, 12)])
def test_the_pages_recipe_leaves_a_bank_alone_that_has_no_slots_yet_and_keeps_whole_blocks_slots(length, slots):
    """Of 6 slots, 2 a block. Without any slot utilisation is 0, for which an unused bank was shrunk by 3 slots."""
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    (recipe,) = (
        code for code in page.split("```python\n")[1:] if code.startswith("memory = bank.build(shape, params)")
    )
    shape = TINY.model_copy(update={"memory_slots": 6, "compression": "mean"})
    names = {
        "bank": bank,
        "bank_config": bank_config,
        "resize": resize,
        "shape": shape,
        "x": stream(length, dtype="float32"),
    }
    names |= {"params": initial_params(shape, 0), "heads": jnp.ones((2, length, 2, 6), jnp.float32)}
    exec(recipe.partition("```")[0], names)
    assert names["state"].slots.shape[1] == slots and names["more"].shape == (2, length, 10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_read_a_torch_state_that_carries_gradients_in_any_type(dtype):
    _, _, twin, _ = layer()
    _, state, _ = twin(torch.tensor(np.asarray(stream())))
    assert any(x.requires_grad for x in state)
    wanted = memory_stats(layer()[0](stream())[1])
    state = state._replace(mass=state.mass.to(dtype), use=state.use.to(dtype))
    limit = 1e-12 if dtype == torch.float64 else 1e-2
    for found, exact in zip(memory_stats(state), wanted, strict=True):
        np.testing.assert_allclose(found, exact, rtol=limit, atol=limit)


def test_a_compression_that_loses_nothing_has_cosine_one():
    config = TINY.model_copy(update={"ratio": 1, "memory_slots": 8, "compression": "mean"})
    _, state, loss = layer(config)[0](stream())
    assert state.cosine.tolist() == pytest.approx([1.0, 1.0]) and float(loss) < 1e-24


# The twin


def as_torch(tree):
    return layout.tree_map(lambda x: torch.tensor(np.asarray(x)), tree)


def test_the_twin_agrees_on_answers_state_and_loss_from_any_state():
    read, _, twin, _ = layer(kind_of("most_used"))
    _, state, _ = read(stream(length=10))
    is_token = jnp.asarray(np.random.default_rng(0).random((2, LENGTH)) < 0.7)
    with torch.no_grad():
        found = twin(as_torch(stream()), as_torch(state), is_token=as_torch(is_token))
        step = twin(as_torch(stream()[:, :1]), found[1])
    wanted = read(stream(), state, is_token)
    assert worst(tuple(found), wanted) < 1e-12
    assert worst(tuple(step), read(stream()[:, :1], wanted[1])) < 1e-12


# What is refused


def test_a_state_of_another_batch_or_capacity_is_refused():
    _, model, twin, _ = layer()
    state = model.init_state(3)
    with pytest.raises(ValueError, match=r"are \[\(3, 8, 10\).*wanted \[\(2, 8, 10\)"):
        model(stream(), state)
    with pytest.raises(ValueError, match=r"\(2, 6, 10\).*wanted.*\(2, 4, 10\).*grow_slots and shrink_slots"):
        twin(as_torch(stream()), torch_resize.grow_slots(as_torch(model.init_state(2)), 2))
    for module in (resize, torch_resize):
        with pytest.raises(ValueError, match=r"number=4 is outside \[0, 4\)"):
            module.shrink_slots(state, 4)
        with pytest.raises(ValueError, match="number=-1 is negative"):
            module.grow_slots(state, -1)


def test_arrays_that_are_not_of_the_streams_shape_are_refused():
    _, model, twin, _ = layer()
    for each, ones in ((model, jnp.ones), (twin, torch.ones)):
        with pytest.raises(ValueError, match=r"bank: x is \(2, 3, 9\), wanted .* d_model=10"):
            each(ones((2, 3, 9)))
        with pytest.raises(ValueError, match=r"attention_out is \(2, 1, 2, 6\), wanted \(2, 3, 2, 6\)"):
            each(ones((2, 3, 10)), attention_out=ones((2, 1, 2, 6)))
        with pytest.raises(ValueError, match=r"is_token is \(2, 2\), wanted \(2, 3\)"):
            each(ones((2, 3, 10)), is_token=ones((2, 2)) > 0)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"memory_slots": 0}, "greater than 0"),
        ({"ratio": 0}, "greater than or equal to 1"),
        ({"ratio": 3}, "block_size=4 is not a multiple of ratio=3"),
        ({"memory_slots": 5}, "memory_slots=5 is not a multiple of the 2 slots"),
    ],
)
def test_a_wrong_configuration_is_refused(update, message):
    with pytest.raises(ValueError, match=message):
        BankConfig(**(TINY.model_dump() | update))


def test_with_initial_match_queries_and_keys_start_alike():
    for is_alike in (True, False):
        params = initial_params(TINY.model_copy(update={"initial_match": is_alike}), 0)
        assert (params["q_proj.kernel"] == params["k_proj.kernel"]).all() == is_alike


@pytest.mark.parametrize("library", ["flax", "torch"])
def test_a_call_without_tokens_reads_and_writes_nothing(library):
    read, model, twin, _ = layer()
    _, state, _ = read(stream())
    if library == "torch":
        model, as_array = twin, lambda x: torch.from_numpy(np.array(x))
    else:
        as_array = jnp.asarray
    state = jax.tree.map(as_array, tuple(state))
    state = type(model.init_state(1))(*state)
    with torch.no_grad():
        answer, after, loss = model(as_array(np.zeros((2, 0, TINY.d_model))), state)
    assert tuple(answer.shape) == (2, 0, TINY.d_model) and float(loss) == 0.0
    assert worst(after, state) == 0.0
