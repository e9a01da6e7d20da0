"""Memory layers in the decoder: one decode state, documents apart, insertion as identity, training and sharding."""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxbench import config, initial, sharding
from jaxbench.config import RotaryScaling, TransformerConfig
from jaxbench.memory import decoder, placement
from jaxbench.memory.bank_config import BankConfig
from jaxbench.memory.config import NeuralMemoryConfig
from jaxbench.memory.decoder_config import DecoderMemory, with_memory
from jaxbench.memory.train_config import MemoryOptimizerConfig, MemoryTrainConfig
from jaxbench.training import optimizers, train_inputs
from jaxbench.training.step_config import StepConfig
from torch_ref import train as torch_train
from torch_ref.memory import decoder as torch_decoder
from torch_ref.training import optimizer_step as torch_update

PLAIN = TransformerConfig(
    vocab_size=31, d_model=16, d_ff=24, num_layers=3, num_heads=2, num_kv_heads=2, head_dim=8, max_seq_len=64
)
SIZES = {"d_model": 16, "num_heads": 2, "head_dim": 8}
BANK = BankConfig(**SIZES, block_size=2, memory_slots=2, ratio=2)
ROWS, LENGTH = 2, 12
ARMS = [path.stem for path in Path("configs/ltm").glob("*.yaml") if not path.stem.startswith("smollm2")]


def neural(kind):
    return NeuralMemoryConfig(**SIZES, chunk_size=4, num_persistent=0 if kind == "mac" else 2)


def memory(kind, **update):
    """Return a memory of a kind of block, or "insert-neural", "insert-bank"."""
    common = {"layers": (1,), "max_documents": 2} | update
    if kind.startswith("insert"):
        parts = {"bank": BANK} if kind == "insert-bank" else {"neural": neural("lmm")}
        return DecoderMemory(kind="lmm", insert=True, **parts, **common)
    if kind == "lmm":
        return DecoderMemory(kind=kind, neural=neural(kind), **common)
    parts = {"bank": BANK} if kind == "bank" else {"neural": neural(kind)}
    return DecoderMemory(kind=kind, window=4, num_persistent=2, **parts, **common)


KINDS = ("mac", "mag", "mal", "lmm", "bank", "insert-neural", "insert-bank")


@functools.cache
def twin(kind, dtype="float64"):
    shape = with_memory(PLAIN, memory(kind))
    return torch_decoder.build(shape, initial.initial_params(shape, 0, distinct=True), dtype=dtype)


def data(seed=0):
    """Return tokens, positions and segments: two documents a row, the second row begins with padding."""
    tokens = np.random.default_rng(seed).integers(0, 31, (ROWS, LENGTH))
    index = np.tile(np.arange(LENGTH), (ROWS, 1))
    segments = np.where(index < 7, 1, 2)
    positions = np.where(index < 7, index, index - 7)
    segments[1, :2], positions[1] = 0, np.where(index[1] < 7, index[1] - 2, index[1] - 7)
    return tokens, np.maximum(positions, -1).astype(np.int32), segments.astype(np.int32)


def tensors(*arrays):
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]


@pytest.mark.parametrize("kind", ("mac", "bank", "insert-neural"))
def test_documents_of_a_row_are_read_as_if_each_were_alone(kind):
    tokens, positions, segments = tensors(*data())
    with torch.no_grad():
        packed = twin(kind)(tokens, positions, segments=segments)
        for part in (slice(0, 7), slice(7, LENGTH)):
            alone = twin(kind)(tokens[:, part], positions[:, part])
            is_token = positions[:, part] >= 0
            torch.testing.assert_close(packed[:, part][is_token], alone[is_token], rtol=1e-12, atol=1e-12)
        moved = tokens.clone()
        moved[:, 3] = (moved[:, 3] + 1) % 31
        torch.testing.assert_close(
            twin(kind)(moved, positions, segments=segments)[:, 7:], packed[:, 7:], rtol=0.0, atol=0.0
        )
        whole = [twin(kind)(each, torch.arange(LENGTH).expand(ROWS, -1))[:, 7:] for each in (tokens, moved)]
        assert (whole[0] - whole[1]).abs().max() > 1e-6  # in one document it does reach that far


