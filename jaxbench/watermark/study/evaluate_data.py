"""Prompts, their natural continuations and human text for an evaluation (S file)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.text import packing, passages


class Material(NamedTuple):
    """Input data of an evaluation."""

    prompts: list[list[int]]  # token ids
    natural: list[str]  # the human continuation of each prompt
    human: list[str]  # texts for false-positive rates, and carriers of copy-paste
    source: str
    sha256: str


def load(
    path: str | None, tokenizer: Any, *, prompts: int, prompt_tokens: int, natural_tokens: int, human_texts: int
) -> Material:
    """Read prompts and human text.

    Args:
      path: None is the packaged text; a file as packing.load_text takes it; or a folder with one `*prompts*.json` (a
        list of {"prompt", "natural_text"}) and one `*documents*.json[.gz]` (a list of {"text"}).
      prompt_tokens: length of prompts cut out of running text; of a folder's prompts, at most this many last tokens.
      natural_tokens: length of continuations and human texts, where they are cut out of running text.

    Raises:
      ValueError: files are missing or damaged, or there is too little text.
    """
    if path is not None and Path(path).expanduser().is_dir():
        return _folder(Path(path).expanduser(), tokenizer, prompts, prompt_tokens, human_texts)
    documents = passages.read_texts(path)
    pieces = packing.real_prompts(tokenizer, [prompt_tokens + natural_tokens] * prompts, documents)
    human = passages.cut(tokenizer, documents, num_tokens=natural_tokens, max_passages=human_texts)
    return Material(
        [ids[:prompt_tokens] for ids in pieces],
        [tokenizer.decode(ids[prompt_tokens:]) for ids in pieces],
        [tokenizer.decode(ids) for ids in human.tokens],
        Path(path).name if path else "packaged text",
        fingerprint(path),
    )


def fingerprint(path: str | None) -> str:
    """Return the sha256 of the files that `load` reads, without decoding them.

    Raises:
      ValueError: no such file.
    """
    if path is None or Path(path).expanduser().is_file():
        return packing.text_sha256(path and Path(path).expanduser())
    if not Path(path).expanduser().is_dir():
        raise ValueError(f"data: {path} is neither a file nor a folder")
    files = _files(Path(path).expanduser())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _files(folder: Path) -> list[Path]:
    return [_only(folder, pattern) for pattern in ("*prompts*.json", "*documents*.json*")]


def _folder(folder: Path, tokenizer: Any, prompts: int, prompt_tokens: int, human_texts: int) -> Material:
    files = _files(folder)
    starts = passages.read_texts(files[0], key="prompt")
    natural = passages.read_texts(files[0], key="natural_text")
    if len(starts) < prompts:
        raise ValueError(f"data: {files[0]} has {len(starts)} prompts, {prompts} are wanted")
    ids = [tokenizer.encode(text)[-prompt_tokens:] for text in starts[:prompts]]
    empty = [i for i, own in enumerate(ids) if not own]
    if empty:
        raise ValueError(f"data: {files[0]} entry {empty[0]} has an empty prompt")
    human = [text for text in passages.read_texts(files[1]) if text.strip()][:human_texts]
    source = " and ".join(path.name for path in files)
    return Material(ids, natural[:prompts], human, source, fingerprint(str(folder)))


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"data: {folder} must have one file {pattern}, it has {names}")
    return found[0]


def first_tokens(tokenizer: Any, texts: Sequence[str], limit: int) -> list[str]:
    """Cut texts to at most `limit` tokens."""
    encoded = tokenizer.encode_batch(list(texts), add_special=False)
    return [text if len(ids) <= limit else tokenizer.decode(ids[:limit]) for text, ids in zip(texts, encoded)]
