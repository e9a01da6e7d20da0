"""Prune a checkpoint and write it as a Hugging Face folder: the work of experiments/prune.py (S file)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench import outputs
from jaxbench.config import TransformerConfig
from jaxbench.pretrained import hf_config, weights
from jaxbench.pretrained import tokenizer as tokenizers
from jaxbench.quantization import pruning, structured

METHODS = ("magnitude", "wanda", "2:4", "wanda-2:4", "structured", "wanda-structured")
RECORD = "pruning.json"
VALIDATION = 0.1  # last part of the text's tokens, held out from Wanda and from fine-tuning


class Settings(NamedTuple):
    """What is removed, and how the text is used."""

    method: str  # of METHODS; wanda: scores by the text's inputs, else by magnitude
    fraction: float | None = None  # magnitude, wanda: share of the weights that become zero
    scope: str | None = None  # magnitude, wanda: pruning.SCOPES; None = matrix, with wanda output
    keep_kv_heads: int | None = None  # structured: key-value heads that each layer keeps; None = all
    keep_d_ff: int | None = None  # structured: feed-forward units that each layer keeps; None = all
    batches: int = 4  # for Wanda's norms, and held-out ones for the loss; 0 = no loss
    batch_size: int = 4  # rows
    seq_len: int = 256  # tokens a row
    finetune_steps: int = 0
    learning_rate: float = 1e-4  # AdamW's peak, cosine after a tenth of warm-up
    seed: int = 0  # order of the text

    @property
    def kind(self) -> str:
        """What is removed: single weights, weights in groups, or parts."""
        return {"magnitude": "weights", "wanda": "weights"}.get(self.method, self.method.removeprefix("wanda-"))

    @property
    def uses_inputs(self) -> bool:
        """True if scores need a text."""
        return self.method.startswith("wanda")


class Result(NamedTuple):
    """Result of a run."""

    path: Path
    config: TransformerConfig
    parameters: tuple[int, int]  # before, after
    zeros: pruning.Count
    losses: dict[str, float]  # held-out, nats per token: dense, pruned, finetuned
    held_out_tokens: int  # number of tokens in each mean loss; 0 without losses


def check(settings: Settings) -> None:
    """Check settings against each other.

    Raises:
      ValueError: one is missing, does not apply to the method, or is out of range.
    """
    s = settings
    if s.method not in METHODS:
        raise ValueError(f"--method={s.method} is not one of {', '.join(METHODS)}")
    own = {"fraction": "weights", "scope": "weights", "keep_kv_heads": "structured", "keep_d_ff": "structured"}
    for name, kind in own.items():
        if (value := getattr(s, name)) is not None and s.kind != kind:
            methods = ", ".join(m for m in METHODS if Settings(m).kind == kind)
            raise ValueError(f"--{name}={value} does not go with --method={s.method}, only with {methods}")
    if s.kind == "weights" and (s.fraction is None or not 0.0 < s.fraction < 1.0):
        raise ValueError(f"--fraction={s.fraction}: --method={s.method} wants a share between 0 and 1")
    if s.kind == "structured" and s.keep_kv_heads is None and s.keep_d_ff is None:
        raise ValueError(f"--method={s.method} removes nothing; pass --keep_kv_heads, --keep_d_ff or both")
    if s.uses_inputs and not s.batches:
        raise ValueError(f"--batches={s.batches}: --method={s.method} needs text for its scores")
    if not 0.0 < s.learning_rate < float("inf"):
        raise ValueError(f"--learning_rate={s.learning_rate} is no finite number above 0")


def check_output(output: str | Path | None, source: Path) -> Path:
    """Check and return the path of the folder to write.

    Raises:
      ValueError: it is not given, is the input, exists already, or is in a place that is not writable.
    """
    if not output:
        raise ValueError(f"--output={output} is missing: name a folder to write")
    path = Path(output)
    if outputs.is_same(path, source):
        raise ValueError(f"--output={path} is the input, which would be lost; name another folder")
    if (path.exists() or path.is_symlink()) and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"--output={path} exists and is not an empty folder; name another")
    return outputs.check_folder(path, flag="--output")


def run(
    model: str | None,
    output: str | Path | None,
    settings: Settings,
    *,
    data_path: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Prune a model, fine-tune it if asked, and write it: the whole folder or nothing.

    Args:
      model: as weights.load_checkpoint takes it.
      data_path: text, tokenised by the model's own tokenizer; None = the default text.

    Raises:
      ValueError: bad settings, model, text or output.
      GateFailed: fine-tuning failed.
    """
    check(settings)
    path = check_output(output, weights.resolve(model))
    checkpoint = weights.load_checkpoint(model)
    _check_fit(settings, checkpoint.config)
    tokenizer = tokenizers.load_tokenizer(checkpoint.tokenizer) if _has_tokenizer(checkpoint.tokenizer) else None
    if tokenizer is None:
        say(f"{checkpoint.tokenizer} has no tokenizer.json: the folder gets no tokenizer and no ids of begin and end")
    text = _Text(settings, checkpoint, tokenizer, data_path) if _needs_text(settings) else None
    norms = None
    if settings.uses_inputs:
        say("reading inputs")
        norms = text.input_norms(checkpoint.params)
    config, params = pruned(settings, checkpoint.config, checkpoint.params, norms)
    losses = {}
    if text is not None and settings.batches:
        say("held-out loss")
        losses = {"dense": text.loss(checkpoint.config, checkpoint.params), "pruned": text.loss(config, params)}
    if settings.finetune_steps:
        say(f"fine-tuning, {settings.finetune_steps} steps")
        params = text.finetuned(config, params)
        losses |= {"finetuned": text.loss(config, params)} if settings.batches else {}
    sizes = tuple(sum(value.size for value in each.values()) for each in (checkpoint.params, params))
    result = Result(path, config, sizes, pruning.count(params), losses, text.held_out_tokens() if losses else 0)
    record = {"source": checkpoint.source, "sha256": checkpoint.sha256, "settings": settings._asdict()}
    record |= {"text_sha256": None if text is None else text.data.joined_sha256}
    record |= {"parameters": sizes, "zeros": result.zeros._asdict(), "held_out_nats_per_token": losses}
    record |= {"held_out_tokens": result.held_out_tokens}
    with outputs.whole_folder(path) as made:
        weights.save_checkpoint(made, config, params, tokenizer=tokenizer)
        outputs.write_json(made / RECORD, record)
    return result


