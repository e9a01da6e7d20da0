"""Measure a client's latencies by server, in fresh processes in alternating order (S file).

    python -m jaxbench.serve.study.waits --arms=jaxbench_int8,llama_server --launches=3 --output=FILE

busy: time to first token for prompts of 512 tokens, one after another, while 8 clients keep the server busy. behind:
time to first token for prompts of 64 tokens, each 0 to 1 s after the previous answer, while one client sends prompts of
2,000 tokens one after another; and for those. known: time to first token after 2,000 tokens that the server has not
seen, and after the same 2,000 with another end. stream: time between tokens of one client, and of the engine's own
steps for the same request in a process without a server; both processes are up throughout and measured alternately;
the medians of a turn are a pair.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxbench import cli, outputs, process_environment
from jaxbench.measure import environment, verdicts
from jaxbench.pretrained import assets
from jaxbench.serve.study import clients, load

VALUES = flags.FLAGS
BUSY, PROBES, SHARED, ROUNDS, STREAMS = 8, 16, 2000, 4, 16
SHORT, LONG, BEHIND = 64, 2000, 32  # tokens, tokens, probes during long prompts
OWN = ("jaxbench", "jaxbench_int8", "jaxbench_one_thread", "jaxbench_lookup")  # arms whose engine runs alone, too
PHASES = ("busy", "behind", "known", "stream")
# columns of the table: which times, and which percentile of them
FIGURES = {
    "busy_first_p50_s": ("busy_first_s", 50),
    "busy_first_p90_s": ("busy_first_s", 90),
    "short_first_p50_s": ("short_first_s", 50),
    "short_first_p90_s": ("short_first_s", 90),
    "long_first_s": ("long_first_s", 50),
    "cold_first_s": ("cold_first_s", 50),
    "warm_first_s": ("warm_first_s", 50),
    "between_s": ("turn_between_s", 50),
    "alone_s": ("turn_alone_s", 50),
}


async def busy(port: int, text: Any, *, seed: int) -> list[float]:
    """Return seconds to first token for prompts of 512 tokens, next to busy clients."""
    probes = load.drawn(text, PROBES, prompt=(512, 512), new=(8, 8), seed=seed)
    asks = load.drawn(text, 1000, seed=seed + 1)
    found, _ = await probed(port, probes, [asks[i::BUSY] for i in range(BUSY)], [0.0] * PROBES)
    return found


async def behind(port: int, text: Any, *, seed: int) -> tuple[list[float], list[float]]:
    """Return seconds to first token for short prompts, with random pauses, next to long ones, and for the long ones."""
    probes = load.drawn(text, BEHIND, prompt=(SHORT, SHORT), new=(8, 8), seed=seed)
    asks = load.drawn(text, 1000, prompt=(LONG, LONG), new=(8, 8), seed=seed + 1)
    draw = random.Random(seed)
    return await probed(port, probes, [asks], [draw.uniform(0.0, 1.0) for _ in probes])


async def probed(
    port: int, probes: Sequence[load.Ask], asks: Sequence[Sequence[load.Ask]], pauses_s: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return seconds to first token for probes, one after another, and for other clients' concurrent requests.

    asks: of each other client, more than it will send. pauses_s: before each probe.

    Raises:
      ValueError: one was not answered.
    """
    ended, others = asyncio.Event(), []

    async def client(mine: Sequence[load.Ask]) -> None:
        for ask in mine:
            if ended.is_set():
                return
            others.append(await first_token(port, ask))

    tasks = [asyncio.create_task(client(mine)) for mine in asks]
    await asyncio.sleep(3.0)
    found = []
    for probe, pause_s in zip(probes, pauses_s):
        await asyncio.sleep(pause_s)
        found.append(await first_token(port, probe))
    ended.set()
    await asyncio.gather(*tasks)
    return found, others


async def first_token(port: int, ask: load.Ask) -> float:
    """Return seconds to first token for an answer that comes to its end.

    Raises:
      ValueError: it does not.
    """
    seen = await load.send(clients.HOST, port, "model", ask, timeout_s=600)
    if not seen.is_whole or seen.first is None:
        raise ValueError(f"a request ended with status {seen.status} and {seen.tokens} tokens")
    return seen.first


