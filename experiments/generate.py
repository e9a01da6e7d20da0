"""Generate text with a language model: one prompt, a conversation, or a file of requests.

    generate.py --prompt="The capital of France is" --new_tokens=16
    generate.py --chat --prompt="Name three rivers." --temperature=0.7 --top_p=0.9
    generate.py --chat                                                 a conversation; Ctrl-D ends it
    generate.py --input=requests.jsonl --output=rows.jsonl --batch_size=8

A line of --input is {"prompt": TEXT} or {"messages": [{"role": "user", "content": TEXT}, ...]}; other keys are kept.
A killed run is resumed by the same command (if it had --overwrite: without that flag). The text goes to standard
output, everything else to standard error. Bad input ends with exit code 2 and one line.

--tensor_parallel=N splits the model over N devices, for which N must divide its key-value heads (docs/parallel.md).

--kernels=auto uses the native kernels on a CPU, in the number types of the model's own file, or the framework's own
operations (xla) where native kernels are not available; it then says why.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment, prompts, store, terminal
from jaxbench.generation import batch, conversation, decoder, kernel_flags, requests, tensor_parallel, writer
from jaxbench.pretrained import weights
from jaxbench.pretrained.tokenizer import load_tokenizer

VALUES = flags.FLAGS
TWINS = {
    "flax": ("jaxbench.transformer", "jaxbench.sample", "jaxbench.native.model"),
    "equinox": ("jaxbench.eqx.transformer", "jaxbench.sample", "jaxbench.eqx.native.model"),
    "torch": ("torch_ref.transformer", "torch_ref.sample", "torch_ref.native.model"),
}
PARALLEL = {"flax": "jaxbench.parallel.decoding", "torch": "torch_ref.parallel.decoding"}
FILE_FLAGS = ("output", "batch_size", "overwrite")  # only with --input
# Control characters that a terminal would obey: shown as their pictures.
SHOWN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
SHOWN |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
say = functools.partial(print, file=sys.stderr, flush=True)


def define() -> None:
    """Define the flags."""
    flags.DEFINE_string("prompt", None, "text to go on with; with --chat, the user's message")
    flags.DEFINE_bool("chat", False, "use the model's chat template; without --prompt and --input, a conversation")
    flags.DEFINE_string("system", None, "system message in front of a chat")
    flags.DEFINE_string(
        "chat_template_kwargs", None, 'variables of the chat template, a JSON object: {"enable_thinking": false}'
    )
    flags.DEFINE_bool("stream", None, "show the text as it comes (unset: on a terminal)")
    flags.DEFINE_string("input", None, "requests: a .jsonl file, one object a line")
    flags.DEFINE_string("output", None, "rows of --input: a .jsonl file")
    flags.DEFINE_bool("overwrite", False, "start anew where --output holds rows of an earlier run; never an input")
    flags.DEFINE_integer(
        "batch_size", 8, "requests continued together; only xla's rounding depends on it", lower_bound=1
    )
    flags.DEFINE_integer("new_tokens", 128, "tokens generated at most", lower_bound=1, upper_bound=10**6)
    flags.DEFINE_float("temperature", 0.0, "of the draw; 0 = always the most probable token")
    flags.DEFINE_integer("top_k", 0, "draw among this many most probable tokens; 0 = all")
    flags.DEFINE_float("top_p", 1.0, "draw among the most probable tokens up to this mass")
    flags.DEFINE_float("min_p", 0.0, "drop tokens below this share of the most probable one")
    flags.DEFINE_float("repetition_penalty", 1.0, "lowers tokens that are there already; 1 = none")
    flags.DEFINE_float("frequency_penalty", 0.0, "lowers a token for each time that the answer has it; 0 = none")
    flags.DEFINE_float("presence_penalty", 0.0, "lowers tokens that the answer has; 0 = none")
    flags.DEFINE_string("logit_bias", None, 'added to logits, by token id, -100 to 100, a JSON object: {"50": -100}')
    flags.DEFINE_integer("seed", 0, "of the draw", lower_bound=0, upper_bound=2**64 - 1)
    flags.DEFINE_multi_string("stop", [], "the text ends before this string; may be repeated")
    tensor_parallel.define()
    kernel_flags.define()
    cli.define_model()
    cli.define_backend()
    cli.define_device()


# Flags, checked before anything is loaded


def check_flags() -> writer.Settings:
    """Check all flags against each other, and return the settings of the rows.

    Raises:
      ValueError: a flag is missing, out of range, or would do nothing.
    """
    if VALUES.input is not None and VALUES.prompt is not None:
        raise ValueError(f"--prompt={VALUES.prompt[:60]!a} and --input={VALUES.input}: give one of them")
    missing = [name for name in ("prompt", "chat", "input") if not VALUES[name].present]
    if len(missing) == 3:
        raise ValueError(f"--{missing[0]} is missing: give --prompt=TEXT, --chat or --input=FILE.jsonl")
    for name in ("prompt", "system"):
        if VALUES[name].value is not None:
            requests.check_text(VALUES[name].value, f"--{name}")
    idle = ("stream",) if VALUES.input is not None else FILE_FLAGS
    for name in idle:
        if VALUES[name].present:
            other = "does nothing with" if VALUES.input is not None else "needs"
            raise ValueError(f"--{name}={VALUES[name].value} {other} --input; leave it out")
    if VALUES.input is not None and not VALUES.output:
        raise ValueError(f"--input={VALUES.input} needs --output=FILE.jsonl")
    for name in ("system", "chat_template_kwargs"):
        if VALUES[name].present and not VALUES.chat and VALUES.input is None:
            raise ValueError(f"--{name}={VALUES[name].value[:60]!r} needs --chat")
    tensor_parallel.check_flags(VALUES.backend, has_input=VALUES.input is not None)
    for word in VALUES.stop:
        requests.check_text(word, "--stop")
    return writer.Settings(VALUES.new_tokens, check_sampling(), VALUES.seed, tuple(VALUES.stop))


def check_sampling() -> prompts.SamplingParams:
    """Return the sampling parameters.

    Raises:
      ValueError: a value is out of range, or filters a draw that does not take place.
    """
    names = [name for name in prompts.SamplingParams._fields if name != "logit_bias"]
    sampling = prompts.SamplingParams(**{name: VALUES[name].value for name in names}, logit_bias=token_biases())
    prompts.check_sampling(sampling)
    for name in ("top_k", "top_p", "min_p"):
        if not sampling.temperature and VALUES[name].present:
            raise ValueError(
                f"--{name}={VALUES[name].value} filters a draw, and --temperature=0 always takes the most probable "
                "token; pass a --temperature above 0, or leave it out"
            )
    return sampling


def json_flag(name: str) -> dict[str, Any]:
    """Return the JSON object of a flag, {} if it is not given.

    Raises:
      ValueError: it is no JSON object, has a key twice, or is nested too deeply.
    """
    given = VALUES[name].value
    try:
        found = {} if given is None else json.loads(given, object_pairs_hook=requests.unrepeated)
    except requests.Twice as error:
        raise ValueError(f"--{name}={given[:60]!a} has the key {error} twice, wanted once") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--{name}={given[:60]!a} is no JSON: {str(error)[:80]}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--{name}={given[:60]!a} is a {type(found).__name__}, wanted a JSON object")
    if requests.is_deep(found):
        raise ValueError(f"--{name}={given[:60]!a} is nested more than {requests.MOST_DEPTH} deep")
    return found


def token_biases() -> tuple[tuple[int, float], ...]:
    """Return --logit_bias as pairs of a token id and what is added to its logit, in the order of ids.

    Raises:
      ValueError: it is no JSON object, or a key is no id.
    """
    found = json_flag("logit_bias")
    odd = next((key for key in found if not re.fullmatch("0|[1-9][0-9]{0,8}", key)), None)
    if odd is not None:
        raise ValueError(f"--logit_bias={VALUES.logit_bias[:60]!a} has the key {odd[:60]!a}, wanted ids of tokens")
    return tuple(sorted((int(key), value) for key, value in found.items()))


def choose() -> tuple[decoder.Choice, decoder.Backend]:
    """Return the choice of kernels, and the modules of --backend."""
    is_torch = VALUES.backend == "torch"
    importlib.import_module("torch_ref.devices" if is_torch else "jaxbench.devices").check_device(VALUES.device)
    read_config = functools.partial(weights.read_config, model())
    count = VALUES.tensor_parallel
    choice = decoder.choose(kernel_flags.options(), VALUES.device, config=read_config, num_devices=count)
    *modules, native = TWINS[VALUES.backend]
    modules += [native] if choice.kernels == "native" else []
    placement = {"device": "cuda"} if is_torch and VALUES.device == "gpu" else {}
    backend = decoder.Backend(*map(importlib.import_module, modules), placement=placement)
    if count == 1:
        return choice, backend
    parallel = importlib.import_module(PARALLEL[VALUES.backend])
    devices = parallel.attached(VALUES.device, count)
    return choice, backend._replace(parallel=parallel, devices=devices, num_devices=count)


# The three modes: one prompt, a conversation, a file


def model() -> str | None:
    """Return --model as the loaders take it."""
    return None if VALUES.model == "default" else VALUES.model


def read_tokenizer() -> Any:
    """Read --model's tokenizer, whose template gets the variables of --chat_template_kwargs."""
    variables, tokenizer = json_flag("chat_template_kwargs"), load_tokenizer(model())
    tokenizer.template_variables = variables
    return tokenizer


