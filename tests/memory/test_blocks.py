"""Blocks of attention and memory: causal at every position, one state for any cut, twins that agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench.memory import block_config, blocks, sliding_window
from jaxbench.memory.bank_config import BankConfig
from jaxbench.memory.block_config import BlockConfig
from jaxbench.memory.config import NeuralMemoryConfig
from tests.structure import ROOT
from torch_ref.memory import bank as torch_bank
from torch_ref.memory import blocks as torch_blocks
from torch_ref.memory import chunk as torch_chunk
from torch_ref.memory import layout as torch_layout
from torch_ref.memory import sliding_window as torch_window

KINDS = ("mac", "mag", "mal", "lmm", "bank")
LENGTH, ROWS = 10, 2


def shape_of(kind):
    sizes = {"d_model": 8, "head_dim": 4}
    attention = sizes | {"num_heads": 2, "num_kv_heads": 2 if kind == "bank" else 1, "window": 4}
    attention |= {"num_persistent": 0 if kind == "lmm" else 2}
    if kind == "bank":
        bank = BankConfig(**sizes, num_heads=2, block_size=2, memory_slots=2, ratio=2)
        return BlockConfig(kind=kind, **attention, bank=bank)
    neural = NeuralMemoryConfig(**sizes, num_heads=2, chunk_size=4, num_persistent=0 if kind == "mac" else 2)
    return BlockConfig(kind=kind, **attention, neural=neural)


# The Flax blocks are compiled, which takes seconds each: the most intricate one stands for them here, and the parity
# table compares them all with the PyTorch twins, which go through every test.
EVERY = [("torch", kind) for kind in KINDS] + [("flax", "mac")]


class Runner:
    """A block with random parameters, called on numpy arrays; learn and the convolutions' size vary the block."""

    def __init__(self, backend, kind, dtype, **neural):
        shape = shape_of(kind)
        if neural:
            shape = shape.model_copy(update={"neural": shape.neural.model_copy(update=neural)})
        params = block_config.initial_params(shape, 0, distinct=True)
        self.is_torch, self.dtype = backend == "torch", dtype
        self.block = (torch_blocks if self.is_torch else blocks).build(shape, params, dtype=dtype)
        self.compiled = jax.jit(lambda x, state, is_token: self.block(x, state, is_token=is_token))

    def __call__(self, x, state=None, is_token=None, learn=True):
        if not self.is_torch:
            answer, state, loss = self.compiled(jnp.asarray(x), state, is_token)
            return np.asarray(answer), state, loss
        with torch.no_grad():
            is_token = None if is_token is None else torch.from_numpy(is_token)
            answer, state, loss = self.block(torch.from_numpy(x), state, is_token=is_token, learn=learn)
        return answer.numpy(), state, loss


@functools.cache
def runner(backend, kind, dtype="float32", **neural):
    return Runner(backend, kind, dtype, **neural)


def stream(dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal((ROWS, LENGTH, 8)).astype(dtype)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def worst(one, other):
    """Return the largest difference of two trees, relative to the largest value of each leaf."""
    pairs = zip(leaves(one), leaves(other), strict=True)
    pairs = [[x.astype(np.float64) for x in pair] for pair in pairs if pair[0].size]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in pairs)


@pytest.mark.parametrize(("backend", "kind"), EVERY)
def test_no_token_changes_an_earlier_answer(backend, kind):
    x, call = stream(), runner(backend, kind)
    answer = call(x)[0]
    for place in range(LENGTH):
        moved = x.copy()
        moved[:, place] += 1.0
        found = call(moved)[0]
        np.testing.assert_array_equal(found[:, :place], answer[:, :place])
        assert np.abs(found[:, place:] - answer[:, place:]).max() > 1e-4