def test_flax_keeps_documents_apart_as_the_twin_does(x64):
    shape = with_memory(PLAIN, memory("mac"))
    model = decoder.build(shape, initial.initial_params(shape, 0, distinct=True), dtype="float64")
    tokens, positions, segments = data()
    found = jax.jit(lambda *x: model(*x[:2], segments=x[2]))(*map(jnp.asarray, (tokens, positions, segments)))
    with torch.no_grad():
        wanted = twin("mac")(*tensors(tokens, positions), segments=torch.from_numpy(segments))
    is_token = positions >= 0
    np.testing.assert_allclose(found[is_token], wanted.numpy()[is_token], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ("mal", "insert-bank"))
def test_token_by_token_equals_one_pass_with_one_state_for_keys_and_memory(kind):
    tokens, positions, _ = tensors(*data())
    positions = torch.tensor(np.maximum(np.arange(LENGTH) - np.array([[0], [3]]), -1))
    model, slots = twin(kind, "float32"), LENGTH
    with torch.no_grad():
        whole = model(tokens, positions)
        hidden, cache = model.features(tokens[:, :5], positions[:, :5])
        parts, cache = [model.logits(hidden)], cache.padded(slots, dtype="float32")
        for slot in range(5, LENGTH):
            at = slice(slot, slot + 1)
            hidden, cache = model.features(tokens[:, at], positions[:, at], cache=cache, slot=slot)
            parts.append(model.logits(hidden))
    is_token = positions >= 0
    difference = (torch.cat(parts, dim=1) - whole)[is_token].abs().max() / whole[is_token].abs().max()
    assert float(difference) <= 1e-5


@pytest.mark.parametrize("kind", ("mac", "bank"))
def test_flax_decodes_token_by_token_from_a_prefix_what_it_answers_in_one_pass(kind, x64):
    shape = with_memory(PLAIN.model_copy(update={"num_layers": 2}), memory(kind))
    model = decoder.build(shape, initial.initial_params(shape, 0, distinct=True), dtype="float64")

    @jax.jit
    def read(tokens, positions, cache=None, slot=None):
        hidden, cache = model.features(tokens, positions, cache=cache, slot=slot)
        return model.logits(hidden), cache

    tokens = jnp.asarray(data()[0])
    positions = jnp.asarray(np.maximum(np.arange(LENGTH) - np.array([[0], [3]]), -1), jnp.int32)
    whole, _ = read(tokens, positions)
    # A prefix that ends inside a segment of both rows; what follows is padding, as behind a Generator's prompt.
    prefix, cache = read(tokens, jnp.where(jnp.arange(LENGTH)[None] < 5, positions, -1))
    parts = [prefix[:, :5]]
    for slot in range(5, LENGTH):
        part, cache = read(tokens[:, slot : slot + 1], positions[:, slot : slot + 1], cache, slot)
        parts.append(part)
    is_token = np.asarray(positions >= 0)
    found = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(found[is_token], np.asarray(whole)[is_token], rtol=0, atol=1e-12)


def test_a_layers_memory_does_not_grow_with_what_it_read():
    def size(tree):
        if isinstance(tree, tuple):
            return sum(size(each) for each in tree)
        return 0 if tree is None else tree.numel() * tree.element_size()

    for kind in ("mac", "bank"):
        with torch.no_grad():
            sizes = [
                size(twin(kind).features(torch.zeros(1, n, dtype=torch.int64), torch.arange(n)[None])[1].memory)
                for n in (3, 15)
            ]
        assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("package", (decoder, torch_decoder), ids=("flax", "torch"))
def test_a_decoder_s_memory_learns_as_it_reads_unless_that_is_switched_off(package):
    tokens, positions, _ = data()
    for learn in (True, False):
        shape = with_memory(PLAIN, memory("lmm", learn=learn))
        model = package.build(shape, initial.initial_params(shape, 0, distinct=True))
        if package is decoder:
            _, cache = jax.jit(model.features)(jnp.asarray(tokens), jnp.asarray(positions))
            blank = jax.jit(lambda: model.layers[1].block.init_state(ROWS))()  # noqa: B023 - called here
        else:
            with torch.no_grad():
                _, cache = model.features(*tensors(tokens, positions))
                blank = model.layers[1].block.init_state(ROWS)
        pairs = zip(cache.memory[1].state.memory.weights.kernels, blank.memory.weights.kernels, strict=True)
        moved = [float(abs(after - before).max()) for after, before in pairs]
        assert min(moved) > 1e-4 if learn else max(moved) == 0.0


