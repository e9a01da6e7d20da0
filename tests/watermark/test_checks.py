"""What the commands check and conclude from their flags: the size of a vocabulary."""

from __future__ import annotations

import json
import types

import pytest
import tokenizers

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.pretrained import weights
from jaxbench.pretrained.tokenizer import Tokenizer
from jaxbench.watermark import checks, identify
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.keys import PUBLIC_KEY
from tests.test_cli import command

SIZES = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "max_seq_len": 16}
WORDS = {f"w{i}": i for i in range(20)}


@pytest.fixture
def make_model(tmp_path):
    def make(vocab_size: int) -> str:
        shape = TransformerConfig(vocab_size=vocab_size, **SIZES)
        core = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="w0"))
        core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        own = Tokenizer(core, eos_id=1, bos_id=None, chat_template=None)
        folder = tmp_path / f"model{vocab_size}"
        return str(weights.save_checkpoint(folder, shape, initial.initial_params(shape, seed=0), tokenizer=own))

    return make


def test_the_vocabulary_is_that_of_the_models_logits_which_may_exceed_its_tokenizers(make_model, monkeypatch):
    monkeypatch.setattr(checks, "VALUES", values := types.SimpleNamespace(vocab_size=None))
    wide, equal = make_model(24), make_model(20)
    assert checks.vocab_size(wide, ()) == 24
    assert checks.vocab_size(equal, ()) is None and checks.vocab_size(None, ()) is None
    values.vocab_size = 30
    assert checks.vocab_size(wide, ()) == 30


def test_a_folder_with_only_a_tokenizer_gives_its_size(make_model, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "VALUES", types.SimpleNamespace(vocab_size=None))
    (tmp_path / "alone").mkdir()
    content = (tmp_path / make_model(24) / "tokenizer.json").read_text()
    (tmp_path / "alone" / "tokenizer.json").write_text(content)
    assert checks.vocab_size(str(tmp_path / "alone"), ()) is None


def test_a_given_vocabulary_is_checked_against_schemes_and_tokenizer(make_model, monkeypatch):
    monkeypatch.setattr(checks, "VALUES", values := types.SimpleNamespace(vocab_size=19))
    with pytest.raises(ValueError, match="the tokenizer has 20 tokens and the detector's vocabulary 19"):
        checks.vocab_size(make_model(24), ())
    values.vocab_size = 24
    candidate = identify.Candidate("kgw", parse_scheme({"scheme": "kgw", "payload_bits": 5}), PUBLIC_KEY)
    with pytest.raises(ValueError, match="more payloads than the vocabulary of 24"):
        checks.vocab_size(make_model(25), (candidate,))


def test_detect_takes_every_token_that_the_model_can_write(make_model, tmp_path):
    (tmp_path / "ids.jsonl").write_text(json.dumps({"ids": [1, 23, 5]}) + "\n")
    done = command(
        "watermark.py", "detect", "--backend=numpy", "--scheme=kgw_markllm", "--field=ids",
        f"--model={make_model(24)}", f"--input={tmp_path / 'ids.jsonl'}", f"--output={tmp_path / 'scores.jsonl'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "scores.jsonl").read_text())["num_scored"] == 2
