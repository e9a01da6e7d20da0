"""Inputs of a training run: rows of a text, a decoder and its initial parameters (S file)."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.pretrained import small_tokenizers, weights
from jaxbench.pretrained import tokenizer as tokenizers
from jaxbench.text import dataset
from jaxbench.training import observe
from jaxbench.training.train_config import TrainConfig


class Data(NamedTuple):
    """Rows to train on and rows held out."""

    train: dataset.PackedDataset
    held_out: dataset.PackedDataset
    tokenizer: Any
    byte_lengths: np.ndarray | None  # UTF-8 bytes of each id
    text_sha256: str
    held_out_sha256: str = ""  # of a text of its own; "" = the held-out rows are part of the text

    @property
    def joined_sha256(self) -> str:
        """Hashes of the texts, one after the other, as checkpoints and results keep them."""
        return self.text_sha256 + self.held_out_sha256

    @property
    def tokenizer_id(self) -> str | None:
        """What tells a tokenizer that gives other ids from this one; None = ids without a tokenizer."""
        return None if self.tokenizer is None else dataset.tokenizer_id(self.tokenizer)


def prepare(settings: TrainConfig, path: str | None = None) -> tuple[Data, TransformerConfig, dict[str, np.ndarray]]:
    """Return the rows, decoder and initial parameters of a run.

    Raises:
      ValueError: bad data (see prepare_data, dataset.check), rows of more documents than the decoder tells apart, or a
        checkpoint to start from that does not fit, by its shape or by its tokenizer.
    """
    data = prepare_data(settings, path)
    model, params = starting_point(settings, None if data.tokenizer is None else data.tokenizer.vocab_size)
    if settings.start not in (None, settings.data.tokenizer) and data.tokenizer is not None:
        _check_tokenizer(settings, data.tokenizer)
    source = path or settings.data.path or "the default text"
    held_out = settings.data.validation_path or f"the held-out part of {source}"
    for rows, what in ((data.train, f"the training part of {source}"), (data.held_out, held_out)):
        dataset.check(rows.corpus, vocab_size=model.vocab_size, what=what)
        if data.byte_lengths is not None and model.vocab_size > len(data.byte_lengths):
            _check_bytes(rows.corpus.ids, len(data.byte_lengths), what)
    if not any(batch.mask.any() for batch in evaluation_batches(settings, data)):
        raise ValueError(
            f"train: the {settings.evaluation.batches} batches of {held_out} that evaluation.batches allows have no "
            "target; allow more"
        )
    _check_documents(settings, data, model)
    return data, model, params


def _check_documents(settings: TrainConfig, data: Data, model: TransformerConfig) -> None:
    """Raise if a row that the run would read, at any step, has more documents than the decoder's layers tell apart."""
    if model.layer_kind is None:
        return
    trained = data.train.num_documents(settings.steps * settings.batch_size)
    held_out = data.held_out.num_documents(_num_evaluated(settings, data.held_out) * settings.batch_size)
    for counts in itertools.chain(trained, held_out):
        model.check_documents(np.stack([np.ones_like(counts), counts], axis=1))  # each row's first and last segment


def _check_tokenizer(settings: TrainConfig, tokenizer: Any) -> None:
    """Raise if the checkpoint to start from has learned other ids of tokens than the run's tokenizer gives.

    Of the tokens that only one of both knows, nothing is wanted: a tokenizer may have gained some.
    """
    try:
        theirs = _vocabulary(tokenizers.load_tokenizer(None if settings.start == "default" else settings.start))
    except ValueError:  # it has none, or one of an unsupported kind
        return
    ours = _vocabulary(tokenizer)
    shared = sorted(ours.keys() & theirs.keys(), key=theirs.__getitem__)
    differing = [token for token in shared if ours[token] != theirs[token]]
    if differing or not shared:
        example = f", {differing[0]!r} has {theirs[differing[0]]} (here: {ours[differing[0]]})" if differing else ""
        raise ValueError(
            f"start: {settings.start} was trained on other token ids than data.tokenizer={settings.data.tokenizer} "
            f"gives: {len(shared) - len(differing)} of its {len(theirs)} tokens have the same{example}; pass "
            f"--set=data.tokenizer={settings.start}"
        )


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Ids of a tokenizer's tokens, by the names that they have in tokenizer.json."""
    if hasattr(tokenizer, "core"):
        return tokenizer.core.get_vocab(with_added_tokens=True)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return _vocabulary(tokenizers.load_tokenizer(folder))


