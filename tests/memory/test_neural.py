"""The neural memory as a layer against the documented formulas, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench.memory import layout, neural
from jaxbench.memory.config import NeuralMemoryConfig, initial_params
from tests.memory import oracle
from tests.memory.oracle import worst
from torch_ref.memory import layout as torch_layout
from torch_ref.memory import neural as torch_neural

pytestmark = pytest.mark.usefixtures("x64")

TINY = NeuralMemoryConfig(d_model=12, num_heads=2, head_dim=6, chunk_size=4, num_persistent=3)
LENGTH = 11


# The layer


@functools.cache
def layer(config=TINY, dtype="float64"):
    """Return a compiled layer as read(x, state, is_token, learn=True), the model, and its PyTorch twin."""
    params = initial_params(config, 0, distinct=True)
    model = neural.build(config, params, dtype=dtype)

    @functools.partial(jax.jit, static_argnames="learn")
    def read(x, state=None, is_token=None, *, learn=True):
        return model(x, state, is_token=is_token, learn=learn)

    return read, model, torch_neural.build(config, params, dtype=dtype)


def stream(length=LENGTH, rows=3, dtype="float64", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, length, TINY.d_model)), dtype)


ALL = TINY.model_copy(update={"num_persistent": 2, "initial_theta": 0.1, "initial_alpha": 0.1})
OFF = {"conv_size": 1, "qk_norm": False, "qkv_activation": "none", "output": "linear", "read": "chunk"}
OFF |= {"num_persistent": 0, "activation": "silu", "loss_reduction": "mean", "max_theta": 0.5, "max_update_norm": 0.1}


BEFORE = {"read": "before", "activation": "gelu_erf"}
NO_NETWORK = NeuralMemoryConfig(d_model=12, num_heads=2, head_dim=6, depth=0)
LAYERS = {"all": ALL, "off": ALL.model_copy(update=OFF), "before": ALL.model_copy(update=BEFORE), "none": NO_NETWORK}


@pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
def test_the_layer_and_its_twin_equal_the_documented_formulas_in_numpy(config):
    read, _, twin = layer(config)
    answers, kernels, momenta = oracle.layer(config, initial_params(config, 0, distinct=True), np.asarray(stream()))
    with torch.no_grad():
        twins = as_numpy(tuple(twin(as_torch(stream()))))
    for found, state in (read(stream()), twins):
        assert worst(found, answers) < 1e-12
        if config.depth:
            assert worst((state.weights.kernels, state.momentum.kernels), (tuple(kernels), tuple(momenta))) < 1e-12


def test_the_numpy_layer_sees_each_of_its_options():
    def answers(**update):
        config = ALL.model_copy(update=update)
        return oracle.layer(config, initial_params(ALL, 0, distinct=True), np.asarray(stream(rows=1)))[0]

    options = [*OFF.items(), *BEFORE.items(), ("chunk_size", 3), ("momentum", False), ("forgetting", False)]
    assert {(name, value) for name, value in options if worst(answers(**{name: value}), answers()) < 1e-4} == set()


def test_without_momentum_the_state_holds_zeros_whatever_was_padding():
    read, _, twin = layer(ALL.model_copy(update={"momentum": False}))
    is_token = jnp.arange(LENGTH)[None] < jnp.array([[LENGTH - 2], [LENGTH - 3], [1]])
    _, padded = read(stream(), None, is_token)
    with torch.no_grad():
        masks = (None, torch.from_numpy(np.array(is_token)))
        twins = [as_numpy(twin(as_torch(stream()), None, is_token=mask)[1]) for mask in masks]
    for state in (padded, read(stream())[1], *twins):
        assert all((np.asarray(kernel) == 0).all() for kernel in state.momentum.kernels)
    for row, count in enumerate((LENGTH - 2, LENGTH - 3, 1)):
        _, alone = read(stream()[row : row + 1, :count])
        assert worst(list(alone.weights.kernels), [kernel[row : row + 1] for kernel in padded.weights.kernels]) < 1e-12


def token_by_token(read, x, state):
    """Return answers and state of single-token calls; state = None starts anew."""
    answers = []
    for t in range(x.shape[1]):
        answer, state = read(x[:, t : t + 1], state)
        answers.append(answer)
    return jnp.concatenate(answers, axis=1), state


@pytest.mark.parametrize("config", [TINY.model_copy(update={"read": "chunk"}), LAYERS["before"], NO_NETWORK])
def test_token_by_token_equals_the_parallel_pass(config):
    read, _, _ = layer(config)
    assert worst(token_by_token(read, stream(), None), read(stream())) < 1e-12


def test_token_by_token_equals_the_parallel_pass_in_float32():
    read, _, _ = layer(TINY, "float32")
    x = stream(dtype="float32")
    assert worst(token_by_token(read, x, None), read(x)) < 1e-5


def test_a_sequence_may_be_cut_anywhere():
    read, _, _ = layer()
    first, state = read(stream()[:, :6])  # behind 3 persistent tokens the cut lies inside a chunk of 4
    rest, state = read(stream()[:, 6:], state)
    assert worst((jnp.concatenate([first, rest], axis=1), state), read(stream())) < 1e-12


def test_padding_changes_nothing_and_is_answered_with_zeros():
    read, _, _ = layer()
    is_token = np.ones((3, LENGTH), bool)
    is_token[1, :4] = is_token[1, [7, 10]] = is_token[2, ::2] = False  # 5 tokens are left in rows 1 and 2
    x = jnp.where(is_token[:, :, None], stream(), 1e3)
    answers, state = read(x, None, jnp.asarray(is_token))
    assert float(jnp.abs(answers[~is_token]).max()) == 0.0
    kept = jnp.stack([x[row, is_token[row]] for row in (1, 2)])
    alone, alone_state = read(kept)
    assert worst([answers[row, is_token[row]] for row in (1, 2)], [alone[0], alone[1]]) < 1e-12
    assert worst(jax.tree.map(lambda s: s[1:], state), alone_state) < 1e-12
    assert worst(answers[0], read(stream())[0][0]) < 1e-12


def test_a_token_changes_no_answer_before_it_and_every_answer_from_it_on():
    read, _, _ = layer(TINY.model_copy(update={"max_update_norm": 0.1}))
    x = stream(rows=1)
    answers, _ = read(jnp.concatenate([x, *(x.at[:, t].add(0.5) for t in range(LENGTH))]))
    change = jnp.abs(answers[1:] - answers[:1]).max(axis=-1)  # [changed token, answer]
    before = np.tril(np.ones((LENGTH, LENGTH), bool), -1)
    assert float(change[before].max()) == 0.0
    assert float(change[~before].min()) > 1e-7


def test_rows_are_independent_and_reset_one_by_one():
    read, model, _ = layer()
    first, rest = stream()[:, :6], stream()[:, 6:]
    _, state = read(first)
    state = jax.jit(model.reset)(state, jnp.asarray([False, True, False]))
    answers, _ = read(rest, state)
    assert worst(state.weights.kernels[0][1], model.init_state(1).weights.kernels[0][0]) < 1e-12
    others, _ = read(rest.at[1].set(7.0), state)
    assert bool((others == answers)[jnp.asarray([0, 2])].all()) and bool((others != answers)[1].any())
    assert float(jnp.abs(answers - read(rest, read(first)[1])[0])[1].max()) > 1e-4


def test_the_memory_goes_on_learning_at_inference_unless_it_is_told_not_to():
    read, _, _ = layer()
    _, start = read(stream())
    frozen, still = read(stream(seed=1), start, learn=False)
    assert all(map(np.array_equal, jax.tree.leaves(still[:4]), jax.tree.leaves(start[:4])))
    learning, moved = read(stream(seed=1), start)
    assert float(jnp.abs(learning - frozen).max()) > 1e-3
    assert worst(moved.weights, start.weights) > 1e-3
    # Frozen token by token is frozen at once, and a frozen pass leaves learning able to go on.
    assert worst(token_by_token(functools.partial(read, learn=False), stream(seed=1), start)[0], frozen) < 1e-12


def test_no_network_has_no_use_for_what_it_would_learn_from():
    with pytest.raises(ValueError, match="depth=0 has no network .* got true and 3"):
        NeuralMemoryConfig(d_model=12, num_heads=2, head_dim=6, depth=0, residual_norm=True, num_persistent=3)
    assert sorted(initial_params(NO_NETWORK, 0)) == [
        "g_proj.kernel", "o_proj.kernel", "out_norm.scale", "q_conv.kernel", "q_proj.kernel",
    ]  # fmt: skip


PLAIN = TINY.model_copy(update={"depth": 1, "num_persistent": 0, "conv_size": 1, "output": "linear", "read": "chunk"})


def test_many_chunks_are_read_in_groups_with_equal_results(monkeypatch):
    """Seven chunks in groups of two and a rest of one, in both twins, against PyTorch without groups."""
    _, model, twin = layer(PLAIN)
    x = stream(length=4 * 7, rows=1)

    def by_torch():
        given = torch.tensor(np.asarray(x), requires_grad=True)
        value = twin(given)[0].sin().sum()
        value.backward()
        return value.item(), given.grad.numpy()

    flat = by_torch()
    monkeypatch.setattr(layout, "NESTED_FROM", 3)
    monkeypatch.setattr(torch_layout, "NESTED_FROM", 3)
    assert worst(by_torch(), flat) < 1e-12
    grouped = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(model(x)[0]))))(x)
    assert worst(grouped, flat) < 1e-12


@pytest.mark.parametrize(("number", "size"), [(16, 4), (32, 4), (64, 8), (70, 7), (128, 8), (37, 6), (7, 2), (2, 1)])
def test_groups_are_about_the_root_and_leave_no_rest_where_they_can(number, size):
    assert layout.group_size(number) == torch_layout.group_size(number) == size


def test_a_walk_without_a_rest_is_not_compiled_with_one(monkeypatch):
    monkeypatch.setattr(layout, "NESTED_FROM", 3)

    def scans(number):
        chunks = jnp.zeros((number, 2))
        jaxpr = jax.make_jaxpr(lambda x: layout.scan_chunks(lambda c, x: (c + x, c), jnp.zeros(2), x))(chunks)
        return str(jaxpr).count("scan[")

    assert scans(9) == 2 and scans(11) == 3  # groups and their chunks; and a rest


def test_memory_of_the_backward_pass_is_linear_in_length_and_the_state_is_constant():
    _, model, _ = layer(PLAIN, "float32")
    graph, params = neural.nnx.split(model)
    bytes_, states = [], []
    for length in (512, 2048):  # 128 and 512 chunks, in groups of about their root
        x = jax.ShapeDtypeStruct((1, length, TINY.d_model), jnp.float32)
        run = jax.jit(jax.grad(lambda params, x: jnp.sum(neural.nnx.merge(graph, params)(x)[0])))
        bytes_.append(run.lower(params, x).compile().memory_analysis().temp_size_in_bytes)
        _, state = jax.eval_shape(lambda params, x: neural.nnx.merge(graph, params)(x), params, x)
        states.append(sum(leaf.size for leaf in jax.tree.leaves(state)))
    assert 3.9 * bytes_[0] < bytes_[1] < 4.1 * bytes_[0]
    assert states[0] == states[1]


def test_the_backward_pass_keeps_no_inner_values_of_a_chunk(monkeypatch):
    """Sixteen chunks, too few for groups: kept, what is computed again would take 8.5 times the bytes in all."""
    lean = {"depth": 4, "chunk_size": 16, "momentum": False, "forgetting": False}
    graph, params = neural.nnx.split(layer(PLAIN.model_copy(update=lean), "float32")[1])

    def bytes_():
        x = jax.ShapeDtypeStruct((1, 16 * 16, TINY.d_model), jnp.float32)
        run = jax.jit(jax.grad(lambda params, x: jnp.sum(neural.nnx.merge(graph, params)(x)[0])))
        return run.lower(params, x).compile().memory_analysis().temp_size_in_bytes

    found = bytes_()
    monkeypatch.setattr(layout, "rematerialised", lambda read, carry, chunk: read(carry, chunk))
    assert bytes_() > 4 * found


# The twin


def as_torch(tree):
    return layout.tree_map(lambda x: torch.tensor(np.asarray(x)), tree)


def as_numpy(tree):
    return jax.tree.map(lambda x: jnp.asarray(x.detach().numpy()), tree)


@pytest.mark.parametrize("learn", [True, False])
def test_the_twin_agrees_on_answers_and_state_from_any_state_and_padding(learn):
    changed = {"momentum": learn, "output": "gated" if learn else "linear", "activation": "silu", "read": "chunk"}
    config = TINY.model_copy(update=changed)
    read, _, twin = layer(config)
    _, state = read(stream(length=5))
    is_token = jnp.asarray(np.random.default_rng(0).random((3, LENGTH)) < 0.7)
    with torch.no_grad():
        found = twin(as_torch(stream()), as_torch(state), is_token=as_torch(is_token), learn=learn)
        step = twin(as_torch(stream()[:, :1]), found[1], learn=learn)
    wanted = read(stream(), state, is_token, learn=learn)
    assert worst(as_numpy(tuple(found)), wanted) < 1e-12
    assert worst(as_numpy(tuple(step)), read(stream()[:, :1], wanted[1], learn=learn)) < 1e-12


# What is refused


def test_a_state_of_another_batch_or_model_is_refused():
    plain = TINY.model_copy(update={"num_persistent": 0})
    _, model, twin = layer(plain)
    state = model.init_state(2)
    with pytest.raises(ValueError, match=r"kernels are \[\(2, 2, 6, 12\).* wanted \[\(3, 2, 6, 12\)"):
        model(stream(), state)
    with pytest.raises(ValueError, match=r"kernels are \[\(2, 2, 6, 12\).* wanted \[\(3, 2, 6, 12\)"):
        twin(as_torch(stream()), as_torch(state))
    other = layer(plain.model_copy(update={"depth": 1}))[1]
    with pytest.raises(ValueError, match=r"wanted \[\(2, 2, 6, 6\)\]"):
        other(stream(rows=2), state)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"depth": 5}, "less than or equal to 4"),
        ({"chunk_size": 0}, "greater than 0"),
        ({"initial_theta": 1.0}, "initial_theta=1.0 is not below max_theta=1.0"),
        ({"read": "row"}, "'token', 'before' or 'chunk'"),
    ],
)
def test_a_wrong_configuration_is_refused(update, message):
    with pytest.raises(ValueError, match=message):
        NeuralMemoryConfig(**(TINY.model_dump() | update))


def test_with_initial_match_a_query_is_nearest_to_the_keys_over_its_like():
    """A value's key is the mean over itself and the tokens before it, so its own key token finds it again."""
    config = NeuralMemoryConfig(d_model=64, num_heads=1, head_dim=32, conv_size=2, initial_match=True)
    params = initial_params(config, 0)
    x = np.random.default_rng(0).standard_normal((16, 64))
    queries, projected = x @ params["q_proj.kernel"], x @ params["k_proj.kernel"]
    taps = params["k_conv.kernel"]
    keys = taps[0] * projected[:-1] + taps[1] * projected[1:]  # of tokens 1 to 15
    cosines = queries @ keys.T / np.linalg.norm(queries, axis=1)[:, None] / np.linalg.norm(keys, axis=1)
    nearest = np.argsort(cosines[1:-1], axis=1)[:, -2:]  # token t lies under the keys of tokens t and t + 1
    np.testing.assert_array_equal(np.sort(nearest, axis=1), np.stack([np.arange(14), np.arange(1, 15)], axis=1))
    other = initial_params(config.model_copy(update={"initial_match": False}), 0)
    assert (other["k_proj.kernel"] != other["q_proj.kernel"]).all()