@pytest.mark.parametrize(("backend", "kind"), EVERY)
def test_token_by_token_equals_one_pass_and_reaches_the_same_state(backend, kind):
    x, call = stream(), runner(backend, kind)
    answer, last, _ = call(x)
    state, parts = call.block.init_state(ROWS), []
    for place in range(LENGTH):
        part, state, _ = call(x[:, place : place + 1], state)
        parts.append(part)
    assert worst(np.concatenate(parts, axis=1), answer) <= 1e-5
    assert worst(state, last) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_their_own_whatever_their_padding_and_where_calls_cut_them(kind):
    x, call = stream("float64"), runner("torch", kind, "float64")
    answer, last, _ = call(x)
    is_token = np.zeros((ROWS, LENGTH + 4), bool)
    is_token[0, 2:7] = is_token[0, 9:] = is_token[1, : LENGTH - 3] = is_token[1, -3:] = True
    wide = np.full((ROWS, LENGTH + 4, 8), 7.0)
    for row in range(ROWS):
        wide[row, is_token[row]] = x[row]
    one, state, _ = call(wide[:, :7], None, is_token[:, :7])
    two, state, _ = call(wide[:, 7:], state, is_token[:, 7:])
    found = np.concatenate([one, two], axis=1)
    assert worst(np.stack([found[row, is_token[row]] for row in range(ROWS)]), answer) < 1e-12
    assert not found[~is_token].any()
    assert worst(state, last) < 1e-12


@pytest.mark.parametrize("kind", ["mac", "bank"])
def test_a_reset_row_starts_again_and_leaves_the_others_alone(kind):
    x, call = stream(), runner("torch", kind)
    state = call(x)[1]
    again = call(x, call.block.reset(state, torch.tensor([True, False])))[0]
    fresh, kept = call(x, call.block.init_state(ROWS))[0], call(x, state)[0]
    np.testing.assert_array_equal(again[0], fresh[0])
    np.testing.assert_array_equal(again[1], kept[1])
    assert np.abs(again[1] - fresh[1]).max() > 1e-4


def test_the_pages_way_through_a_checkpoint_brings_back_a_state_of_trees(tmp_path):
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    (code,) = (code for code in page.split("```python\n") if "saved = checkpoint.Checkpoints" in code)
    call, x = runner("flax", "mac"), stream()
    state = call(x)[1]
    names = {"jax": jax, "folder": tmp_path, "state": state, "memory": call.block, "x": x}
    exec(code.partition("```")[0], names)
    names["saved"].close()
    assert jax.tree.structure(names["state"]) == jax.tree.structure(state)
    assert all(map(np.array_equal, leaves(names["state"]), leaves(state)))
    np.testing.assert_array_equal(call(x, names["state"])[0], call(x, state)[0])


@pytest.mark.parametrize(
    ("library", "kind"), [*((name, kind) for name in ("flax", "torch") for kind in ("mac", "bank")), ("torch", "lmm")]
)
def test_a_reset_of_other_than_the_states_rows_is_refused(library, kind):
    """One value was spread over all rows, which lost every row's memory without a word."""
    block = runner(library, kind).block
    state, ones = block.init_state(ROWS), jnp.ones if library == "flax" else torch.ones
    memory = block.memory if block.bank is None else block.bank
    for layer, its_state in ((block, state), (memory, state.memory)):
        for rows in (1, ROWS + 1):
            with pytest.raises(ValueError, match=rf"reset: is_reset is \({rows},\), wanted \({ROWS},\)"):
                layer.reset(its_state, ones(rows) > 0)


def test_memory_goes_on_learning_unless_it_is_told_not_to():
    x, call = stream(), runner("torch", "mac")
    state = call(x)[1]
    states = [state, *(call(x, state, None, learn)[1] for learn in (False, True))]
    before, still, learned = (each.memory.weights.kernels[0].numpy() for each in states)
    np.testing.assert_array_equal(still, before)
    assert np.abs(learned - before).max() > 1e-5


def test_memory_as_context_reaches_beyond_its_segment_through_what_it_learned_alone():
    x, call = stream(), runner("torch", "mac", conv_size=1)
    moved = x.copy()
    moved[:, 1] += 1.0
    answers = [call(each)[0][:, 8:] for each in (x, moved)]
    assert np.abs(answers[0] - answers[1]).max() > 1e-6
    np.testing.assert_array_equal(*[call(each, None, None, False)[0][:, 8:] for each in (x, moved)])