async def known(port: int, text: Any, *, seed: int) -> tuple[list[float], list[float]]:
    """Return seconds to first token after beginnings that are new, and after the same ones again."""
    ids, draw = text.encode(assets.default_text(), add_special=False), random.Random(seed)
    cold, warm = [], []
    for _ in range(ROUNDS):
        start = draw.randrange(len(ids) - SHARED)
        beginning = text.decode(ids[start : start + SHARED])
        for number, found in enumerate((cold, warm, warm)):
            ask = load.Ask(f"{beginning}\n\nQuestion {number}: what is said here?", 0, 8)
            found.append(await first_token(port, ask))
    return cold, warm


async def stream(server: clients.Server, ask: load.Ask) -> tuple[float, float]:
    """Return median seconds between events with text, and CPU seconds per token of the server without its engine."""
    import psutil

    process = psutil.Process(server.pid)
    before = sum(process.cpu_times()[:2])
    seen = await load.send(clients.HOST, server.port, "model", ask, timeout_s=600)
    return statistics.median(seen.between), (sum(process.cpu_times()[:2]) - before) / ask.new_tokens


_ENGINE: dict[str, Any] = {}  # the engine of a process without a server


def _load_alone(arm: str, model: Path, ask: load.Ask) -> None:
    from jaxbench import config
    from jaxbench.pretrained import tokenizer
    from jaxbench.serve.settings import ServerConfig, load_engine

    changes = [f"engine.model={model}"]
    changes += [each.removeprefix("--set=") for each in clients.ARMS[arm] if each.startswith("--set=engine.")]
    prompt = tuple(tokenizer.load_tokenizer(str(model)).encode(ask.prompt))
    engine = load_engine(config.load("configs/serve/cpu.yaml", changes, ServerConfig).engine)
    _ENGINE.update(engine=engine, prompt=prompt, number=0)


def _alone(new_tokens: int) -> float:
    """Return median seconds of a step of the engine without a server, for the same request."""
    from jaxbench.serve.request import Request

    engine, times = _ENGINE["engine"], []
    _ENGINE["number"] += 1
    engine.add(Request(str(_ENGINE["number"]), _ENGINE["prompt"], new_tokens))
    while engine.is_busy:
        started = time.perf_counter()
        events = engine.step()
        if any(event.token is not None for event in events):
            times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def beside(arm: str, model: Path, server: clients.Server, ask: load.Ask) -> dict[str, Any]:
    """Measure tokens of a server and of an engine alone alternately; the first turn is not counted."""
    found: dict[str, Any] = {"turn_between_s": [], "turn_alone_s": [], "processor_s": []}
    how = {"mp_context": multiprocessing.get_context("spawn"), "initializer": _load_alone}
    with concurrent.futures.ProcessPoolExecutor(1, initargs=(arm, model, ask), **how) as pool:
        for turn in range(STREAMS + 1):
            pair: dict[str, float] = {}
            for name in ("server", "alone") if turn % 2 else ("alone", "server"):
                if name == "alone":
                    pair["turn_alone_s"] = pool.submit(_alone, ask.new_tokens).result()
                else:
                    pair["turn_between_s"], pair["processor_s"] = asyncio.run(stream(server, ask))
            for name, value in pair.items() if turn else ():
                found[name].append(value)
    return found


def measured(arm: str, model: Path, server: clients.Server, text: Any, launch: int) -> dict[str, Any]:
    """Measure the waits of a running server, in the phases that were asked for."""
    port, found = server.port, {}
    asyncio.run(load.closed(clients.HOST, port, "model", load.drawn(text, 4, seed=10**6), clients=4))
    if "busy" in VALUES.phases:
        found["busy_first_s"] = asyncio.run(busy(port, text, seed=10 * launch))
    if "behind" in VALUES.phases:
        found["short_first_s"], found["long_first_s"] = asyncio.run(behind(port, text, seed=10 * launch + 4))
    if "known" in VALUES.phases:
        found["cold_first_s"], found["warm_first_s"] = asyncio.run(known(port, text, seed=10 * launch + 2))
    if "stream" in VALUES.phases:
        ask = load.drawn(text, 1, prompt=(128, 128), new=(128, 128), seed=7)[0]
        if arm in OWN:  # llama-server's engine is in the same process
            found |= beside(arm, model, server, ask)
        else:
            found["turn_between_s"] = [asyncio.run(stream(server, ask))[0] for _ in range(STREAMS + 1)][1:]
    return found