def test_nothing_can_follow_rows_of_several_documents():
    tokens, positions, segments = tensors(*data())
    with torch.no_grad():
        _, cache = twin("mag").features(tokens, positions, segments=segments)
        cache = cache.padded(LENGTH + 1, dtype="float64")
        with pytest.raises(ValueError, match="max_documents=2 documents, which leave no state to go on from"):
            twin("mag").features(tokens[:, :1], positions[:, -1:] + 1, cache=cache, slot=LENGTH)


@pytest.mark.parametrize("kind", ("insert-neural", "insert-bank"))
@pytest.mark.parametrize("qk_norm", (False, True))
def test_an_inserted_memory_changes_no_logit_until_it_is_trained(kind, qk_norm):
    plain = PLAIN.model_copy(update={"qk_norm": qk_norm})
    params = initial.initial_params(plain, 0, distinct=True)
    shape = with_memory(plain, memory(kind, layers=None))
    tokens, positions, _ = data()
    with torch.no_grad():
        found = torch_decoder.build(shape, initial.inserted(shape, params, 0))(*tensors(tokens, positions))
        wanted = torch_decoder.build(plain, params)(*tensors(tokens, positions))
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-6
    moved = initial.inserted(shape, params, 0)
    moved["layers.1.gate"] = moved["layers.1.gate"] + 1.0
    with torch.no_grad():
        other = torch_decoder.build(shape, moved)(*tensors(tokens, positions))
    assert float((other - wanted).norm() / wanted.norm()) > 1e-4


@pytest.mark.parametrize("kind", ("lmm", "insert-bank"))
def test_the_largest_seeds_of_a_run_draw_memories_too(kind):
    shape, last = with_memory(PLAIN, memory(kind, layers=(0, 1))), 2**64 - 1
    drawn = {seed: initial.initial_params(shape, seed) for seed in (last, last - 1, 0, 5)}
    assert all(np.isfinite(value).all() for params in drawn.values() for value in params.values())
    name = next(name for name in drawn[0] if name.startswith("layers.0.block.") and name.endswith(".kernel"))
    assert len({params[name].tobytes() for params in drawn.values()}) == len(drawn)
    after = name.replace("layers.0", "layers.1")
    np.testing.assert_array_equal(
        drawn[last - 1][after], drawn[last][name]
    )  # seed + 1 + layer, which begins again at 0


def test_only_the_memory_is_trained_where_that_is_asked():
    shape = with_memory(PLAIN, memory("insert-neural"))
    params = initial.initial_params(shape, 0)
    how = StepConfig(optimizer=MemoryOptimizerConfig(trained="memory"))
    state = torch_update.init_state(torch_decoder.build(shape, params), params, how)
    tokens, positions, _ = tensors(*data())
    batch = torch_train.Batch(tokens, tokens.roll(-1, 1), positions, positions >= 0)
    for _ in range(3):
        state, metrics = torch_update.train_step(state, batch, 0.01, step_config=how)
    assert bool(metrics.is_finite)
    after = {name: value.detach().numpy() for name, value in state.params.named_parameters()}
    moved = {name for name, value in after.items() if not np.array_equal(value, params[name].astype(np.float32))}
    assert moved == {name for name in params if how.optimizer.is_trained(name)}
    assert "layers.1.gate" in moved and "layers.1.attention.q_proj.kernel" not in moved
    assert len(state.moments.state) == len(moved)


