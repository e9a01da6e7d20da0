"""The models of an evaluation, including a tiny random one with its own vocabulary (S file)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from jaxbench import initial, outputs
from jaxbench.config import TransformerConfig
from jaxbench.pretrained import weights
from jaxbench.pretrained.tokenizer import Tokenizer
from jaxbench.text import packing
from jaxbench.watermark.study.evaluate_config import Evaluate

TINY = "tiny"
TINY_CONFIG = TransformerConfig(
    vocab_size=1024, d_model=16, d_ff=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_seq_len=512
)
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def names(settings: Evaluate) -> list[str]:
    """Return the models that an evaluation uses, each once."""
    return sorted({settings.model, settings.quality.model, settings.rewriting.model})


def sha256(spec: str) -> str:
    """Return the checksum of a model's file, or of its folder's files with the tokenizer's."""
    return TINY if spec == TINY else weights.checksum(spec)


def read_config(spec: str) -> TransformerConfig:
    """Read the configuration of a model."""
    return TINY_CONFIG if spec == TINY else weights.read_config(spec)


def resolve(spec: str, workdir: Path) -> str | Path:
    """Return the model as the loaders take it; the tiny one is created in the workdir at its first use."""
    if spec != TINY:
        return spec
    folder = workdir / "tiny-model"
    if not folder.exists():
        make_tiny(folder)
    return folder


def make_tiny(folder: Path) -> None:
    """Write, atomically, a random model of one layer whose tokens are whole words of the packaged text."""
    import tokenizers

    counts = Counter(word for document in packing.load_text() for word in document.split())
    kept = sorted(counts, key=lambda word: (-counts[word], word))[: TINY_CONFIG.vocab_size - 2]
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<end>", *kept])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<end>"])
    with outputs.whole_folder(folder) as made:
        weights.save_checkpoint(made, TINY_CONFIG, initial.initial_params(TINY_CONFIG, seed=0))
        Tokenizer(core, eos_id=1, bos_id=None, chat_template=TEMPLATE).save(made)
