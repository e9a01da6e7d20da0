"""Continue a file of requests into a file of rows, in batches; an interrupted run resumes (S file).

OUTPUT.run.json records what the rows were made with: a run with anything else does not resume them.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxbench import outputs, store
from jaxbench.generation import requests, writer

BEGUN = "begun"  # in OUTPUT.run.json: the time at which the run began, whose date all of its chat templates write
FORMAT = 2  # of the rows' texts: 2 = a prompt's continuation keeps the space before its first word with every tokenizer


def describe(settings: writer.Settings, content: bytes, **more: Any) -> dict[str, Any]:
    """Everything that determines the rows, by name; `run` is its hash.

    content: the bytes of the file of requests that were parsed; a pipe can be read only once.
    """
    digest = hashlib.sha256(content).hexdigest()
    sampling = settings.sampling._asdict()
    if not sampling["logit_bias"]:
        del sampling["logit_bias"]  # as in records of runs before there was one
    own = {"format": FORMAT, "sampling": sampling, "input_sha256": digest}
    fields = settings._asdict() | own | more
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return json.loads(text) | {"run": hashlib.sha256(text.encode()).hexdigest()[:12]}


def check_output(output: str | Path, read: Sequence[str | Path | None], *, overwrite: bool) -> Path:
    """Check that the rows may be written, and return their path.

    Raises:
      ValueError: it is one of the files that are read, is not a .jsonl file, exists without its OUTPUT.run.json (and
        without overwrite), or is where nothing can be written.
    """
    output = Path(output)
    if not output.name.endswith(".jsonl"):
        raise ValueError(f"--output={output} has an unknown suffix, wanted .jsonl")
    for path in (output, _record(output)):
        outputs.check_file(path, read, overwrite=True)
    if output.exists() and output.stat().st_size and not _record(output).is_file() and not overwrite:
        raise ValueError(
            f"--output={output} exists, and {_record(output).name}, which would say what its rows were made with, does "
            "not; name another file, or pass --overwrite"
        )
    return output


def begun(output: Path, *, overwrite: bool) -> datetime.datetime:
    """Return the local time at which the run began whose rows a file has; now, if it has none or is overwritten."""
    now = datetime.datetime.now().replace(microsecond=0)
    if overwrite or not output.exists() or not output.stat().st_size:
        return now
    try:
        return datetime.datetime.fromisoformat(outputs.read_json(_record(output))[BEGUN])
    except (KeyError, TypeError, ValueError):  # of an earlier version, or no such record: `finished` judges it
        return now


def kept(output: str | Path, *, overwrite: bool) -> str:
    """Sentence that an interrupt prints about the rows."""
    again = "the same command without --overwrite" if overwrite else "the same command"  # with it, the run starts over
    return f"finished rows in {output} are kept; {again} goes on"


def finished(output: Path, wanted: dict[str, Any]) -> int:
    """Return the number of rows of this same run in a file, after truncating it to its last complete line.

    Raises:
      ValueError: its rows are of another run (the message names what differs), or a line is not such a row.
    """
    if not output.exists() or not output.stat().st_size:
        return 0
    held = outputs.read_json(_record(output))
    held = held if isinstance(held, dict) else {}
    differing = [name for name, value in wanted.items() if held.get(name) != value and name != "run"]
    if differing:
        raise ValueError(
            f"--output={output} holds rows made with other {' and '.join(differing)}; name another file, or pass "
            "--overwrite"
        )
    rows = store.rows(output)
    for number, line in enumerate(rows, 1):
        try:
            row = json.loads(line)
            place = (row.get("run"), row.get("row"))
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"--output={output} line {number} is no row of this command ({error})") from error
        if place != (wanted["run"], number - 1):
            raise ValueError(
                f"--output={output} line {number} is row {place[1]} of run {place[0]}, wanted row {number - 1} of "
                f"{wanted['run']}; name another file, or pass --overwrite"
            )
    store.cut_short(output)
    return len(rows)


def run(
    asked: Sequence[requests.Request],
    output: Path,
    wanted: dict[str, Any],
    write: writer.Writer,
    *,
    batch_size: int,
    begun: datetime.datetime,
    done: int = 0,
    progress: Callable[[int], None] = lambda rows: None,
) -> None:
    """Continue the requests after the first `done` and append one line each: its own keys, and requests.WRITTEN.

    begun: the time whose date the requests' chat templates wrote.

    Raises:
      ValueError: a request does not fit the model's context; nothing was written.
    """
    for request in asked[done:]:
        requests.check_room(request.ids, request.place, new_tokens=wanted["new_tokens"], context=write.context)
    for start in range(done, len(asked), batch_size):
        batch = asked[start : start + batch_size]
        ids, rows = [request.ids for request in batch], [request.row for request in batch]
        texts, _ = write(ids, rows, is_chat=[request.is_chat for request in batch])
        if start == 0:
            output.unlink(missing_ok=True)  # before its record changes, or a kill would leave rows with a wrong one
            outputs.write_json(_record(output), wanted | {BEGUN: begun.isoformat()})
        store.append(output, [_row(request, text, wanted["run"]) for request, text in zip(batch, texts)])
        progress(start + len(batch))


def _row(request: requests.Request, text: writer.Text, run_id: str) -> dict[str, Any]:
    values = (request.row, run_id, text.text, text.ids, len(request.ids), text.ended)
    return {**request.fields, **dict(zip(requests.WRITTEN, values, strict=True))}


def _record(output: Path) -> Path:
    return Path(f"{output}.run.json")
