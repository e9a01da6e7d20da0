"""The command that writes the scores of each token or chunk of answers: hallucination.py scores (S file)."""

from __future__ import annotations

from absl import flags

from jaxbench import cli, outputs, store
from jaxbench.hallucination import where

ABOUT = "External and parametric scores of every token or chunk of answers, resumable."
VALUES = flags.FLAGS


def define() -> None:
    """Define the flags of scores."""
    cli.define_config("configs/hallucination/scores.yaml")
    cli.define_backend(choices=("flax", "torch"))
    where.define()
    cli.define_workdir("out/hallucination")
    flags.DEFINE_string("input", None, "rows with context, question and response: .jsonl or .parquet; or --data")
    flags.DEFINE_string("data", None, "in its place a folder with sources.jsonl[.gz] and responses*.jsonl[.gz]")
    flags.DEFINE_string("output", None, "one line a token or chunk: .jsonl or .parquet")
    flags.DEFINE_enum("level", "token", ["token", "chunk"], "what is scored")
    about = "tokens of a chunk (unset: chunks are sentences)"
    flags.DEFINE_integer("chunk_tokens", None, about, lower_bound=1)
    flags.DEFINE_integer("processes", 2, "processes of one thread each; 1 = this one, with all threads", lower_bound=1)
    flags.DEFINE_bool("overwrite", False, "replace the output; never an input")


def scores() -> int:
    """Read every answer, and write the scores of its tokens or chunks.

    Raises:
      ValueError: a flag is missing or conflicts with another, or a row is bad; it is named.
    """
    _check_flags()
    from jaxbench.hallucination import extract, lengths, reader_settings, reading
    from jaxbench.hallucination.bulk import row_files, score_files

    settings = cli.load_config(reader_settings.ReaderSettings)
    kind = row_files.kind_of(VALUES.output, flag="--output")
    output = outputs.check_file(VALUES.output, (VALUES.input,), overwrite=VALUES.overwrite)
    rows = score_files.of_folder(VALUES.data) if VALUES.data else score_files.of_file(VALUES.input)
    types = score_files.schema(rows, level=VALUES.level) if kind == "parquet" else None
    place, processes = where.chosen()
    package = reading.PACKAGES[VALUES.backend]
    where.start(package)
    from jaxbench.pretrained import weights

    features = extract.Store(cli.workdir("out/hallucination") / "features", settings, weights.checksum(settings.model))
    tokenizer, window = lengths.limits(settings)
    asked = ((row.place, row.item.question, row.item.response) for row in rows)
    lengths.check_all(asked, tokenizer, window=window, style=settings.style)
    items = [row.item for row in rows]
    with store.alone(output):
        said = reading.read(items, settings, features, package=package, where=place, processes=processes)
        outputs.check_file(output, overwrite=VALUES.overwrite)  # again: another command may have ended since
        units = score_files.lines(rows, features, tokenizer, level=VALUES.level, chunk_tokens=VALUES.chunk_tokens)
        count = score_files.write(output, units, types)
    print(f"written: {output} ({count} {VALUES.level}s of {len(rows)} responses; {said})")
    return cli.EXIT_OK


def _check_flags() -> None:
    if not VALUES.input and not VALUES.data:
        raise ValueError(f"--input is missing (and so is --data={VALUES.data}): name rows to score, or a folder")
    if VALUES.input and VALUES.data:
        raise ValueError(f"--input={VALUES.input}, --data={VALUES.data}: leave one of them out")
    if not VALUES.output:
        raise ValueError(f"--output is missing: name a .jsonl or .parquet file (got {VALUES.output!r})")
    if VALUES.chunk_tokens is not None and VALUES.level != "chunk":
        raise ValueError(f"--chunk_tokens={VALUES.chunk_tokens} is of --level=chunk, and --level={VALUES.level}")
