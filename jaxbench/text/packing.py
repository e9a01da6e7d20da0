"""Read texts from files, and cut prompts out of them (S file)."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from jaxbench.pretrained import assets
from jaxbench.text.lines import JSON_LINES, has_surrogate

SUFFIXES = (".txt", ".txt.gz", *JSON_LINES)
DOCUMENT_SEPARATOR = "\f"  # a form feed in a .txt file


@runtime_checkable
class Encoder(Protocol):
    """The part of a tokenizer that prompts need: tokenizer.Tokenizer, or one of small_tokenizers."""

    eos_id: int | None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...


def load_text(path: str | Path | None = None, *, keeps_empty: bool = False) -> list[str]:
    """Documents of a text file, or of the default text; those without text are left out, unless keeps_empty is set.

    .txt (form feeds between documents) or .jsonl (a "text" key in each line), plain or .gz, UTF-8.

    Raises:
      ValueError: no such file, another suffix, no text in it, or a damaged line; the message names file and line.
    """
    if path is None:
        return assets.default_text().split(DOCUMENT_SEPARATOR)
    path = Path(path).expanduser()
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"packing: {path} has an unknown suffix, wanted one of {', '.join(SUFFIXES)}")
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"packing: cannot read {path} ({error})") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"packing: {path} line {line} is not UTF-8 (byte {content[error.start]:#04x})") from error
    if path.name.endswith(JSON_LINES):
        lines = enumerate(text.split("\n"), start=1)
        documents = [json_text(line, f"packing: {path} line {i}") for i, line in lines if line.strip()]
    else:
        documents = text.split(DOCUMENT_SEPARATOR)
    with_text = [document for document in documents if document.strip()]
    if not with_text:
        raise ValueError(f"packing: {path} has no text in its {len(content)} bytes")
    return documents if keeps_empty else with_text


def text_sha256(path: str | Path | None = None) -> str:
    """Hexadecimal SHA-256 for records: of the file's bytes, or of the default text."""
    return assets.TEXT_SHA256 if path is None else assets.sha256_file(path)


def real_prompts(tokenizer: Encoder, lengths: Sequence[int], documents: Sequence[str]) -> list[list[int]]:
    """Cut one prompt (token ids) of exactly each length in tokens, at evenly spaced places in the documents.

    A prompt starts at a paragraph and continues into the next documents if needed, wrapping from the last to the first.

    Raises:
      ValueError: a length below 1, or more tokens wanted than the documents have.
    """
    paragraphs = [part for document in documents for part in document.split("\n\n") if part.strip()]
    if any(length < 1 for length in lengths):
        raise ValueError(f"prompts: lengths {list(lengths)} must be at least 1 token")
    prompts: list[list[int]] = []
    for i, length in enumerate(lengths):
        start = i * len(paragraphs) // len(lengths)
        ordered = paragraphs[start:] + paragraphs[:start]
        prompts.append(_first_tokens(tokenizer, ordered, length))
    return prompts


def json_text(line: str, place: str) -> str:
    """The "text" of one line of a .jsonl file; `place`, such as "packing: a.jsonl line 3", opens the error message."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise ValueError(f'{place} has no "text" string: {line[:60].strip()}')
    if has_surrogate(value["text"]):
        raise ValueError(f'{place}: "text" holds a lone surrogate, which is no Unicode text: {line[:60].strip()!a}')
    return value["text"]


def _first_tokens(tokenizer: Encoder, paragraphs: list[str], length: int) -> list[int]:
    """First `length` token ids of the paragraphs, encoding only about as many paragraphs as that needs."""
    count = 1
    while True:
        ids = tokenizer.encode("\n\n".join(paragraphs[:count]))
        if len(ids) >= length:
            return ids[:length]
        if count >= len(paragraphs):
            raise ValueError(
                f"prompts: the text has {len(ids)} tokens, a prompt of {length} was wanted; pass more text"
            )
        # The next try takes as many as the tokens so far suggest, with a margin.
        count = min(len(paragraphs), max(count + 1, count * length // max(len(ids), 1) + 1))