def pruned(
    settings: Settings,
    config: TransformerConfig,
    params: dict[str, np.ndarray],
    norms: dict[str, np.ndarray] | None = None,
) -> tuple[TransformerConfig, dict[str, np.ndarray]]:
    """Configuration and parameters after pruning.

    Raises:
      ValueError: the settings do not fit the decoder.
    """
    s = settings
    if s.kind == "structured":
        if s.keep_kv_heads is not None:
            config, params = structured.keep_heads(config, params, s.keep_kv_heads, input_norms=norms)
        if s.keep_d_ff is not None:
            config, params = structured.keep_width(config, params, s.keep_d_ff, input_norms=norms)
        return config, dict(params)
    values = pruning.scores(params, norms)
    if s.kind == "2:4":
        return config, pruning.apply(params, pruning.largest_of_groups(values, 2, 4))
    scope = s.scope or ("output" if s.uses_inputs else "matrix")
    return config, pruning.apply(params, pruning.smallest_fraction(values, s.fraction, scope=scope))


def summary(result: Result, settings: Settings) -> str:
    """Summarise in one line what was removed, and its effect on the loss."""
    c, zeros, (before, after) = result.config, result.zeros, result.parameters
    if settings.kind == "structured":
        what = f"{c.num_heads} heads on {c.num_kv_heads} key-value heads, d_ff {c.d_ff}: {after:,} of {before:,} "
        what += f"parameters left ({after / before:.1%})"
    else:
        what = f"{zeros.zeros:,} of {zeros.weights:,} weights of {zeros.matrices} matrices are zero ({zeros.share:.1%})"
    names = {"dense": "dense", "pruned": "pruned", "finetuned": f"after {settings.finetune_steps} steps"}
    losses = ", ".join(f"{value:.4f} {names[name]}" for name, value in result.losses.items())
    held_out = f"; nats per token, {result.held_out_tokens:,} held out: {losses}" if losses else ""
    return f"{settings.method}: {what}{held_out}"


