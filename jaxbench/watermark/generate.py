"""Generate marked continuations of prompts, in batches whose rows each have a scheme and a key.

Rows cycle through the marks of a run; a row's tokens depend on the seed and the row number, not on the batch. Results
are one JSON line per row, without keys; an interrupted run resumes after its last whole line. OUTPUT.run.json records
what the rows were made with, keys included as a salted hash: a run with other settings does not resume from them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from jaxbench import outputs, sample, store, transformer
from jaxbench.config import Base
from jaxbench.generation import decoder
from jaxbench.native import model as native_model
from jaxbench.pretrained import weights
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.text import lines, packing
from jaxbench.watermark import logits_processor, run_identity
from jaxbench.watermark.config import Scheme, check_generates, num_payloads
from jaxbench.watermark.green_lists import lists_of
from jaxbench.watermark.keys import Key, key_of

DEFAULT_TEXT = {"num_prompts": 8, "prompt_tokens": 32}
LISTED = 5  # how many skipped lines a message names


class Mark(Base):
    """One of the marks that the rows cycle through."""

    name: str  # of the mark, in the records
    scheme: Scheme | None = None  # None: not marked
    key_file: str | None = None  # made by `watermark.py keygen`
    payload: int = Field(default=0, ge=0)  # message of schemes with payload_bits

    @model_validator(mode="after")
    def _check(self) -> Mark:
        limit = 1 if self.scheme is None else num_payloads(self.scheme)
        if self.payload >= limit:
            raise ValueError(f"mark {self.name!r}: payload={self.payload}, wanted below {limit} for its payload_bits")
        if self.scheme is None and self.key_file is not None:
            raise ValueError(f"mark {self.name!r}: key_file={self.key_file} without a scheme marks nothing; name one")
        return self

    def read_key(self) -> Key | None:
        """Read the key of the mark; None if it has no scheme."""
        missing = (
            f"generate: mark {self.name!r} names no key_file; make one with `watermark.py keygen --output=secret.key`"
        )
        return None if self.scheme is None else key_of(self.scheme, self.key_file, missing=missing)


class SamplingConfig(Base):
    """SamplingParams as a configuration, checked when the file is read; tokens are drawn unless it says otherwise."""

    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    repetition_penalty: float = Field(default=1.0, gt=0)


class GenerateConfig(Base):
    """A run of marked generation."""

    marks: tuple[Mark, ...] = Field(min_length=1)  # row r takes mark r mod their number
    model: str = "default"  # as jaxbench.pretrained.weights.load_checkpoint takes it
    dtype: Literal["float32", "bfloat16"] = "float32"  # if --weights is not given (generation/decoder.py: choose)
    prompts: str | None = None  # a file of prompts (.txt split at form feeds, .jsonl); None: the default text
    num_prompts: int | None = Field(default=None, ge=1)  # None: all of a file, 8 of the default text
    prompt_tokens: int | None = Field(default=None, ge=1)  # at most; None: all of a file's, 32 of the default text's
    chat: bool = False  # put each whole prompt into the model's chat template
    new_tokens: int = Field(default=200, ge=1, le=10**6)  # at most
    batch_size: int = Field(default=8, ge=1)  # rows generated together
    sampling: SamplingConfig = SamplingConfig()
    seed: int = Field(default=0, ge=0, lt=2**64)  # of the ordinary randomness

    @model_validator(mode="before")
    @classmethod
    def _of_the_default_text(cls, given: Any) -> Any:
        """Fill in the number and length of prompts for the default text; for a file, None keeps all of it."""
        if not isinstance(given, Mapping) or given.get("prompts") is not None:
            return given
        return {**given, **{name: value for name, value in DEFAULT_TEXT.items() if given.get(name) is None}}

    @model_validator(mode="after")
    def _check(self) -> GenerateConfig:
        for scheme in (mark.scheme for mark in self.marks if mark.scheme is not None):
            if scheme.draws and not self.sampling.temperature:
                raise ValueError(
                    f"generate: sampling.temperature={self.sampling.temperature} leaves scheme {scheme.scheme} nothing "
                    "to draw, wanted above 0"
                )
            check_generates(scheme, "generate")
        return self


class Backend(NamedTuple):
    """The modules that generate: those of jaxbench, jaxbench.eqx or torch_ref."""

    transformer: types.ModuleType = transformer
    sample: types.ModuleType = sample
    logits_processor: types.ModuleType = logits_processor
    native: types.ModuleType | None = native_model  # needed only for native kernels


def run(
    settings: GenerateConfig,
    output: str | Path,
    *,
    keys: Sequence[Key | None] | None = None,
    backend: Backend = Backend(),
    overwrite: bool = False,
    device: str = "cpu",
    options: decoder.Options = decoder.Options("xla"),
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Generate, write one JSON line per row, and return the file's path.

    A line has: row, id (of a file's prompt: its own, or its number), run (the configuration's id), mark, scheme,
    prompt, prompt_ids, continuation_ids, ids (both), prompt_tokens (how many of them are the prompt), text (the
    continuation).

    Args:
      keys: one for each mark, instead of key files; None for a mark without a scheme.
      overwrite: start again if the file exists.
      device: where the backend runs; a run does not resume from rows of another device.
      options: kernels and number types; to resume, those that decide tokens have to be the same.

    Raises:
      ValueError: a key is missing, prompts do not fit the model, the kernels are not available, or the file is an
        input, holds anything but rows of this run, or is being written by another process.
    """
    output, record = Path(output), Path(f"{output}.run.json")
    keys = [mark.read_key() for mark in settings.marks] if keys is None else list(keys)
    if [key is not None for key in keys] != [mark.scheme is not None for mark in settings.marks]:
        raise ValueError(f"generate: {len(keys)} keys for {len(settings.marks)} marks, wanted one for each scheme")
    if not output.name.endswith(".jsonl"):
        raise ValueError(f"output: {output} has an unknown suffix, wanted .jsonl")
    read = [settings.prompts, settings.model, *(mark.key_file for mark in settings.marks)]
    outputs.check_file(output, read, overwrite=True)
    tokenizer = load_tokenizer(settings.model)
    choice, used = _choose(settings, options, device, say), [key for key in keys if key is not None]
    wanted = _describe(settings, f"{backend.transformer.__name__} on {device}", choice)
    with store.alone(output):
        done = 0 if overwrite else _finished(output, record, wanted, used)
        prompts = read_prompts(settings, tokenizer, say=say)
        if done >= len(prompts):
            say(f"{output} has all {len(prompts)} rows")
            return output
        if done:
            say(f"{output} has {done} of {len(prompts)} rows, going on")
        modules = decoder.Backend(backend.transformer, backend.sample, backend.native)
        model = decoder.load(settings.model, choice, modules).model
        writer = Writer(settings, keys, model=model, eos_id=tokenizer.end_ids, backend=backend)
        for start in range(done, len(prompts), settings.batch_size):
            rows = range(start, min(start + settings.batch_size, len(prompts)))
            made = _records(settings, tokenizer, wanted["run"], prompts, rows, writer)
            if start == 0:  # anything that cannot be generated has failed by now
                # before its record changes, or a kill would leave rows under a wrong one
                output.unlink(missing_ok=True)
                run_identity.write(record, wanted, used)
            store.append(output, made)
            say(f"{rows.stop} of {len(prompts)} rows")
    return output


