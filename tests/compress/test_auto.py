"""Compressing texts: spans, ratios, pieces as they come, saved texts and weights, what is refused."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxbench import initial
from jaxbench.compress import artifact, auto, benchmark, document
from jaxbench.compress import config as shapes
from jaxbench.parity import cases
from jaxbench.pretrained import tokenizer, weights
from torch_ref.compress import compressor as torch_compressor

DECODER = cases.LLAMA.model_copy(update={"vocab_size": 49152, "num_layers": 3})
CONFIG = cases.COMPRESSOR.model_copy(update={"decoder": DECODER, "chunk": 16, "ratios": (2, 4, 8)})
TEXT = (
    "The mill by the river turned, slowly; its wheel (of oak) was 112 years old.\n\n"
    "  Nobody knew — not even Ann — why.\t"
)


@pytest.fixture(scope="module")
def held():
    params = {name: value.astype(np.float32) for name, value in initial.initial_params(DECODER, 0).items()}
    return weights.Checkpoint(DECODER, params, Path("tiny"), "tiny", "1" * 64)


@pytest.fixture(scope="module")
def trained(held):
    params = shapes.initial_params(CONFIG, 3, distinct=True)
    params = {name: value.astype(np.float32) for name, value in params.items() if shapes.is_trained(name)}
    return artifact.Trained(CONFIG, params, held.sha256, "abc", {})


@pytest.fixture(scope="module")
def compressor(held, trained):
    return auto.AutoCompressor.from_weights(trained, held, tokenizer.load_tokenizer(None), 4, "float32")


def test_every_character_of_a_text_belongs_to_one_vector(compressor):
    result = compressor.compress(TEXT)
    assert "".join(TEXT[a:b] for a, b in result.spans) == TEXT
    assert result.original_length == compressor.count_tokens(TEXT) > 2 * CONFIG.chunk
    assert result.compressed_length == -(-result.original_length // 4)
    assert result.compression_ratio == pytest.approx(compressor.get_compression_ratio(TEXT))
    ids = compressor.tokenizer.encode(TEXT, add_special=False)
    first = compressor.tokenizer.decode(ids[:4])
    assert TEXT[slice(*result.spans[0])] == first
    assert (np.diff(result.positions) > 0).all() and result.positions[-1] < result.original_length


@given(cuts=st.lists(st.integers(0, len(TEXT) * 2), max_size=12))
@settings(deadline=None)
def test_a_text_in_pieces_has_the_vectors_of_the_whole_bit_for_bit(compressor, cuts):
    text = TEXT * 2
    whole, stream, last = compressor.compress(text), auto.StreamingCompressor(compressor), 0
    for cut in [*sorted(cuts), len(text)]:
        stream.add_chunk(text[last:cut])
        last = cut
    found = stream.finish()
    for name in ("vectors", "spans", "positions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), err_msg=name)


@given(text=st.text(st.sampled_from("ab 1.,'\n\té—"), max_size=24))
def test_a_safe_cut_gives_both_parts_the_tokens_of_the_whole(compressor, text):
    place = auto.safe_cut(text)
    parts = [text[:place], text[place:]]
    assert sum(
        (compressor.tokenizer.encode(part, add_special=False) for part in parts), []
    ) == compressor.tokenizer.encode(text, add_special=False)


def test_a_tokenizer_that_puts_a_space_in_front_of_every_text_has_the_same_tokens_in_pieces(held, trained):
    import tokenizers
    from tokenizers import models, normalizers

    text = "The mill by the river turned slowly said Ann"
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", *sorted({"\u2581", *text})])}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    words = tokenizer.Tokenizer(core, eos_id=None, bos_id=None, chat_template=None)
    compressor = auto.AutoCompressor.from_weights(trained, held, words, 4, "float32")
    stream = auto.StreamingCompressor(compressor)
    for first in range(0, len(text), 7):
        stream.add_chunk(text[first : first + 7])
    pieces, whole, [other] = stream.finish(), compressor.compress(text), compressor.compress_all([text], batch=1)
    assert pieces.original_length == whole.original_length == compressor.count_tokens(text)
    np.testing.assert_array_equal(pieces.vectors, whole.vectors)
    np.testing.assert_array_equal(whole.vectors, other.vectors)


@pytest.mark.parametrize(("content", "rstrip"), [("<|im_end|>", True), ("[the mill]", False)])
def test_an_added_token_that_holds_a_space_has_the_same_tokens_in_pieces(held, trained, content, rstrip):
    import tokenizers

    core = tokenizers.Tokenizer.from_str(tokenizer.load_tokenizer(None).core.to_str())
    core.add_special_tokens([tokenizers.AddedToken(content, rstrip=rstrip)])
    words = tokenizer.Tokenizer(core, eos_id=None, bos_id=None, chat_template=None)
    compressor = auto.AutoCompressor.from_weights(trained, held, words, 4, "float32")
    text, stream = f"Who owns {content} by the river? " * 3, auto.StreamingCompressor(compressor)
    for first in range(0, len(text), 5):
        stream.add_chunk(text[first : first + 5])
    pieces, whole = stream.finish(), compressor.compress(text)
    assert pieces.original_length == whole.original_length == compressor.count_tokens(text)
    np.testing.assert_array_equal(pieces.vectors, whole.vectors)


def test_vectors_come_before_the_text_has_ended_and_no_text_is_refused(compressor):
    stream = auto.StreamingCompressor(compressor)
    assert stream.add_chunk(TEXT) >= 4
    with pytest.raises(ValueError, match="the text has 0 tokens; wanted at least one"):
        auto.StreamingCompressor(compressor).finish()


@pytest.mark.parametrize("pieces", [list, lambda text: re.findall(r"\S+\s*", text)], ids=["characters", "words"])
def test_a_text_that_comes_by_characters_or_with_a_space_behind_each_word_is_not_held(compressor, pieces):
    text, stream, held = TEXT * 4, auto.StreamingCompressor(compressor), []
    for piece in pieces(text):
        stream.add_chunk(piece)
        held.append(len(stream.state()["text"]))
    assert max(held) < 40 and stream.vectors > 15, "the longest run of text without a place to cut is a line's end"
    found, whole = stream.finish(), compressor.compress(text)
    for name in ("vectors", "spans", "positions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), err_msg=name)


def test_a_stream_whose_vectors_were_all_taken_ends_with_none_and_saves_no_file_of_none(compressor, tmp_path):
    stream = auto.StreamingCompressor(compressor)
    stream.add_chunk(TEXT)
    stream.close()
    taken = stream.take()
    rest = stream.finish()
    assert len(taken.vectors) and rest.vectors.shape == (0, taken.vectors.shape[1]) and rest.spans.shape == (0, 2)
    assert rest.original_length == stream.tokens
    with pytest.raises(ValueError, match="compressed text: 0 vectors; wanted one at least"):
        document.save(tmp_path / "none", rest)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("batch", [1, 3])
def test_texts_together_have_the_vectors_of_each_alone(compressor, batch):
    texts = [TEXT * 2, "One.", TEXT[:40]]
    for text, found in zip(texts, compressor.compress_all(texts, batch=batch)):
        alone = compressor.compress(text)
        np.testing.assert_allclose(found.vectors, alone.vectors, atol=0 if batch == 1 else 1e-5)
        np.testing.assert_array_equal(found.spans, alone.spans)
        np.testing.assert_array_equal(found.positions, alone.positions)
        assert found.original_length == alone.original_length and found.processing_time > 0


def test_a_text_without_tokens_among_others_and_no_batch_are_refused(compressor):
    with pytest.raises(ValueError, match="text 1 has 0 tokens; wanted at least one"):
        compressor.compress_all(["a", ""])
    with pytest.raises(ValueError, match="batch=0; wanted 1 at least"):
        compressor.compress_all(["a"], batch=0)


def test_ratios_are_exact_and_others_are_refused(compressor):
    text = " a" * 32
    for ratio in CONFIG.ratios:
        own = compressor.with_ratio(ratio)
        assert own.compress(text).compression_ratio == ratio == own.get_compression_ratio(text)
    with pytest.raises(ValueError, match="ratio=3; wanted one of 2, 4, 8"):
        compressor.with_ratio(3)


def test_both_backends_make_the_same_vectors(compressor, held, trained):
    other = auto.AutoCompressor.from_weights(trained, held, compressor.tokenizer, 4, "float32", torch_compressor)
    np.testing.assert_allclose(other.compress(TEXT).vectors, compressor.compress(TEXT).vectors, atol=1e-5)


@pytest.mark.parametrize("dtype, worst", [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 1 / 250)])
def test_a_saved_text_is_read_again(compressor, tmp_path, dtype, worst):
    result = compressor.compress(TEXT)
    size = document.save(tmp_path / "a.safetensors", result, dtype=dtype)
    found = document.load(tmp_path / "a.safetensors")
    assert size == (tmp_path / "a.safetensors").stat().st_size
    assert np.abs(found.vectors - result.vectors).max() <= worst * np.abs(result.vectors).max()
    np.testing.assert_array_equal(found.spans, result.spans)
    assert found[3:] == result[3:]


def test_a_damaged_or_foreign_file_is_named(compressor, tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="is no file"):
        document.load(path)
    document.save(path, compressor.compress(TEXT))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"a.safetensors is damaged"):
        document.load(path)
    with pytest.raises(ValueError, match="dtype=int4; wanted one of float32, bfloat16, int8, pq"):
        document.save(path, compressor.compress(TEXT), dtype="int4")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, about: tensors.pop("edges"), "wanted .*'edges'"),
        (lambda tensors, about: tensors.pop("scales"), "wanted .*'scales'"),
        (lambda tensors, about: about.pop("ratio"), "its ratio is None"),
        (lambda tensors, about: about.update(model_sha256=3), "its model_sha256 is 3"),
        (lambda tensors, about: about.update(dtype="int4"), "dtype='int4'"),
        (lambda tensors, about: about.update(original_length=3), "beyond its 3 tokens"),
        (lambda tensors, about: tensors.update(vectors=tensors["vectors"].reshape(-1)), "vectors"),
        (lambda tensors, about: tensors.update(edges=tensors["edges"][::-1].copy()), "do not rise"),
        (lambda tensors, about: tensors.update(positions=tensors["positions"] / np.float32(2)), "wanted integers"),
        (
            lambda tensors, about: tensors.update({name: value[:0] for name, value in tensors.items()}),
            "0 vectors",
        ),
    ],
)  # fmt: skip
def test_a_compressed_text_that_lacks_something_is_damaged(compressor, tmp_path, change, words):
    from safetensors.numpy import save_file

    from jaxbench.pretrained import safetensors_files

    path = tmp_path / "a.safetensors"
    document.save(path, compressor.compress(TEXT), dtype="int8")
    about, tensors = safetensors_files.annotated(path, "compressed_text")
    change(tensors, about)
    save_file(tensors, path, {"compressed_text": json.dumps(about)})
    with pytest.raises(ValueError, match=rf"a.safetensors is damaged: .*{words}"):
        document.load(path)


@pytest.mark.parametrize("gone", ["config", "about", "model_sha256", "tags.embedding", ":codes", ":scales"])
def test_weights_that_lack_something_are_damaged(held, trained, tmp_path, gone):
    from safetensors.numpy import save_file

    from jaxbench.pretrained import safetensors_files

    path = tmp_path / "w.safetensors"
    artifact.save(path, CONFIG, trained.params, held, about={})
    about, tensors = safetensors_files.annotated(path, "compressor")
    about.pop(gone, None)
    tensors.pop(next((name for name in tensors if name.endswith(gone)), None), None)
    save_file(tensors, path, {"compressor": json.dumps(about)})
    with pytest.raises(ValueError, match=r"w.safetensors is damaged: "):
        artifact.load(path, held)


def test_weights_are_stored_as_few_bits_of_what_training_changed(held, trained, tmp_path):
    close = {
        name: held.params[name.removeprefix("encoder.")] + 0.01 * value
        if name.removeprefix("encoder.") in held.params
        else value
        for name, value in trained.params.items()
    }
    size = artifact.save(tmp_path / "w.safetensors", CONFIG, close, held, about={"steps": 3})
    found = artifact.load(tmp_path / "w.safetensors", held)
    assert found.config == CONFIG and found.about == {"steps": 3} and found.model_sha256 == held.sha256
    assert set(found.params) == {name for name in close if not name.startswith("local.")}
    for name, value in found.params.items():
        is_change = name.removeprefix("encoder.") in held.params
        change = close[name] - held.params[name.removeprefix("encoder.")] if is_change else close[name]
        error = np.sqrt(np.mean((value - close[name]) ** 2) / np.mean(change**2))
        is_coarse = name.endswith(".kernel") and name.startswith(("encoder.", "connector."))
        assert error <= (0.15 if is_coarse else 0.01), name
    kernels = sum(value.size for name, value in close.items() if name.startswith("encoder.") and ".kernel" in name)
    rest = sum(value.nbytes for name, value in close.items() if not name.startswith(("encoder.layers", "local.")))
    assert size < kernels * 0.6 + rest + 8000
    assert artifact.describe(tmp_path / "w.safetensors")["ratios"] == [2, 4, 8]


def test_weights_of_another_decoder_or_cut_in_half_are_refused(held, trained, tmp_path):
    path = tmp_path / "w.safetensors"
    artifact.save(path, CONFIG, trained.params, held, about={})
    with pytest.raises(ValueError, match="was trained for a decoder with SHA-256 111111111111, and tiny has 222"):
        artifact.load(path, held._replace(sha256="2" * 64))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="w.safetensors is damaged or no compressor"):
        artifact.load(path, held)
    with pytest.raises(ValueError, match="'rfcc-large'; wanted rfcc-base-Nx"):
        auto.AutoCompressor.from_pretrained("rfcc-large")


def test_the_shipped_weights_are_whole_and_known_by_their_checksum(monkeypatch, tmp_path):
    about = artifact.describe()
    assert about["ratios"] == [2, 4, 8, 16, 32] and about["bytes"] <= 25e6
    runs = [about["about"]]
    while "start" in runs[-1]:
        runs.append(runs[-1]["start"])
    assert [each["steps"] for each in runs] == [480, 1150, 350, 2000]  # the last run first
    damaged = tmp_path / "w.safetensors"
    damaged.write_bytes(artifact.SHIPPED.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(artifact, "SHIPPED", damaged)
    with pytest.raises(ValueError, match=f"w.safetensors is damaged: SHA-256 .*wanted {artifact.SHIPPED_SHA256}"):
        artifact.describe()


def test_a_file_of_another_format_is_named(held, trained, tmp_path):
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "o.safetensors", {"compressor": json.dumps({"format": 9})})
    with pytest.raises(ValueError, match="has format 9; wanted 1"):
        artifact.load(tmp_path / "o.safetensors", held)


def test_a_compressed_text_is_a_prompt_of_every_generator(compressor, held, tmp_path):
    import torch
    import transformers

    from jaxbench import sample, transformer

    result = compressor.compress(TEXT)
    prompt = compressor.prompt(result, " The miller said", tag="answer")
    words = compressor.tokenizer.encode(" The miller said", add_special=False)
    assert len(prompt.vectors) == result.compressed_length + 1 and prompt.ids[len(prompt.vectors) :] == words
    greedy = sample.SamplingParams(temperature=0.0)
    model = transformer.build(DECODER, held.params)
    generate = sample.Generator(model, eos_id=None, sampling=greedy)
    own = generate([prompt.ids], max_new_tokens=6, seed=0, vectors=prompt.vectors)
    weights.save_checkpoint(tmp_path / "hf", DECODER, held.params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    embedded = torch.from_numpy(compressor.inputs_embeds(prompt, held.params["embed.embedding"]))[None]
    found = theirs.generate(
        inputs_embeds=embedded, attention_mask=torch.ones(embedded.shape[:2]), max_new_tokens=6, min_new_tokens=6,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    assert found[0].tolist() == own.tokens[0].tolist()


def test_a_decoder_that_scales_its_embeddings_gets_tags_vectors_and_rows_of_one_scale(tmp_path):
    """Gemma: what Hugging Face computes from inputs_embeds is what our decoder computes from the prompt."""
    import torch
    import transformers

    from jaxbench import transformer

    decoder = DECODER.model_copy(update=cases.GEMMA | {"d_model": 32, "tie_embeddings": True})
    config = CONFIG.model_copy(update={"decoder": decoder, "prefix": 2})
    params = {name: value.astype(np.float32) for name, value in initial.initial_params(decoder, 0).items()}
    held = weights.Checkpoint(decoder, params, Path("tiny"), "tiny", "1" * 64)
    start = {name: np.asarray(value, np.float32) for name, value in shapes.initial_params(config, 0).items()}
    mean = start["decoder.embed.embedding"].mean(axis=0)
    np.testing.assert_allclose(start["tags.embedding"][::2], np.tile(mean, (4, 1)) * 32**0.5, atol=1e-7)
    norms = np.linalg.norm(start["decoder.embed.embedding"], axis=1) * 32**0.5 / 2  # halves of scaled rows
    apart = np.linalg.norm(start["tags.embedding"][1::2] - start["tags.embedding"][::2] / 2, axis=1)
    assert norms.min() * 0.999 <= apart.min() and apart.max() <= norms.max() * 1.001
    mine = {name: value for name, value in start.items() if shapes.is_trained(name)}
    trained = artifact.Trained(config, mine, held.sha256, "abc", {})
    compressor = auto.AutoCompressor.from_weights(trained, held, tokenizer.load_tokenizer(None), 4, "float32")
    prompt = compressor.prompt(compressor.compress(TEXT), " The miller said")
    weights.save_checkpoint(tmp_path / "hf", decoder, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    embedded = torch.from_numpy(compressor.inputs_embeds(prompt, params["embed.embedding"]))[None]
    with torch.no_grad():
        wanted = theirs(inputs_embeds=embedded).logits.numpy()
    ids, places = np.array([prompt.ids], np.int32), np.arange(len(prompt.ids), dtype=np.int32)[None]
    model = transformer.build(decoder, params)
    found = model.logits(model.features(ids, places, vectors=prompt.vectors)[0])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_vectors_of_another_decoder_or_compressor_are_refused(compressor):
    result = compressor.compress(TEXT)
    for other, words in (
        (result._replace(model_sha256="2" * 64), "made for decoder 222222222222, this is 1111"),
        (result._replace(compressor_id="xyz"), "made for compressor xyz, this is abc"),
    ):
        with pytest.raises(ValueError, match=words):
            compressor.prompt(other, "a")
    with pytest.raises(ValueError, match="tag='blank'; wanted one of reconstruct, continue, answer"):
        compressor.prompt(result, "a", tag="blank")


@pytest.mark.parametrize("over", [7, 200])
def test_a_question_is_asked_over_as_many_tokens_as_is_said_of_a_short_text_too(compressor, over):
    def generate(ids, *, vectors, max_new_tokens, seed):
        time.sleep(1e-3 * max_new_tokens)

    text = "The mill by the river turned slowly and well.\n"
    found = benchmark.first_token(compressor, generate, text, " Who?", over=over, new_tokens=5)
    assert found["tokens"] == over
    assert found["prompt"] == found["vectors"] + compressor.count_tokens(" Who?")