def load(tokenizer: Any, settings: writer.Settings) -> tuple[writer.Writer, decoder.Decoder]:
    """Load --model."""
    choice, backend = choose()
    decoder.check_rows(choice, VALUES.batch_size if VALUES.input is not None else 1)
    loaded = decoder.load(model(), choice, backend)
    return writer.Writer(loaded, tokenizer, settings), loaded


def is_streamed() -> bool:
    """True if the text is shown as it comes."""
    return sys.stdout.isatty() if VALUES.stream is None else VALUES.stream


def answer(ask: Any) -> Any:
    """Print the text that ask(step=, show=) makes, as it comes or as a whole; return what ask returned."""
    is_terminal, is_stream, begun = sys.stdout.isatty(), is_streamed(), False

    def show(piece: str) -> None:
        nonlocal begun
        begun = True
        print(piece.translate(SHOWN) if is_terminal else piece, end="", flush=True)

    shown: list[str] = []
    try:
        made = ask(step=writer.STREAMED if is_stream else writer.BATCHED, show=show if is_stream else shown.append)
        show("".join(shown))
        return made
    finally:
        if begun:
            print(flush=True)


def one_prompt(settings: writer.Settings) -> int:
    """Continue --prompt."""
    tokenizer = read_tokenizer()
    if VALUES.chat:
        message = {"role": "user", "content": VALUES.prompt}
        ids = requests.message_ids(tokenizer, [message], "--prompt", VALUES.system)
    else:
        ids = requests.prompt_ids(tokenizer, VALUES.prompt, "--prompt")
    write, loaded = load(tokenizer, settings)
    requests.check_room(ids, "--prompt", new_tokens=settings.new_tokens, context=write.context)
    note(loaded)
    _, timing = answer(functools.partial(write, [ids], [0], is_chat=[VALUES.chat]))
    say(timing.line(loaded))
    return cli.EXIT_OK