class Prompt(NamedTuple):
    """A prompt as token ids."""

    ids: list[int]
    id: str | None = None  # of a file's prompt


class Given(NamedTuple):
    """A prompt of a file."""

    id: str  # the prompt's id in the file, or else its number
    place: str  # for errors
    text: str


class Writer:
    """Continues prompts; the row number decides the mark and key of each row."""

    def __init__(
        self,
        settings: GenerateConfig,
        keys: Sequence[Key | None],
        *,
        model: Any,
        eos_id: int | Sequence[int] | None,
        backend: Backend = Backend(),
    ):
        """Prepare one processor per distinct scheme."""
        self._settings, self._keys = settings, list(keys)
        vocab_size = model.vocab_size
        self._schemes = list({mark.scheme: None for mark in settings.marks if mark.scheme is not None})
        watermark = backend.logits_processor.Watermark
        self._processors = [
            watermark(scheme, vocab_size=vocab_size, green_lists=lists_of(scheme, vocab_size=vocab_size))
            for scheme in self._schemes
        ]
        sampling = backend.sample.SamplingParams(**settings.sampling.model_dump())
        self._generator = backend.sample.Generator(model, eos_id=eos_id, sampling=sampling, processors=self._processors)

    def __call__(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> list[list[int]]:
        """Return the continuation of each prompt; `rows` are their row numbers in the run."""
        settings = self._settings
        marks = [row % len(settings.marks) for row in rows]
        states = []
        for scheme, processor in zip(self._schemes, self._processors):
            own = [settings.marks[mark].scheme == scheme for mark in marks]
            keys = [self._keys[mark] if is_own else None for mark, is_own in zip(marks, own)]
            payloads = [settings.marks[mark].payload if is_own else 0 for mark, is_own in zip(marks, own)]
            states.append(processor.state(keys, payloads=payloads, seed=settings.seed, row_ids=rows))
        output = self._generator(
            prompts, max_new_tokens=settings.new_tokens, seed=settings.seed, row_ids=list(rows), processor_states=states
        )
        return [[int(token) for token in ids[:length]] for ids, length in zip(output.tokens, output.lengths)]


def read_prompts(
    settings: GenerateConfig, tokenizer: Any, *, say: Callable[[str], None] = lambda line: None
) -> list[Prompt]:
    """Return the prompts of a run; one line to `say` reports what of a file is skipped or cut.

    Raises:
      ValueError: the file has no text or a bad line, the model has no chat template, or its context is too short.
    """
    if settings.prompts is not None:
        return _file_prompts(settings, tokenizer, say)
    documents = packing.load_text()
    if settings.chat:
        return [Prompt(_chat(tokenizer, document.strip())) for document in documents[: settings.num_prompts]]
    lengths = [settings.prompt_tokens] * settings.num_prompts
    return [Prompt(ids) for ids in packing.real_prompts(tokenizer, lengths, documents)]


def _file_prompts(settings: GenerateConfig, tokenizer: Any, say: Callable[[str], None]) -> list[Prompt]:
    """Return the prompts of a file, limited and cut to the settings and the model's context."""
    context, wanted = weights.read_config(settings.model).max_seq_len, settings.prompt_tokens
    room = context - settings.new_tokens
    if room < 1:
        raise ValueError(
            f"generate: new_tokens={settings.new_tokens} leaves no room for a prompt in the model's context of "
            f"{context} tokens; lower it"
        )
    given, notes = _given(settings.prompts)
    taken = given[: settings.num_prompts]
    if len(taken) < len(given):
        notes.append(f"{len(taken)} of {len(given)} prompts are taken (num_prompts={settings.num_prompts})")
    if settings.chat:
        prompts = [Prompt(_chat(tokenizer, each.text), each.id) for each in taken]
        for each, prompt in zip(taken, prompts):
            if len(prompt.ids) > room:  # cutting would break the chat template
                raise ValueError(
                    f"generate: {settings.prompts} {each.place} has {len(prompt.ids)} tokens as a chat, and the "
                    f"model's context of {context} less new_tokens={settings.new_tokens} takes {room}; shorten it"
                )
    else:
        limit = room if wanted is None else min(wanted, room)
        whole = [tokenizer.encode(each.text) for each in taken]
        prompts = [Prompt(ids[:limit], each.id) for each, ids in zip(taken, whole)]
        if num_cut := sum(len(ids) > limit for ids in whole):
            why = f"the model's context of {context} less new_tokens={settings.new_tokens}"
            notes.append(
                f"{num_cut} are cut to {limit} tokens ({f'prompt_tokens={wanted}' if limit == wanted else why})"
            )
    if notes:
        say(f"{settings.prompts}: {'; '.join(notes)}")
    return prompts


def _given(path: str) -> tuple[list[Given], list[str]]:
    """Return the prompts of a file, and notes on empty ones.

    Raises:
      ValueError: see packing.load_text; or lines.read cannot use a line.
    """
    kind, numbered = "prompt", list(enumerate(packing.load_text(path, keeps_empty=True), 1))
    ids: dict[int, str] = {}  # by number, where the file has them
    if path.endswith(lines.JSON_LINES):
        kind, numbered = "line", []
        for chunk in lines.chunks(path):
            records, bad = lines.read(chunk)
            if bad:
                raise ValueError(f"generate: {path} line {bad[0].line}: {bad[0].problem}")
            numbered += [(record.line, record.content) for record in records]
            ids |= {record.line: record.id for record in records if record.id is not None}
    elif not numbered[-1][1].strip():
        del numbered[-1]  # a form feed at the end of a file begins no prompt
    found = [Given(ids.get(i, str(i)), f"{kind} {i}", text.strip()) for i, text in numbered if text.strip()]
    empty = [i for i, text in numbered if not text.strip()]
    if not empty:
        return found, []
    more = f" and {len(empty) - LISTED} more" if len(empty) > LISTED else ""
    return found, [f"{len(empty)} empty texts are left out ({kind} {', '.join(map(str, empty[:LISTED]))}{more})"]


def _chat(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]), add_special=False)


