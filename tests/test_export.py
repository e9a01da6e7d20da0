"""What a training run exports: a folder that transformers and jaxbench load, tokenizer and special ids included."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxbench import initial
from jaxbench.parity import cases
from jaxbench.pretrained import small_tokenizers, tokenizer, weights

TEXTS = ("plain words\n\twith a tab", "na\u00efve \u2014 \U0001f600 \u4e2d\u6587 \x00\x7f", "", " ", "a" * 300)
BYTE = small_tokenizers.ByteTokenizer()
CHARACTERS = small_tokenizers.CharacterTokenizer("".join(sorted(set("".join(TEXTS)))))


@pytest.fixture(scope="module", params=["byte", "character"])
def exported(request, tmp_path_factory):
    """Return a small tokenizer and the folder of a decoder that was saved with it."""
    own = {"byte": BYTE, "character": CHARACTERS}[request.param]
    config = cases.LLAMA.model_copy(update={"vocab_size": own.vocab_size, "dropout": 0.0})
    folder = tmp_path_factory.mktemp("export") / "model"
    return own, weights.save_checkpoint(folder, config, initial.initial_params(config, 0), tokenizer=own)


def test_both_load_the_tokenizer_and_give_the_same_ids_and_texts(exported):
    import transformers

    own, folder = exported
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), tokenizer.load_tokenizer(folder)
    assert len(theirs) == ours.vocab_size == own.vocab_size
    assert theirs.eos_token_id == ours.eos_id == own.eos_id and theirs.bos_token_id is None and ours.bos_id is None
    for text in TEXTS:
        ids = list(own.encode(text))
        assert theirs(text)["input_ids"] == ours.encode(text) == ids, text
        assert theirs.decode(ids) == ours.decode(ids) == own.decode(ids) == text
    if own.eos_id is not None:
        assert theirs.decode([104, 105, own.eos_id], skip_special_tokens=True) == "hi"
        np.testing.assert_array_equal(small_tokenizers.byte_lengths(ours), own.byte_lengths())


def test_the_model_s_files_name_the_special_ids_and_generation_stops_at_the_end(exported):
    import torch
    import transformers

    own, folder = exported
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        assert values["eos_token_id"] == own.eos_id and values["bos_token_id"] is None, name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == own.eos_id
    if own.eos_id is not None:
        forced = transformers.LogitsProcessorList([EndAfter(3, own.eos_id)])
        found = model.generate(torch.tensor([[104, 105]]), max_new_tokens=8, do_sample=False, logits_processor=forced)
        assert found.shape[1] == 3 and int(found[0, -1]) == own.eos_id


class EndAfter:
    """A logits processor that makes the end certain from some length on."""

    def __init__(self, length: int, eos_id: int):
        self.length, self.eos_id = length, eos_id

    def __call__(self, input_ids, scores):
        """Return the scores."""
        scores = scores.clone()
        if input_ids.shape[1] + 1 >= self.length:
            scores[:, self.eos_id] = 1e9
        return scores


def test_a_character_that_the_vocabulary_lacks_is_an_error_and_no_other_id(tmp_path):
    small_tokenizers.CharacterTokenizer("abc").save(tmp_path)
    with pytest.raises(Exception, match="UNK"):
        tokenizer.load_tokenizer(tmp_path).encode("abd")


def test_a_folders_settings_of_sampling_are_kept_beside_new_weights_with_the_ids_of_its_tokenizer(exported, tmp_path):
    _, folder = exported
    config = json.loads((folder / "generation_config.json").read_text())
    own = {"temperature": 0.6, "top_k": 20, "pad_token_id": 3}
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((folder / name).read_bytes())
    (source / "generation_config.json").write_text(json.dumps(config | own | {"transformers_version": "4.0.0"}))
    held = weights.load_checkpoint(folder)
    read = tokenizer.load_tokenizer(source)
    made = weights.save_checkpoint(tmp_path / "made", held.config, held.params, tokenizer=read)
    assert json.loads((made / "generation_config.json").read_text()) == own | config
    import transformers

    assert transformers.GenerationConfig.from_pretrained(made).temperature == 0.6