def talk(settings: writer.Settings, heard: Callable[[str], str] | None) -> int:
    """Hold a conversation; heard: is called with each line that is typed, and returns it."""
    tokenizer = read_tokenizer()
    probe = [{"role": "user", "content": "?"}]
    requests.message_ids(tokenizer, probe, "--chat", VALUES.system)  # raises if the model has no chat template
    write, loaded = load(tokenizer, settings)
    held = conversation.Conversation(write, tokenizer, new_tokens=settings.new_tokens, system=VALUES.system)
    note(loaded)

    def turn(line: str) -> Any:
        made = answer(functools.partial(held.ask, line))
        say(made[1].line(loaded))
        return made

    conversation.talk(typed() if heard is None else map(heard, typed()), answer=turn, say=say)
    return cli.EXIT_OK


def typed() -> Iterator[str]:
    """Yield the lines of standard input, after a prompt if it is a terminal."""
    if sys.stdin is None:
        return  # standard input is closed
    sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused alone, as a message
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    say("Ctrl-D ends the conversation.")
    while True:
        try:
            yield input("> ")
        except EOFError:
            say("")
            return


def rows(settings: writer.Settings) -> int:
    """Continue the requests of --input."""
    output = batch.check_output(VALUES.output, [VALUES.input, model()], overwrite=VALUES.overwrite)
    tokenizer = read_tokenizer()
    variables, tokenizer.template_time = tokenizer.template_variables, batch.begun(output, overwrite=VALUES.overwrite)
    content = Path(VALUES.input).read_bytes()  # read once: a pipe can be read only once, and a file may change
    asked = requests.parsed(content, VALUES.input, tokenizer, chat=VALUES.chat, system=VALUES.system)
    if variables and not any(request.is_chat for request in asked):
        said = f"--chat_template_kwargs={VALUES.chat_template_kwargs[:60]!r} does nothing with {VALUES.input}"
        raise ValueError(f"{said}: its {len(asked)} requests have no messages; leave it out, or pass --chat")
    choice, backend = choose()
    decoder.check_rows(choice, VALUES.batch_size)
    more = {"chat_template_kwargs": variables} if variables else {}
    wanted = batch.describe(
        settings, content, chat=VALUES.chat, system=VALUES.system, model_sha256=weights.checksum(model()),
        backend=f"{backend.transformer.__name__} on {VALUES.device}", **choice.identity(), **more,
    )  # fmt: skip
    with store.alone(output):
        return write_rows(settings, asked, output, wanted, tokenizer, choice, backend)


