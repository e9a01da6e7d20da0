"""Packed rows versus transformers' padding-free collator, its logits and loss; texts versus pyarrow's reader."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.json
import torch
import transformers

import torch_ref.train
import torch_ref.transformer
from jaxbench import philox
from jaxbench.parity import cases, gates
from jaxbench.parity.oracles import transformers_model
from jaxbench.parity.oracles.philox import xla_words
from jaxbench.pretrained import small_tokenizers, weights
from jaxbench.text import dataset, packing

TEXTS = ["One sentence.\n\nAnother paragraph, a little longer.", "caf\u00e9", "Third: " + "words " * 9, "x", "the end."]
LENGTH = 16  # tokens of a row; documents are cut at its ends
COLLATOR = "transformers.DataCollatorWithFlattening"


def gates_of(case: cases.Case) -> list[gates.Gate]:
    """Gates of texts, prompts, rows, their order, and a model's logits and loss on them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
        read = pyarrow.json.read_json(path).column("text").to_pylist()
        corpus = dataset.prepare(path, tokenizer="byte", cache=Path(folder) / "cache")
        documents = [np.array(corpus.ids[a:b]) for a, b in zip(corpus.starts, corpus.starts[1:], strict=False)]
        texts = {"load_text": "\f".join(packing.load_text(path)), "dataset": _decoded(documents)}
        wanted = {name: "\f".join(read) for name in texts}
        prompts = packing.real_prompts(small_tokenizers.ByteTokenizer(), (3, 20, 40), read)
        rows = dataset.PackedDataset(corpus, LENGTH, seed=_seed(0), shuffle=False)
        found = [
            _exact("texts", _codes(texts), _codes(wanted), "pyarrow.json"),
            _exact("prompts", _prompts(prompts, read), {"start a paragraph": np.ones(3)}, "Python's str and bytes"),
            *_rows(rows.rows(0, rows.rows_per_epoch), documents),
            _order(corpus),
            *_model(documents),
        ]
    return found


def _exact(what: str, values: dict, reference: dict, source: str) -> gates.Gate:
    return gates.oracle(what, values, reference, source=source, tolerance=0.0)


def _codes(texts: dict[str, str]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}


def _decoded(documents: list[np.ndarray]) -> str:
    """Decode documents of byte ids, whose last id marks the end."""
    return "\f".join(bytes(ids[:-1].astype(np.uint8)).decode() for ids in documents)


def _prompts(prompts: list[list[int]], texts: list[str]) -> dict[str, np.ndarray]:
    """1 for each prompt that is the first bytes from the start of some paragraph on, the texts read cyclically."""
    paragraphs = "\n\n".join(texts).split("\n\n")
    turns = ["\n\n".join(paragraphs[i:] + paragraphs[:i]).encode() for i in range(len(paragraphs))]
    return {"start a paragraph": np.array([any(turn.startswith(bytes(ids)) for turn in turns) for ids in prompts])}


def _collated(parts: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs, labels, positions and document numbers by token, arrays [tokens]; -100 = no label."""
    collator = transformers.DataCollatorWithFlattening(return_tensors="np", return_seq_idx=True)
    return {name: value[0] for name, value in collator([{"input_ids": part.tolist()} for part in parts]).items()}


def _rows(batch: dataset.Batch, documents: list[np.ndarray]) -> list[gates.Gate]:
    """Gates of unshuffled rows: concatenated tokens and targets, and positions and documents within each row."""
    stream = _collated(documents)
    count = len(stream["input_ids"])
    flat = {name: value.reshape(-1)[:count] for name, value in batch._asdict().items()}
    labels = np.append(stream["labels"][1:], -100)  # of the token that follows
    ours = {"tokens": flat["tokens"], "targets": np.where(flat["mask"], flat["targets"], -100)}
    wanted = {"tokens": stream["input_ids"], "targets": labels}
    places, segments = [], []
    for start in range(0, count, LENGTH):
        end = min(start + LENGTH, count)
        cuts = np.flatnonzero(np.diff(stream["seq_idx"][start:end])) + 1
        row = _collated(np.split(stream["input_ids"][start:end], cuts))
        places.append(row["position_ids"])
        segments.append(row["seq_idx"] + 1)
    inner = {"positions": flat["positions"], "segments": flat["segments"]}
    inner |= {"padding": batch.positions.reshape(-1)[count:]}
    wanted_inner = {"positions": np.concatenate(places), "segments": np.concatenate(segments)}
    wanted_inner |= {"padding": np.full(batch.positions.size - count, -1)}
    return [
        _exact("packed rows, tokens and targets", ours, wanted, COLLATOR),
        _exact("packed rows, positions and documents", inner, wanted_inner, COLLATOR),
    ]


def _seed(epoch: int) -> int:
    """Seed with which XLA's Philox draws an epoch's document order: its counter ends with the key."""
    return (philox.site_id("dataset.documents") << 32) | epoch


def _order(corpus: dataset.Corpus) -> gates.Gate:
    """Gate of the document order in two epochs, from XLA's random words; rows are cut from all documents."""
    ours, wanted, count = {}, {}, len(corpus.starts) - 1
    for epoch in (0, 1):
        rows = dataset.PackedDataset(corpus, len(corpus.ids), seed=_seed(epoch))  # one row an epoch
        order = np.argsort(xla_words(_seed(epoch), 0, count), kind="stable")
        parts = [np.array(corpus.ids[corpus.starts[i] : corpus.starts[i + 1]]) for i in order]
        ours[f"epoch {epoch}"] = rows.rows(epoch, 1).tokens[0]
        wanted[f"epoch {epoch}"] = _collated(parts)["input_ids"]
    return _exact("order of documents", ours, wanted, f"XLA's RngBitGenerator, {COLLATOR}")


def _model(documents: list[np.ndarray]) -> list[gates.Gate]:
    """Gates of a packed row's logits and loss versus transformers' Llama with the same positions and labels."""
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers_model.random_model(config)
    row = {name: value[None] for name, value in _collated(documents).items()}
    with tempfile.TemporaryDirectory() as folder:
        transformers_model.save(model, folder)
        checkpoint = weights.load_checkpoint(folder)
    twin = torch_ref.transformer.build(checkpoint.config, checkpoint.params, dtype="float64")
    tokens, positions = (torch.from_numpy(row[name]) for name in ("input_ids", "position_ids"))
    targets = np.append(row["labels"][:, 1:], [[-100]], axis=1)
    batch = torch_ref.train.Batch(
        tokens, torch.from_numpy(np.maximum(targets, 0)), positions, torch.from_numpy(targets >= 0),
        torch.from_numpy(row["seq_idx"]),
    )  # fmt: skip
    wanted = transformers_model.logits(model, row["input_ids"], row["position_ids"])
    with torch.no_grad():
        logits = torch_ref.train.predict(twin, batch)
        loss = float(torch_ref.train.loss_of(logits, batch))
        with transformers_model.wide():
            theirs = float(
                model(tokens, position_ids=positions, labels=torch.from_numpy(row["labels"]), use_cache=False).loss
            )
    return [
        gates.oracle(
            "logits of a packed row", {"model": logits.numpy()}, {"model": wanted}, source="transformers' Llama"
        ),
        gates.oracle("loss of a packed row", {"model": loss}, {"model": theirs}, source="transformers' Llama"),
    ]
