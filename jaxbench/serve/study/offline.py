"""Compare this engine with transformers' continuous batching on a file's worth of requests, handed over at once.

    python -m jaxbench.serve.study.offline --arms=transformers_bfloat16,jaxbench_int8 --running=8,32 --output=FILE

No server and no clients: each arm gets token ids in a fresh process, answers a few requests to warm up, and then all
others, --running at once. Arms alternate. Ratios are versus the first arm, with intervals over launches.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from jaxbench import cli, outputs, process_environment
from jaxbench.measure import environment
from jaxbench.pretrained import assets, weights
from jaxbench.serve.study import clients, load

VALUES = flags.FLAGS
ARMS = (
    "transformers_float32", "transformers_bfloat16", "jaxbench", "jaxbench_bfloat16", "jaxbench_bfloat16_activations",
    "jaxbench_int8", "jaxbench_xla",
)  # fmt: skip
WARM = 4  # requests before the clock starts


class Work(NamedTuple):
    """Token ids of a prompt, and the number of tokens to generate."""

    prompt: list[int]
    new_tokens: int


def answered(arm: str, model: Path, work: Sequence[Work], running: int) -> tuple[float, int]:
    """Return seconds for all requests after the warm-up, and the number of generated tokens.

    Raises:
      ValueError: an answer has the wrong length.
    """
    run = _transformers(arm, model, running) if arm.startswith("transformers") else _engine(arm, model, running)
    run(work[:WARM])
    started = time.perf_counter()
    lengths = run(work[WARM:])
    seconds, wanted = time.perf_counter() - started, [each.new_tokens for each in work[WARM:]]
    if lengths != wanted:
        odd = next(i for i, pair in enumerate(zip(lengths, wanted)) if pair[0] != pair[1])
        raise ValueError(f"{arm}: answer {odd} has {lengths[odd]} tokens, wanted {wanted[odd]}")
    return seconds, sum(lengths)


def _engine(arm: str, model: Path, running: int) -> Any:
    """Return an engine of this package as a function of requests."""
    from jaxbench.serve.request import Request
    from jaxbench.serve.scheduler import Limits
    from jaxbench.serve.settings import EngineConfig, load_engine

    how = {
        "jaxbench_int8": {"activations": "int8", "cache": "int8"},
        "jaxbench_xla": {"kernels": "xla", "slot_tokens": 768},
        "jaxbench_bfloat16": {"weights": "bfloat16", "cache": "bfloat16"},
        "jaxbench_bfloat16_activations": dict.fromkeys(("weights", "activations", "cache"), "bfloat16"),
    }.get(arm, {})  # fmt: skip
    limits = Limits(max_running=running, max_batch_tokens=256, max_waiting=10_000)
    engine, rounds = load_engine(EngineConfig(model=str(model), limits=limits, **how)), itertools.count()

    def run(work: Sequence[Work]) -> list[int]:
        number = next(rounds)
        requests = [
            Request(f"{number}-{i}", tuple(each.prompt), each.new_tokens) for i, each in enumerate(work)
        ]  # fmt: skip
        found = engine.generate(requests)
        return [sum(event.token is not None for event in found[each.id]) for each in requests]

    return run


def _transformers(arm: str, model: Path, running: int) -> Any:
    """Return the continuous batching of transformers as a function of requests."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(environment.usable_cores())
    dtype = getattr(torch, arm.removeprefix("transformers_"))
    with tempfile.TemporaryDirectory() as place:  # floats: from GGUF it would keep packed weights, no faster
        held = weights.load_checkpoint(model)
        folder = weights.save_checkpoint(Path(place) / "model", held.config, held.params)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    # the fastest of those tried by hand: steps of 256 and 1024 tokens, pages of 64, eager attention, torch.compile
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=running, max_batch_tokens=1024, num_blocks=4 * running, auto_switch_to_flash=False
    )  # fmt: skip
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)

    def run(work: Sequence[Work]) -> list[int]:
        with loaded.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, persistent_manager=True,
        ) as manager:  # fmt: skip
            names = [manager.add_request(each.prompt, max_new_tokens=each.new_tokens) for each in work]
            lengths: dict[str, int] = {}
            while len(lengths) < len(names):
                found = manager.get_result(timeout=5)
                if found is None and not manager.is_running():
                    raise ValueError(f"{arm}: generation ended behind {len(lengths)} of {len(names)} answers")
                if found is not None and found.is_finished():
                    lengths[found.request_id] = len(found.generated_tokens)
        return [lengths[name] for name in names]

    return run


def main() -> int:
    """Measure every arm, and show the results; return the exit code."""
    from jaxbench.pretrained import tokenizer

    process_environment.ensure("cpu")
    clients.check_arms(VALUES.arms, ARMS)
    counts = [int(each) for each in VALUES.running]
    outputs.check_file(VALUES.output, overwrite=VALUES.overwrite)
    model = assets.fetch_default_model() if VALUES.model == "default" else Path(VALUES.model)
    text = tokenizer.load_tokenizer(str(model))
    asks = load.drawn(text, WARM + VALUES.requests)
    work = [Work(text.encode(each.prompt), each.new_tokens) for each in asks]
    rates: dict[tuple[int, str], list[float]] = {(count, arm): [] for count in counts for arm in VALUES.arms}
    for launch in range(VALUES.launches):
        for arm in VALUES.arms if launch % 2 == 0 else VALUES.arms[::-1]:
            for count in counts:
                context = multiprocessing.get_context("spawn")
                with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                    seconds, tokens = pool.submit(answered, arm, model, work, count).result()
                rates[count, arm].append(tokens / seconds)
                print(f"{arm}, {count} at once: {tokens / seconds:.1f} tokens/s in {seconds:.1f} s", flush=True)
    table = []
    for (count, arm), mine in rates.items():
        row = {"arm": arm, "running": count, "tokens_a_second": statistics.median(mine), "launches": mine}
        if arm != VALUES.arms[0]:
            row["ratio"] = clients.ratio(mine, rates[count, VALUES.arms[0]])
        table.append(row)
    about = {"model": model.name, "machine": environment.describe(threads=environment.usable_cores())}
    outputs.write_json(VALUES.output, {"about": about | {"requests": VALUES.requests}, "table": table})
    for row in table:
        ratio = "" if "ratio" not in row else " ratio {:.2f} [{:.2f}, {:.2f}]".format(*row["ratio"])
        print(f"{row['running']:4d} at once  {row['arm']:22s} {row['tokens_a_second']:8.1f} tokens/s{ratio}")
    print(f"written: {VALUES.output}")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_model()
    flags.DEFINE_list("arms", ["transformers_bfloat16", "jaxbench_int8"], "the first is what others are compared with")
    flags.DEFINE_list("running", ["8", "32"], "requests at once")
    flags.DEFINE_integer("requests", 64, "to answer", lower_bound=1)
    flags.DEFINE_integer("launches", 3, "of every arm", lower_bound=1)
    flags.DEFINE_string("output", None, "figures: a .json file", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")
    cli.run(main, about=__doc__)
