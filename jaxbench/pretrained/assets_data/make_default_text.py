"""Make default_text.txt.gz from this Python's `pydoc_data.topics`: readable paragraphs only, RST markup removed.

Run once, with Python 3.11.7; other versions give other text, which is why the result is committed with its checksum.
    python jaxbench/pretrained/assets_data/make_default_text.py   # prints the sha256 for jaxbench/pretrained/assets.py
"""

import gzip
import hashlib
import pydoc_data.topics
import re
import textwrap
from pathlib import Path

MIN_WORDS = 12  # shorter paragraphs are headings, signatures and table cells
MIN_LETTERS = 0.93  # share of letters, spaces and sentence marks in prose; code has less
CODE_MARKS = ("::=", ">>>", "...  ", "->", "==", "{", "}", "def ", "return ", " = ", "__getattr", "|")


def paragraph(block: str) -> str:
    """Join a block of lines to one line of prose; empty if it is not prose."""
    text = " ".join(textwrap.dedent(block).split())
    text = re.sub(r"^(\*|\d+\.|-) ", "", text)  # list bullets
    text = re.sub(r"(?<![\w*])\*{1,2}(?=\S)([^*]+?)(?<=\S)\*{1,2}(?![\w*])", r"\1", text)  # emphasis
    text = re.sub(r" ?\[(\w|#)+\]_?", "", text)  # footnote marks
    text = text.replace("built- in", "built-in").replace("“", '"').replace("”", '"').replace("’", "'")
    text = re.sub(r'"([^"\s]+)"', r"\1", text)  # literals
    letters = sum(c.isalpha() or c in " .,;:'()-" for c in text)
    is_sentence = text[:1].isupper() and text.endswith((".", ":", ".)", "?"))
    is_prose = len(text.split()) >= MIN_WORDS and letters >= MIN_LETTERS * len(text)
    return text if is_sentence and is_prose and not any(mark in text for mark in CODE_MARKS) else ""


def main() -> None:
    """Write the file next to this one and print its checksum."""
    documents, seen = [], set()
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        kept = [p for p in map(paragraph, re.split(r"\n\s*\n", topic)) if p and p not in seen]
        seen.update(kept)  # topics repeat each other's sections
        if sum(map(len, kept)) >= 400:
            documents.append("\n\n".join(kept))
    content = "\f".join(documents).encode()
    path = Path(__file__).with_name("default_text.txt.gz")
    path.write_bytes(gzip.compress(content, compresslevel=9, mtime=0))
    print(f"{hashlib.sha256(content).hexdigest()}  {len(content)} bytes, {path.stat().st_size} compressed")


if __name__ == "__main__":
    main()