def _check_bytes(ids: np.ndarray, num_tokens: int, what: str) -> None:
    """Raise if a file of token ids has one that is not the tokenizer's: its bytes are unknown."""
    if (found := int(ids.max())) >= num_tokens:
        raise ValueError(
            f"train: {what} has token id {found}, and data.tokenizer has {num_tokens} tokens, 0 to {num_tokens - 1}; "
            "name the tokenizer that made it, or data.tokenizer=byte for ids of none"
        )


def evaluation_batches(settings: TrainConfig, data: Data) -> Iterator[dataset.Batch]:
    """Yield the batches of an evaluation: the same held-out rows every time, each once."""
    rows, size = data.held_out, settings.batch_size
    for index in range(_num_evaluated(settings, rows)):
        batch = rows.batch(index, size)
        # The last batch may run into the next epoch; mask those rows.
        inside = np.arange(size) + index * size < rows.rows_per_epoch
        yield batch._replace(mask=batch.mask & inside[:, None])


def _num_evaluated(settings: TrainConfig, rows: dataset.PackedDataset) -> int:
    """Number of batches of an evaluation."""
    count = -(-rows.rows_per_epoch // settings.batch_size)
    return min(count, settings.evaluation.batches or count)


def starting_point(settings: TrainConfig, vocab_size: int | None) -> tuple[TransformerConfig, dict[str, np.ndarray]]:
    """Return the decoder of a run and its initial parameters; vocab_size is the tokenizer's.

    Raises:
      ValueError: the checkpoint to start from is another decoder, or a workload's layers do not fit it.
    """
    plain, model = settings.model.resolved(vocab_size), settings.decoder(vocab_size)
    if settings.start is None:
        return model, initial.initial_params(model, settings.seed)
    checkpoint = weights.load_checkpoint(None if settings.start == "default" else settings.start)
    ours, theirs = plain.model_dump(exclude={"dropout"}), checkpoint.config.model_dump(exclude={"dropout"})
    differing = [f"{key}={ours[key]} (its: {theirs[key]})" for key in ours if ours[key] != theirs[key]]
    if differing:
        raise ValueError(f"start: {settings.start} is another decoder than model: {', '.join(differing)}")
    return model, initial.inserted(model, checkpoint.params, settings.seed)


def prepare_data(settings: TrainConfig, path: str | None = None) -> Data:
    """Return the rows of a configuration's text, which is tokenised on first use.

    Raises:
      ValueError: a bad file (see dataset.prepare), or a held-out text beside token ids of an unknown tokenizer.
    """
    source, data = path or settings.data.path, settings.data
    bar, progress = observe.reading("tokenising")
    with bar:
        corpus = dataset.prepare(source, tokenizer=data.tokenizer, progress=progress)
    if data.validation_path is not None:
        if corpus.tokenizer is None and Path(data.validation_path).suffix not in dataset.TOKEN_SUFFIXES:
            raise ValueError(
                f"data.validation_path={data.validation_path} is a text, and {source} holds token ids of a tokenizer "
                f"that data.tokenizer={data.tokenizer} does not say; wanted ids of the same one "
                f"({', '.join(dataset.TOKEN_SUFFIXES)}), or its name as data.tokenizer"
            )
        first, last = corpus, dataset.prepare(data.validation_path, tokenizer=corpus.tokenizer or data.tokenizer)
    else:
        first, last = dataset.split(corpus, data.validation_fraction)
    tokenizer = corpus.tokenizer
    lengths = None if tokenizer is None else small_tokenizers.byte_lengths(tokenizer)
    rows = dataset.PackedDataset(first, data.seq_len, seed=settings.seed)
    held_out = dataset.PackedDataset(last, data.seq_len, seed=settings.seed)
    return Data(rows, held_out, tokenizer, lengths, corpus.sha256, last.sha256 if data.validation_path else "")