def _needs_text(settings: Settings) -> bool:
    return bool(settings.uses_inputs or settings.batches or settings.finetune_steps)


def _has_tokenizer(path: Path) -> bool:
    return path.is_file() or (path / "tokenizer.json").is_file()


def _check_fit(settings: Settings, config: TransformerConfig) -> None:
    """Raise, before any work, if the decoder cannot have this shape or could not be written."""
    s = settings
    for name, value, most in (
        ("keep_kv_heads", s.keep_kv_heads, config.num_kv_heads),
        ("keep_d_ff", s.keep_d_ff, config.d_ff),
    ):
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"--{name}={value} is not between 1 and the model's {most}")
    if _needs_text(s) and s.seq_len > config.max_seq_len:
        raise ValueError(f"--seq_len={s.seq_len} is over the model's {config.max_seq_len}")
    heads = s.keep_kv_heads or config.num_kv_heads
    update = {"num_kv_heads": heads, "num_heads": heads * config.num_heads // config.num_kv_heads}
    hf_config.config_to_hf(config.model_copy(update=update))


class _Text:
    """Rows of a text for one model, and the operations on them."""

    def __init__(self, settings: Settings, checkpoint: weights.Checkpoint, tokenizer: Any, path: str | None):
        from jaxbench.training import train_inputs

        self.settings = settings
        if tokenizer is None:
            raise ValueError(
                f"--model: {checkpoint.tokenizer} has no tokenizer.json for the text; pass --batches=0 without "
                "--finetune_steps and with a method that needs no text"
            )
        self.config, self.tokenizer, self.path = checkpoint.config, str(checkpoint.tokenizer), path
        self.data = train_inputs.prepare_data(self.run(checkpoint.config), path)
        self._check(checkpoint.config.vocab_size)

    def _check(self, vocab_size: int) -> None:
        from jaxbench.text import dataset

        what = self.path or "the default text"
        for part in (self.data.train, self.data.held_out):
            dataset.check(part.corpus, vocab_size=vocab_size, what=what)

    def run(self, config: TransformerConfig) -> Any:
        """Settings of the training run that fine-tunes."""
        from jaxbench.training.train_config import TrainConfig

        s, steps = self.settings, max(self.settings.finetune_steps, 1)
        return TrainConfig(
            model=config.model_dump(), data={"tokenizer": self.tokenizer, "seq_len": s.seq_len,
            "validation_fraction": VALIDATION}, batch_size=s.batch_size, steps=steps, learning_rate=s.learning_rate,
            schedule={"kind": "cosine", "warmup_steps": steps // 10}, seed=s.seed,
            step={"hold_zeros": True}, evaluation={"batches": s.batches or None},
        )  # fmt: skip

    def input_norms(self, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Norms of the dense model's inputs over the first training batches."""
        from jaxbench.quantization import pruning_text

        batches = (self.data.train.batch(i, self.settings.batch_size) for i in range(self.settings.batches))
        return pruning_text.input_norms(self.config, params, batches)

    def loss(self, config: TransformerConfig, params: dict[str, np.ndarray]) -> float:
        """Held-out loss."""
        from jaxbench.quantization import pruning_text
        from jaxbench.training import train_inputs

        return pruning_text.mean_loss(config, params, train_inputs.evaluation_batches(self.run(config), self.data))

    def held_out_tokens(self) -> int:
        """Number of targets in the mean of `loss`."""
        from jaxbench.training import train_inputs

        return sum(int(batch.mask.sum()) for batch in train_inputs.evaluation_batches(self.run(self.config), self.data))

    def finetuned(self, config: TransformerConfig, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Parameters after the training."""
        from jaxbench.quantization import pruning_text

        return pruning_text.finetuned(self.run(config), config, params, self.data.train)