def row(arm: str, launches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over launches, of what was measured."""
    made: dict[str, Any] = {"arm": arm}
    for name, (times, percentile) in FIGURES.items():
        if times in launches[0]:
            made[name] = statistics.median(float(np.percentile(each[times], percentile)) for each in launches)
    if "cold_first_s" in made:
        made["known_ratio"] = made["cold_first_s"] / made["warm_first_s"]
    if "alone_s" in made:
        turns = [zip(each["turn_between_s"], each["turn_alone_s"]) for each in launches]
        added = verdicts.t_interval([statistics.mean(1e6 * (one - other) for one, other in each) for each in turns])
        made["server_us"] = [added.mean, added.low, added.high]
        made["processor_us"] = 1e6 * statistics.median(statistics.mean(each["processor_s"]) for each in launches)
    return made


def said(found: dict[str, Any]) -> str:
    """Return a row in words."""
    ms = {name: f"{1e3 * value:.1f} ms" for name, value in found.items() if name.endswith("_s")}
    parts = []
    if "busy_first_p50_s" in ms:
        parts.append(
            f"first token beside {BUSY} clients p50 {ms['busy_first_p50_s']}, p90 {ms['busy_first_p90_s']}",
        )
    if "long_first_s" in ms:
        short = f"p50 {ms['short_first_p50_s']}, p90 {ms['short_first_p90_s']}"
        parts.append(f"{SHORT} tokens beside prompts of {LONG} {short}; those {ms['long_first_s']}")
    if "known_ratio" in found:
        warm = f"known {ms['warm_first_s']} ({found['known_ratio']:.1f} x)"
        parts.append(f"behind {SHARED} new ones {ms['cold_first_s']}, {warm}")
    if "between_s" in ms:
        parts.append(f"a token {ms['between_s']}")
    if "server_us" in found:
        parts.append(
            "{:.0f} [{:.0f}, {:.0f}] us more than alone, ".format(*found["server_us"])
            + f"{found['processor_us']:.0f} us of the server's processor"
        )
    return f"{found['arm']}: " + "; ".join(parts)


def main() -> int:
    """Measure every arm, and show the results; return the exit code."""
    clients.check_arms(VALUES.arms, clients.ARMS)
    process_environment.ensure("cpu")  # for the engine alone: servers do it themselves
    from jaxbench.pretrained import tokenizer

    outputs.check_file(VALUES.output, overwrite=VALUES.overwrite)
    model = assets.fetch_default_model() if VALUES.model == "default" else Path(VALUES.model)
    text = tokenizer.load_tokenizer(str(model))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in VALUES.arms}
    for launch in range(VALUES.launches):
        for name in VALUES.arms if launch % 2 == 0 else VALUES.arms[::-1]:
            with clients.running(name, model, Path(f"{VALUES.output}.{name}.log")) as server:
                found = measured(name, model, server, text, launch)
            rows[name].append(found)
            print(said(row(name, [found])), flush=True)
    table = [row(name, mine) for name, mine in rows.items()]
    about = {"model": model.name, "machine": environment.describe(threads=environment.usable_cores())}
    outputs.write_json(VALUES.output, {"about": about, "table": table, "launches": rows})
    for each in table:
        print(said(each))
    print(f"written: {VALUES.output}")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_model()
    flags.DEFINE_list("arms", ["jaxbench_int8", "llama_server"], "servers")
    flags.DEFINE_multi_enum("phases", list(PHASES), list(PHASES), "what is measured; may be repeated")
    flags.DEFINE_integer("launches", 3, "of every arm", lower_bound=1)
    flags.DEFINE_string("output", None, "figures: a .json file", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")
    cli.run(main, about=__doc__)
