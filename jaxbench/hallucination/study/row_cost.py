"""Measure the parts of reading: one row of responses to one prompt, on as many threads as the process has.

    OMP_NUM_THREADS=1 taskset -c 0 python -m jaxbench.hallucination.study.row_cost --prompt_tokens=620 --lens_slots=24

Tokens are random; times are medians of several rounds, in each of which every part runs once. Parts take the results of
earlier ones as given; `attention scores` is the time that these add to `responses`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags

from jaxbench import cli, outputs, process_environment, terminal

VALUES = flags.FLAGS
ROW = 512  # slots of the responses
LENGTHS = (200, 170, 140)  # tokens of the responses in it


def parts(reader_settings: Any, prompt_tokens: int, lens_slots: int) -> dict[str, Callable[[], Any]]:
    """Return the parts as functions that run them, compiled programs of the default or another reader."""
    import jax
    from flax import nnx

    from jaxbench import transformer
    from jaxbench.hallucination import layout, reader, token_scores
    from jaxbench.pretrained import weights

    checkpoint = weights.load_checkpoint(reader_settings.model)
    model = transformer.build(checkpoint.config, checkpoint.params, dtype=reader_settings.dtype)
    graph, state = nnx.split(model)
    random = np.random.default_rng(0)

    def program(run: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(lambda state, *arrays: run(nnx.merge(graph, state), *arrays))
        return lambda *arrays: jax.block_until_ready(compiled(state, *arrays))

    def tokens(count: int) -> list[int]:
        return random.integers(0, checkpoint.config.vocab_size, count).tolist()

    def given(length: int, context: range) -> tuple[Any, Any]:
        text = layout.Text(tokens(length), context)
        rows = layout.response_arrays([text], [[tokens(each) for each in LENGTHS]], size=ROW)
        return layout.prompt_arrays([text], share=reader_settings.share), reader.Responses(*rows)

    prompts, rows = given(prompt_tokens, range(8, prompt_tokens - 8))
    bare, bare_rows = given(16, range(0))
    read_arrays = program(reader.read_prompt)

    def read_prompt(prompts: Any) -> Any:
        return read_arrays(prompts.tokens, prompts.positions, prompts.is_context)

    read = program(lambda model, *each: reader.read_responses(model, *each)._replace(context=None))
    scores = program(
        lambda model, prompt, rows, limit: token_scores.attention_scores(
            model, prompt, rows, reader.read_responses(model, prompt, rows), limit
        )
    )
    surprise = program(lambda model, trace, rows: token_scores.surprise(model, trace, rows.targets))
    lens = program(token_scores.parametric_scores)
    slots = np.resize(np.arange(0, sum(LENGTHS), 8), ROW).astype(np.int32)
    prompt, bare_prompt = read_prompt(prompts), read_prompt(bare)
    trace, bare_trace = read(prompt, rows), read(bare_prompt, bare_rows)
    return {
        "prompt": lambda: read_prompt(prompts),
        "responses": lambda: read(prompt, rows),
        "responses and attention scores": lambda: scores(prompt, rows, prompts.num_attended),
        "losses": lambda: surprise(trace, rows),
        f"lens of {lens_slots} slots": lambda: lens(trace, slots, np.int32(lens_slots)),
        "responses without the context": lambda: read(bare_prompt, bare_rows),
        "their losses": lambda: surprise(bare_trace, bare_rows),
    }


def measured(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each part."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if number:  # the first round compiles
                found[name].append(time.perf_counter() - started)
    return {name: float(np.median(each)) for name, each in found.items()}


def main() -> int:
    """Measure, and show; return the exit code."""
    from jaxbench.hallucination import reader_settings
    from jaxbench.measure import environment

    settings = cli.load_config(reader_settings.ReaderSettings)
    process_environment.ensure("cpu")
    seconds = measured(parts(settings, VALUES.prompt_tokens, VALUES.lens_slots), VALUES.rounds)
    attention = "responses and attention scores"
    seconds["attention scores"] = seconds.pop(attention) - seconds["responses"]
    machine = environment.describe(threads=environment.usable_cores())
    terminal.console().print("\n".join(f"{name:32s} {value:.3f} s" for name, value in seconds.items()))
    if VALUES.output is not None:
        given = {"prompt_tokens": VALUES.prompt_tokens, "slots": ROW, "reader": settings.model_dump()}
        outputs.write_json(VALUES.output, {"about": machine, "given": given, "seconds": seconds})
        print(f"written: {VALUES.output}")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/hallucination/reader.yaml")
    flags.DEFINE_integer("prompt_tokens", 620, "of the prompt", lower_bound=20)
    flags.DEFINE_integer("lens_slots", 24, "slots with parametric scores", lower_bound=1, upper_bound=ROW)
    flags.DEFINE_integer("rounds", 5, "of which the median is shown", lower_bound=1)
    flags.DEFINE_string("output", None, "figures: a .json file")
    cli.run(main, about=__doc__)