def _choose(
    settings: GenerateConfig, options: decoder.Options, device: str, say: Callable[[str], None]
) -> decoder.Choice:
    """Choose the kernels of a run; `say` reports why they are not native."""
    read_config = functools.partial(weights.read_config, settings.model)
    choice = decoder.choose(options, device, dtype=settings.dtype, config=read_config)
    decoder.check_rows(choice, settings.batch_size, "generate: batch_size")
    if choice.note:
        say(choice.note)
    return choice


def _describe(settings: GenerateConfig, backend: str, choice: decoder.Choice) -> dict[str, Any]:
    """Return everything except the keys that decides the texts, by name, so that a message can say what differs.

    The kernels' entries are None for xla in the configuration's dtype, which equals records without such entries.
    """
    marks = tuple(mark.model_copy(update={"key_file": None}) for mark in settings.marks)  # a key counts, not its path
    fields = settings.model_copy(update={"marks": marks}).model_dump(mode="json", exclude={"batch_size"})
    checksums = {
        "text_sha256": packing.text_sha256(settings.prompts),
        "model_sha256": weights.checksum(settings.model),
    }
    whole = {**fields, **checksums, "backend": backend, **choice.added(settings.dtype)}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    return {**dict.fromkeys(choice.identity()), **whole, "run": hashlib.sha256(text.encode()).hexdigest()[:12]}