def write_rows(
    settings: writer.Settings, asked: list[requests.Request], output: Path, wanted: dict[str, Any],
    tokenizer: Any, choice: decoder.Choice, backend: Any,
) -> int:  # fmt: skip
    """Continue the requests that the output does not have yet."""
    done = 0 if VALUES.overwrite else batch.finished(output, wanted)
    if done >= len(asked):
        say(f"{output} has all {len(asked)} rows")
        return cli.EXIT_OK
    loaded = decoder.load(model(), choice, backend)
    write = writer.Writer(loaded, tokenizer, settings)
    with progress(len(asked), done) as bar:
        # before the first rows the output has none, or with --overwrite those of another run
        cli.keep(batch.kept(output, overwrite=VALUES.overwrite), when=lambda: bar.tasks[0].completed > 0)
        note(loaded)
        if done:
            say(f"{output} has {done} of {len(asked)} rows, going on")
        moved = functools.partial(bar.update, bar.task_ids[0])
        batch.run(
            asked, output, wanted, write, batch_size=VALUES.batch_size, begun=tokenizer.template_time, done=done,
            progress=lambda count: moved(completed=count),
        )  # fmt: skip
    print(f"written: {output}", flush=True)
    return cli.EXIT_OK


def progress(total: int, done: int) -> Any:
    """Return a progress bar of rows on standard error, shown on terminals only."""
    from rich import progress as parts

    console = terminal.console(stderr=True)
    columns = (
        parts.TextColumn("rows"), parts.MofNCompleteColumn(), parts.BarColumn(), parts.TimeElapsedColumn(),
        parts.TextColumn("left"), parts.TimeRemainingColumn(),
    )  # fmt: skip
    bar = parts.Progress(*columns, console=console, disable=not console.is_terminal)
    bar.add_task("rows", total=total, completed=done)
    return bar


def note(loaded: decoder.Decoder) -> None:
    """Print why native kernels are not used, if they were looked for."""
    if loaded.choice.note:
        say(loaded.choice.note)


def generate(settings: writer.Settings, heard: Callable[[str], str] | None = None) -> int:
    """Generate what the flags ask for; heard: see `talk`."""
    if VALUES.input is not None:
        return rows(settings)
    cli.keep("what was shown is all there is")
    return talk(settings, heard) if VALUES.prompt is None else one_prompt(settings)


def main() -> int:
    """Generate text; return the exit code."""
    settings = check_flags()
    tensor_parallel.check_heads(functools.partial(weights.read_config, model()))
    tensor_parallel.prepare(VALUES.backend, VALUES.device)
    process_environment.ensure(VALUES.device, library=cli.array_library())
    if not tensor_parallel.starts_others(VALUES.backend):
        return generate(settings)
    with tensor_parallel.processes(is_streamed=is_streamed()) as heard:
        return generate(settings, heard)


if __name__ == "__main__":
    define()
    cli.run(main, about=__doc__)