def test_the_jax_optimiser_moves_and_remembers_the_memory_alone():
    params = {"layers.0.block.memory.q_proj.kernel": jnp.ones((2, 2)), "layers.0.gate": jnp.ones(2),
              "layers.0.attention.q_proj.kernel": jnp.ones((2, 2)), "embed.embedding": jnp.ones((2, 2))}  # fmt: skip
    chosen = MemoryOptimizerConfig(trained="memory", weight_decay=0.1)
    trained = optimizers.trained(chosen, params)
    assert set(trained) == set(list(params)[:2])
    transform = optimizers.transform(chosen, 0.1, trained)
    state = transform.init(trained)
    updates, _ = transform.update(jax.tree.map(jnp.ones_like, trained), state, trained)
    assert all(np.any(value) for value in updates.values())
    assert sum(x.ndim == 2 for x in jax.tree.leaves(optax.tree_utils.tree_get(state, "mu"))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_rule_on_any_mesh(kind):
    whole = memory(kind, layers=None)  # with the parts that are options, too
    if whole.bank is not None:
        whole = whole.model_copy(update={"bank": whole.bank.model_copy(update={"compression": "learned"})})
    else:
        whole = whole.model_copy(update={"neural": whole.neural.model_copy(update={"residual_norm": True})})
    shape = with_memory(PLAIN, whole)
    rules = sharding.decoder_table(shape, stored="fsdp", out="model", heads="model", width=None)
    rules = placement.with_memory(rules, shape, stored="fsdp", heads="model", width=None)
    specs = sharding.parameter_specs(initial.parameter_shapes(shape), rules, {"fsdp": 2, "model": 2})
    kernels = [spec for name, spec in specs.items() if name.startswith("layers.1.block") and "_proj" in name]
    assert kernels and all({"fsdp", "model"} == set(spec) for spec in kernels)
    with pytest.raises(ValueError, match="parameters without a rule: .*layers.1.block.other"):
        shapes = initial.parameter_shapes(shape) | {"layers.1.block.other": (4, 4)}
        sharding.parameter_specs(shapes, rules, {"fsdp": 2, "model": 2})


def test_the_arms_have_as_many_parameters_within_5_percent():
    def size(name):
        settings = config.load(f"configs/ltm/{name}.yaml", (), MemoryTrainConfig)
        shape = settings.decoder(257)
        return sum(math.prod(each) for each in initial.parameter_shapes(shape).values())

    plain = size("plain")
    assert len(ARMS) > 1 and all(abs(size(arm) / plain - 1) < 0.05 for arm in ARMS)


def test_bad_memories_are_refused_with_their_values():
    for change, message in (
        ({"layers": (1, 3)}, r"layers=\[1, 3\] must be different layers from 0 to 2"),
        ({"layers": ()}, r"layers=\[\] must be"),
        ({"insert": True}, "insert=true keeps the layer's attention, so kind must be lmm, got mag"),
        ({"window": None}, "window is missing, kind=mag has an attention of its own"),
        ({"bank": BANK}, "kind=mag takes neural alone"),
    ):
        with pytest.raises(ValueError, match=message):
            with_memory(PLAIN, memory("mag").model_copy(update=change))
    for kind in ("mac", "mag", "mal", "bank"):
        with pytest.raises(ValueError, match=f"kind={kind} has an attention of its own, which does not normalise"):
            with_memory(PLAIN.model_copy(update={"qk_norm": True}), memory(kind))
        with pytest.raises(
            ValueError, match=f"kind={kind} has an attention of its own, which has no .'qkv_bias': True"
        ):
            with_memory(PLAIN.model_copy(update={"qkv_bias": True}), memory(kind))
        for update, message in (
            ({"rope_scaling": RotaryScaling(kind="llama3", factor=8.0)}, "'rope_scaling': 'llama3'"),
            ({"rope_scaling": RotaryScaling(kind="linear", factor=2.0)}, "'rope_scaling': 'linear'"),
            ({"use_bias": True, "position": "learned"}, "'use_bias': True, 'position': 'learned'"),
        ):
            with pytest.raises(ValueError, match=f"kind={kind} has an attention of its own, which has no .{message}"):
                with_memory(PLAIN.model_copy(update=update), memory(kind))
            with_memory(PLAIN.model_copy(update=update), memory("insert-neural"))
    for update, message in (
        ({"window": 4}, "window=null and num_persistent=0 .* got 4 and 0"),
        ({"num_persistent": 2}, "window=null and num_persistent=0 .* got None and 2"),
        ({"loss_weight": 2.0}, "loss_weight=2.0 is of a bank's compression, and bank is unset"),
    ):
        with pytest.raises(ValueError, match=message):
            with_memory(PLAIN, memory("lmm", **update))
    with pytest.raises(ValueError, match="which has no .'query_scale': 0.5"):
        with_memory(PLAIN.model_copy(update={"query_pre_attn_scalar": 32.0}), memory("mag"))
    with pytest.raises(ValueError, match="scan_layers=True needs layers that are alike, got some of kind 'mag'"):
        shape = with_memory(PLAIN, memory("mag"))
        decoder.build(shape, {}, scan_layers=True)
    segments = np.array([[1, 1, 1, 0], [2, 3, 4, 0]])
    PLAIN.check_documents(segments)
    with pytest.raises(ValueError, match="row 1 holds 3 documents, and memory.max_documents=2"):
        with_memory(PLAIN, memory("mag")).check_documents(segments)


def test_rows_of_too_many_documents_are_refused_before_a_run_which_a_larger_limit_then_goes_on_with(tmp_path):
    lengths = [40] * 40 + [2, 2, 2] + [40] * 10  # three short documents: some row of some epoch holds four
    lines = [json.dumps({"text": "a" * length}) for length in lengths]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    base = {"model": PLAIN.model_dump() | {"vocab_size": None}, "data": {"seq_len": 16, "tokenizer": "byte"}}
    base |= {"batch_size": 2, "learning_rate": 0.1, "evaluation": {"batches": 1}}
    few, many = (base | {"memory": memory("mag", max_documents=most).model_dump()} for most in (2, 4))
    prepare = functools.partial(train_inputs.prepare, path=str(tmp_path / "texts.jsonl"))
    prepare(MemoryTrainConfig(**few, steps=1))  # a row that is never read does not count
    with pytest.raises(ValueError, match="holds [34] documents, and memory.max_documents=2"):
        prepare(MemoryTrainConfig(**few, steps=500))
    longer = MemoryTrainConfig(**many, steps=500)
    prepare(longer)
    assert longer.identity() == MemoryTrainConfig(**few, steps=1).identity()


def test_a_run_names_what_keeps_its_memory_from_training():
    base = {"model": PLAIN.model_dump(), "data": {"seq_len": 16}, "batch_size": 2, "steps": 1, "learning_rate": 0.1}
    with pytest.raises(ValueError, match="trained=memory, but memory is null"):
        MemoryTrainConfig(**base, step={"optimizer": {"trained": "memory"}})
    with pytest.raises(ValueError, match=r"layers=\[9\] must be"):
        MemoryTrainConfig(**base, memory=memory("mag").model_dump() | {"layers": (9,)})
    unmasked = base | {"data": {"seq_len": 16, "document_mask": False}}
    assert not MemoryTrainConfig(**unmasked).data.document_mask
    with pytest.raises(ValueError, match="document_mask=false does not go with memory.kind=mag"):
        MemoryTrainConfig(**unmasked, memory=memory("mag").model_dump())


@pytest.mark.parametrize("layers", [(0, 1, 2), None])
@pytest.mark.parametrize("kind", ("mag", "lmm", "bank"))
def test_settings_of_attention_are_refused_where_memory_leaves_none(kind, layers):
    def run(memory, activation="swiglu", **update):
        model = PLAIN.model_dump() | {"activation": activation}
        base = {"model": model, "data": {"seq_len": 16}, "batch_size": 2, "steps": 1, "learning_rate": 0.1}
        return MemoryTrainConfig(**base, memory=memory.model_dump(), **update)

    everywhere = memory(kind, layers=layers)
    for idle in ("blocked", "fused"):
        with pytest.raises(ValueError, match=f"implementation={idle} does nothing: memory.kind={kind} takes the place"):
            run(everywhere, implementation=idle)
        for other in (memory(kind, layers=(0, 2)), memory("insert-neural", layers=layers)):
            assert run(other, implementation=idle).implementation == idle
    with pytest.raises(ValueError, match="fused_projections=True does nothing: .* model.activation=gelu has no gate"):
        run(everywhere, activation="gelu", fused_projections=True)
    assert run(everywhere, fused_projections=True).fused_projections


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [(0, 2), None])
def test_parameters_are_counted_without_listing_them(kind, layers):
    shape = with_memory(PLAIN, memory(kind, layers=layers))
    listed = sum(math.prod(each) for each in initial.parameter_shapes(shape).values())
    assert initial.num_parameters(shape) == listed
    assert initial.num_parameters(PLAIN) == sum(math.prod(x) for x in initial.parameter_shapes(PLAIN).values())
