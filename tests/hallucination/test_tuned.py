"""A reader whose upper blocks are tuned: what is read once below them, what is trained, and what is not."""

import jax
import numpy as np
import pytest

from jaxbench import initial, transformer
from jaxbench.config import TransformerConfig
from jaxbench.hallucination import detector as detectors
from jaxbench.hallucination import encoding, metrics, tuned_inputs, tuned_reader, tuning
from jaxbench.hallucination.group import Group
from jaxbench.hallucination.study import tuned as study
from jaxbench.lora.config import LoraConfig
from jaxbench.pretrained.tokenizer import load_tokenizer
from tests.hallucination import small

LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "up_proj"))
TUNING = tuning.Tuning(first=1, num_blocks=2, lora=LORA, epochs=60, row_tokens=64, learning_rate=1e-2, dtype="float32")
RESPONSES = tuple(row[3] for row in small.RESPONSES[:3])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """Return a random decoder of four blocks, its parameters and a tokenizer of bytes."""
    tokenizer = load_tokenizer(str(small.model(tmp_path_factory.mktemp("tuned"))))
    config = TransformerConfig(
        vocab_size=tokenizer.core.get_vocab_size(), d_model=32, d_ff=48, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=8, max_seq_len=256, tie_embeddings=True,
    )  # fmt: skip
    return config, initial.initial_params(config, 0, distinct=True), tokenizer


@pytest.fixture(scope="module")
def read(decoder, tmp_path_factory):
    """Return the rows of one source's responses, and the file that holds them."""
    config, params, tokenizer = decoder
    _, question, context = small.CONTEXTS["s1"]
    group = Group(context, question, RESPONSES, ("a", "b", "c"))
    path = tmp_path_factory.mktemp("sources") / "s1.safetensors"
    tuning.write(path, tuning.LowerReader(config, params, TUNING).read(group, tokenizer, 256))
    return tuning.places(path, (0, 1, 2), TUNING)


def tuned_config(decoder):
    return tuned_inputs.TunedConfig(decoder=decoder[0], lora=LORA, first=1, num_blocks=2)


def test_without_training_it_reads_every_token_as_the_decoder_does(decoder, read):
    config, params, tokenizer = decoder
    start = tuned_inputs.starting_params(tuned_config(decoder), params, seed=0, rate=0.5)
    direction = np.random.default_rng(0).standard_normal((config.d_model, 1)).astype(np.float32)
    labels = [np.zeros(len(text.encode()), bool) for text in RESPONSES]
    said = tuning.logits(tuned_config(decoder), {**start, "head.kernel": direction}, read, labels, TUNING)
    kept = {name: x for name, x in params.items() if not name.startswith("layers.3.")}
    whole = transformer.build(config.model_copy(update={"num_layers": 3}), kept)
    _, question, context = small.CONTEXTS["s1"]
    prompt = encoding.encode_prompt(tokenizer, context, question, window=200).text.ids
    features = jax.jit(lambda tokens, positions: whole.features(tokens, positions)[0])
    for number, text in enumerate(RESPONSES):
        tokens = np.zeros((1, 192), np.int32)
        ids = [*prompt, *encoding.encode_response(tokenizer, text).ids]
        tokens[0, : len(ids)] = ids
        positions = np.where(np.arange(192) < len(ids), np.arange(192), -1)[None]
        wanted = np.asarray(features(tokens, positions))[0, len(prompt) : len(ids)] @ direction[:, 0]
        np.testing.assert_allclose(said[number], wanted, rtol=2e-4, atol=2e-4)


def test_training_moves_adapters_and_head_alone_and_finds_the_labelled_tokens(decoder, read):
    config, params, _ = decoder
    labels = [np.array([letter.isdigit() for letter in text]) for text in RESPONSES]
    start = tuned_inputs.starting_params(tuned_config(decoder), params, seed=0, rate=0.1)
    found = tuning.fit(tuned_config(decoder), start, read, labels, TUNING)
    adapters = 2 * 3 * 2  # of two blocks with three projections each
    assert len(found) == adapters + 2 and all(".lora_" in name or name in tuned_inputs.HEAD for name in found)
    assert all(np.abs(value - start[name]).max() > 0 for name, value in found.items())
    said = tuning.logits(tuned_config(decoder), {**start, **found}, read, labels, TUNING)
    scores = np.concatenate([said[i] for i in range(3)])
    assert metrics.auc(np.concatenate(labels), scores) > 0.95


def test_a_row_that_fills_a_batch_changes_no_loss(decoder):
    config = tuned_config(decoder)
    model = tuned_reader.build(config, tuned_inputs.initial_params(config, 0, distinct=True))
    given = tuned_inputs.parity_arrays(config, batch=2, length=16, seed=0, step=0)
    empty = [np.concatenate([each, np.zeros_like(each)]) for each in given]
    loss = jax.jit(tuned_reader.loss_fn)
    plain, filled = (float(loss(model, tuned_reader.Batch(*arrays))) for arrays in (given, empty))
    assert filled == pytest.approx(plain, rel=1e-6)


def test_no_source_is_on_two_sides_of_a_split():
    source = np.array([f"s{i // 3}" for i in range(60)])
    labels = detectors.Labels(np.zeros(60, bool), np.zeros(0, bool), source)
    test = np.flatnonzero(np.isin(source, ["s2", "s11"]))
    parts = study.split(labels, np.setdiff1d(np.arange(60), test), test)
    sides = [set(source[part]) for part in parts]
    assert len(set.union(*sides)) == sum(map(len, sides)) == 20 and sides[2] == {"s2", "s11"}
    assert len(parts.weigh) < len(parts.train) / 2 and sum(map(len, parts)) == 60


def test_blocks_that_the_decoder_does_not_have_are_refused(decoder):
    with pytest.raises(ValueError, match="blocks 3 to 4 are wanted of a decoder of 4"):
        tuned_inputs.TunedConfig(decoder=decoder[0], lora=LORA, first=3, num_blocks=2)
    with pytest.raises(ValueError, match="lora.layers=.*wanted none"):
        tuned_inputs.TunedConfig(
            decoder=decoder[0], lora=LORA.model_copy(update={"layers": (0,)}), first=1, num_blocks=2
        )