def _finished(output: Path, record: Path, wanted: dict[str, Any], keys: Sequence[Key]) -> int:
    """Return how many rows of this run a file holds, after cutting off what follows its last whole line."""
    if not output.exists() or not output.stat().st_size:
        return 0
    if not record.is_file():
        raise ValueError(
            f"generate: {output} exists, and {record.name}, which would say what its rows were made with, does not; "
            "name another file, or pass --overwrite"
        )
    differing = [name for name in run_identity.differing(record, wanted, keys) if name != "run"]
    if differing:
        other = "native" if wanted["kernels"] != "native" else "xla"
        hint = f"go on with --kernels={other}, " if "kernels" in differing else ""
        raise ValueError(
            f"generate: {output} holds rows made with other {' and '.join(differing)}; {hint}name another file, or "
            "pass --overwrite"
        )
    rows, run_id = store.rows(output), wanted["run"]
    for place, line in enumerate(rows, 1):
        try:
            held = json.loads(line)
            other, number = held.get("run"), held.get("row")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"generate: {output} line {place} is no row of generate ({error})") from error
        if other != run_id:
            raise ValueError(f"generate: {output} line {place} is of run {other}, this is run {run_id}")
        if number != place - 1:
            raise ValueError(
                f"generate: {output} line {place} holds row {number}, wanted row {place - 1}; name another file, or "
                "pass --overwrite"
            )
    store.cut_short(output)
    return len(rows)


def _records(
    settings: GenerateConfig, tokenizer: Any, run_id: str, prompts: Sequence[Prompt], rows: range, writer: Writer
) -> list[dict]:
    """Continue the prompts of some rows; return what is written of them."""
    made = writer([prompts[row].ids for row in rows], rows)
    return [_record(settings, tokenizer, run_id, row, prompts[row], ids) for row, ids in zip(rows, made)]


def _record(settings: GenerateConfig, tokenizer: Any, run_id: str, row: int, given: Prompt, ids: list[int]) -> dict:
    mark, prompt = settings.marks[row % len(settings.marks)], given.ids
    return {
        "row": row,
        **({} if given.id is None else {"id": given.id}),
        "run": run_id,
        "mark": mark.name,
        "scheme": None if mark.scheme is None else mark.scheme.scheme,
        "prompt": tokenizer.decode(prompt),
        "prompt_ids": prompt,
        "continuation_ids": ids,
        "ids": prompt + ids,
        "prompt_tokens": len(prompt),
        "text": tokenizer.decode(ids, skip_special=True),
    }