def near(found, wanted, tolerance):
    """Assert equal states; arrays may be empty, as the convolutions' inputs are where there is no convolution."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
def test_no_tokens_have_no_answers_and_change_no_state(config):
    read, model, twin = layer(config)
    _, behind = read(stream())
    empty = stream()[:, :0]
    for state in (None, behind):
        for learn in (True, False):
            answer, after = read(empty, state, learn=learn)
            assert answer.shape == empty.shape and answer.dtype == jnp.float64
            near(after, *((model.init_state(3), 1e-12) if state is None else (state, 0.0)))
            with torch.no_grad():
                given = None if state is None else twin(as_torch(stream()))[1]
                answer, found = twin(as_torch(empty), given, learn=learn)
            assert tuple(answer.shape) == empty.shape and answer.dtype == torch.float64
            near(as_numpy(found), after, 1e-12)
    # What comes behind an empty call is what comes without it.
    assert worst(read(stream(), read(empty)[1])[0], read(stream())[0]) < 1e-12


@pytest.mark.parametrize("shape", [(3, 4, 11), (3, 4, 13), (4, 12), (1, 3, 4, 12)])
def test_a_stream_of_another_width_is_refused_by_both_backends(shape):
    _, model, twin = layer()
    for each, x in ((model, jnp.zeros(shape)), (twin, torch.zeros(shape, dtype=torch.float64))):
        with pytest.raises(ValueError, match=rf"memory: x is \({', '.join(map(str, shape))}\), wanted .* d_model=12"):
            each(x)