def test_twins_agree_from_any_state_and_padding(x64):
    x = stream("float64")
    is_token = np.ones((ROWS, LENGTH), bool)
    is_token[1, :3] = False
    results = []
    for backend in ("flax", "torch"):
        call = runner(backend, "mac", "float64")
        results.append(call(x, call(x)[1], is_token))
    assert worst(*[(answer, state) for answer, state, _ in results]) < 1e-12


def test_autocast_narrows_no_product_inside_a_memory_or_an_attention_of_its_own():
    random = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=random)
    heads, tokens = [draw(2, 8, 2, 4) for _ in range(3)], [draw(4, 8, 4) for _ in range(3)]
    kernels = [draw(4, 4, 8).requires_grad_(), draw(4, 8, 4).requires_grad_()]
    gates = torch.full((4, 8), 0.01), torch.full((4, 8), -0.7), torch.full((4, 8), -0.1)

    def answers():
        weights = torch_chunk.Weights(tuple(kernels), None)
        rule = torch_chunk.Rule("gelu", 0.1, "token", None, 1e-5)
        chunk = torch_chunk.Tokens(*tokens, *gates, None)
        learned = torch_layout.rematerialised(lambda w, t: torch_chunk.learn(w, w, w, t, rule), weights, chunk)
        attended = torch_bank.attend(*heads, torch.ones(2, 8, dtype=torch.bool), page=4)
        windowed = torch_window.attend(*heads, torch.ones(2, 8, 8, dtype=torch.bool).tril())
        recalled = torch_chunk.recall(weights, tokens[0], rule)
        return [learned[0], *learned[1].kernels, recalled, *attended, windowed]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (tokens[0] @ kernels[0]).dtype == torch.bfloat16  # autocast is on
        narrow = answers()
    wide = answers()
    gradients = [torch.autograd.grad(each[0].sum(), kernels) for each in (narrow, wide)]  # recomputes what autocast saw
    for found, wanted in zip((*narrow, *gradients[0]), (*wide, *gradients[1]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_attention_sees_exactly_its_window():
    """Against a softmax over the last `window` tokens and the learned ones, with rotation by absolute positions."""
    sizes = {"num_kv_heads": 1, "window": 3, "num_persistent": 0, "rope_theta": 100.0}
    shape = shape_of("bank").model_copy(update=sizes)
    layer = torch_window.LocalAttention(shape, dtype="float64").requires_grad_(False)
    random = np.random.default_rng(0)
    for proj in layer.projections():
        proj.kernel.copy_(torch.from_numpy(random.standard_normal(proj.kernel.shape)))
    x = torch.from_numpy(stream("float64"))
    found = layer(x)[0].numpy()
    query, key, value = (p(x).numpy().reshape(ROWS, LENGTH, -1, 4) for p in layer.projections())
    angle = np.arange(LENGTH)[:, None] * np.asarray(layer.frequencies)
    turn = np.exp(1j * angle)[None, :, None, :]

    def turned(x):
        spun = (x[..., :2] + 1j * x[..., 2:]) * turn
        return np.concatenate([spun.real, spun.imag], axis=-1)

    query, key = turned(query), turned(key)
    for t in range(LENGTH):
        seen = slice(max(0, t - 2), t + 1)
        scores = np.einsum("bnh,bsh->bns", query[:, t], key[:, seen, 0]) / 2.0
        weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(found[:, t], np.einsum("bns,bsh->bnh", weights, value[:, seen, 0]), atol=1e-12)


def test_wrong_shapes_and_states_are_refused_with_their_values():
    bank = shape_of("bank")
    for change, message in (
        ({"kind": "mac"}, "kind=mac takes neural alone, got neural unset and bank given"),
        ({"num_heads": 3}, r"num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"d_model": 12}, r"bank.d_model=8 is not the block's d_model=12"),
        ({"head_dim": 8}, r"wanted bank.num_heads=2 and bank.head_dim=8, got 2 and 4"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockConfig(**(bank.model_dump() | change))
    with pytest.raises(ValueError, match=r"neural.chunk_size=5 and neural.num_persistent=0, got 4 and 0"):
        BlockConfig(**(shape_of("mac").model_dump() | {"window": 5}))
    with pytest.raises(ValueError, match="kind=lmm has no attention that would see num_persistent=2"):
        BlockConfig(**(shape_of("lmm").model_dump() | {"num_persistent": 2}))
    for kind, package in (("mac", blocks), ("mag", torch_blocks)):
        shape = shape_of(kind)
        block = package.build(shape, block_config.initial_params(shape, 0))
        x = jnp.zeros((3, 4, 8)) if package is blocks else torch.zeros((3, 4, 8))
        with pytest.raises(ValueError, match=r"keys are \(2, 4, 1, 4\), wanted \(3, 4, 1, 4\)"):
            block(x, block.init_state(2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("package", [blocks, torch_blocks], ids=["flax", "torch"])
def test_a_stream_or_a_mask_of_another_shape_is_refused(package, kind):
    shape = shape_of(kind)
    block = package.build(shape, block_config.initial_params(shape, 0))
    ones = jnp.ones if package is blocks else torch.ones
    with pytest.raises(ValueError, match=r"block: x is \(2, 3, 7\), wanted .* d_model=8"):
        block(ones((2, 3, 7)))
    for wrong in ((2, 2), (1, 3)):  # a token short, which left out the last one; one row for all
        with pytest.raises(ValueError, match=rf"is_token is \({wrong[0]}, {wrong[1]}\), wanted \(2, 3\)"):
            block(ones((2, 3, 8)), is_token=ones(wrong) > 0)


@pytest.mark.parametrize("package", [blocks, torch_blocks], ids=["flax", "torch"])
def test_a_state_of_another_kind_of_block_or_memory_is_refused(package):
    ones = jnp.ones if package is blocks else torch.ones

    def built(kind, **neural):
        shape = shape_of(kind)
        if neural:
            shape = shape.model_copy(update={"neural": shape.neural.model_copy(update=neural)})
        return package.build(shape, block_config.initial_params(shape, 0))

    def state(*args, **neural):
        block = built(*args, **neural)  # a state's sizes are all that is looked at: nothing is compiled
        return jax.eval_shape(lambda: block.init_state(2)) if package is blocks else block.init_state(2)

    block, x = built("mag"), ones((2, 4, 8))
    gate = functools.partial(jax.eval_shape, block) if package is blocks else block
    for kind, message in (
        ("mac", r"\(True, 'NeuralState', False\), the state has \(True, 'NeuralState', True\)"),
        ("bank", r"\(True, 'NeuralState', False\), the state has \(True, 'BankState', False\)"),
        ("lmm", r"kind=mag wants .* the state has \(False, 'NeuralState', False\)"),
    ):
        with pytest.raises(ValueError, match=message):
            gate(x, state(kind))
    with pytest.raises(ValueError, match="with residual norm, wanted .* without residual norm"):
        gate(x, state("mag", residual_norm=True))
    with pytest.raises(ValueError, match=r"tail is \(2, 1, 24\), wanted \(2, 3, 24\)"):
        gate(x, state("mag", conv_size=2))


def test_what_sees_nothing_answers_zero():
    for package, ones in ((sliding_window, jnp.ones), (torch_window, torch.ones)):
        query, key = ones((1, 2, 2, 4)), ones((1, 3, 1, 4))
        mask = ones((1, 2, 3)) > 1
        assert not np.asarray(package.attend(query, key, key, mask)).any()


@pytest.mark.parametrize("backend", ["flax", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_tokens_answers_none_and_changes_no_state(backend, kind):
    block = runner(backend, kind).block
    array = torch.from_numpy if backend == "torch" else jnp.asarray
    none = array(stream()[:, :0])
    with torch.no_grad():
        for state in (None, block.init_state(ROWS)):
            answer, after, loss = block(none, state)
            assert tuple(answer.shape) == (ROWS, 0, 8) and float(loss) == 0.0
            assert worst(after, block.init_state(ROWS)) == 0.0
