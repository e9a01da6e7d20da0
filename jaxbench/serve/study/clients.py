"""Compare servers under the same clients: tokens a second and each client's waits, in fresh processes (S file).

    python -m jaxbench.serve.study.clients --arms=jaxbench,jaxbench_int8 --clients=1,8,32 --launches=3 --output=FILE

A launch starts every arm's server once, in an order that every launch reverses, and sends the same requests for each
number of clients. Ratios are versus the first arm, with intervals over launches. llama_server is llama.cpp's own
server, as `make peers` builds it.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from jaxbench import cli, outputs, process_environment, terminal
from jaxbench.measure import environment, line_picture, process, verdicts
from jaxbench.measure.line_picture import BLUE, BROWN, GREEN, GREY, PINK, Axis, Line, Panel, Point
from jaxbench.process_environment import TUNABLES
from jaxbench.serve.study import load

VALUES = flags.FLAGS
HOST = "127.0.0.1"
COLORS = (GREY, BLUE, PINK, GREEN, BROWN)
OWN = (sys.executable, str(process.ROOT / "experiments/serve.py"), "--model={model}", "--set=name=model")
# Threads that spin (--poll) would take the cores of its own HTTP, and of the clients. A mapped file has no huge pages.
LLAMA = (
    str(process.PEERS / "llama.cpp/llama-server"), "-m", "{model}", "--host", HOST, "--port", "{port}", "-t", "2",
    "-fa", "on", "--no-webui", "--poll", "0", "--load-mode", "none",
)  # fmt: skip
SLOTS = ("--set=engine.kernels=xla", "--set=engine.slot_tokens=768", "--set=engine.segment=128")
BITS = ("--set=engine.activations=int8", "--set=engine.cache=int8")
ARMS: dict[str, tuple[str, ...]] = {
    "jaxbench": (*OWN, "--set=port={port}"),
    "jaxbench_int8": (*OWN, "--set=port={port}", *BITS),
    "jaxbench_one_thread": (*OWN, "--set=port={port}", *BITS, "--set=engine.threads=1"),
    "jaxbench_by_rank": (*OWN, "--set=port={port}", *BITS, "--set=engine.limits.short_prompt_share=0"),
    "jaxbench_lookup": (*OWN, "--set=port={port}", *BITS, "--set=engine.limits.max_guessed=8"),
    # the ladder: the framework's own programs, native kernels, 8 bits, the file's 4 or 5 bits, guesses
    "ladder_1_xla": (*OWN, "--set=port={port}", *SLOTS, "--set=engine.limits.max_running=1"),
    "ladder_2_native": (*OWN, "--set=port={port}", "--set=engine.weights=float32"),
    "ladder_3_int8": (*OWN, "--set=port={port}", "--set=engine.weights=q8_0", *BITS),
    "ladder_4_int4": (*OWN, "--set=port={port}", *BITS),
    "ladder_5_lookup": (*OWN, "--set=port={port}", *BITS, "--set=engine.limits.max_guessed=8"),
    "jaxbench_slots": (*OWN, "--set=port={port}", *SLOTS, "--set=engine.limits.max_running=8"),
    "jaxbench_torch": (*OWN, "--set=port={port}", "--set=engine.backend=torch"),
    "llama_server": (*LLAMA, "-np", "32", "-c", "32768"),
    "llama_server_long": (*LLAMA, "-np", "9", "-c", "36864"),  # each slot has its share: 4096 tokens
}  # fmt: skip
READY = {"llama_server": "/health", "llama_server_long": "/health"}


class Server(NamedTuple):
    """A running server."""

    port: int
    pid: int
    ready_s: float  # from its start until it took requests


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextmanager
def running(name: str, model: Path, log: Path, *, settings: Sequence[str] = ()) -> Iterator[Server]:
    """Run an arm's server in a fresh process; settings: further ones of its config.

    Raises:
      ValueError: it does not start.
    """
    port = free_port()
    command = [part.format(port=port, model=model) for part in ARMS[name]] + [f"--set={each}" for each in settings]
    if not Path(command[0]).exists():
        raise ValueError(f"--arms: {name} needs {command[0]}, which is not there; `make peers` builds it")
    with started(name, command, log, port=port, path=READY.get(name, "/ready")) as server:
        yield server


@contextmanager
def started(
    name: str, command: Sequence[str], log: Path, *, port: int, path: str = "/ready", limit_s: float = 300.0,
    grace_s: float = 60.0,
) -> Iterator[Server]:  # fmt: skip
    """Run a server in a fresh process, ready once its path answers; it is always ended.

    limit_s: for its start. grace_s: from asking it to end until it is killed.

    Raises:
      ValueError: it does not start; the last lines of its log are in the message.
    """
    began = time.monotonic()
    tuned = {TUNABLES: process_environment.environment("cpu")[TUNABLES]}  # jaxbench's own servers set it by themselves
    how = {"cwd": process.ROOT, "env": os.environ | tuned}
    with open(log, "ab") as file, subprocess.Popen(command, stdout=file, stderr=file, **how) as server:
        try:
            while not _answers(f"http://{HOST}:{port}{path}"):
                code, is_late = server.poll(), time.monotonic() - began > limit_s
                if code is not None or is_late:
                    why = f"not ready in {limit_s:g} s" if code is None else f"exit code {code}"
                    raise ValueError(f"{name} did not start: {why}; {log} ends: {last_lines(log)}")
                time.sleep(0.1)
            yield Server(port, server.pid, time.monotonic() - began)
        finally:
            server.terminate()
            try:
                server.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass
            finally:  # also if the wait is interrupted; no effect if it has ended
                server.kill()


def last_lines(log: Path, count: int = 3) -> str:
    """Return the last lines of a log that are neither blank nor of a request, such as a readiness check."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    told = [line[:300] for line in lines if line and '"event": "http"' not in line]
    return " | ".join(told[-count:]) or "nothing was written"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def measured(
    name: str, port: int, asks: Sequence[load.Ask], clients: int, *, warm: Sequence[load.Ask],
    temperature: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Measure what so many clients see of a server that has answered a few requests before."""
    asyncio.run(load.closed(HOST, port, "model", warm, clients=min(clients, 4)))
    with terminal.progress(len(asks)) as advance:
        play = load.closed(
            HOST, port, "model", asks, clients=clients, temperature=temperature, progress=advance
        )  # fmt: skip
        seen, seconds = asyncio.run(play)
    return load.summary(seen, seconds)


def check_arms(given: Sequence[str], known: Iterable[str]) -> None:
    """Check the names given as --arms.

    Raises:
      ValueError: there is none, or one is unknown.
    """
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        raise ValueError(f"--arms: {unknown or 'none'}; wanted some of {', '.join(known)}")


def ratio(rates: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return rates over those of the same launches of another arm, with a 95 % interval."""
    ratios = [verdicts.log_ratio([mine], [other], higher_is_better=True) for mine, other in zip(rates, base)]
    return verdicts.t_interval(ratios).ratio()


def compared(rows: Sequence[dict[str, Any]], arms: Sequence[str], clients: Sequence[int]) -> list[dict[str, Any]]:
    """Return medians over launches, and tokens a second over those of the first arm."""
    found = []
    for count in clients:
        by_arm = {
            arm: [row for row in rows if row["arm"] == arm and row["clients"] == count] for arm in arms
        }  # fmt: skip
        rates = {arm: [row["tokens_a_second"] for row in mine] for arm, mine in by_arm.items()}
        for arm, mine in by_arm.items():
            middle = {
                "arm": arm, "clients": count, "tokens_a_second": statistics.median(rates[arm]),
                "first_p90_s": statistics.median(row["first_s"].get("p90", float("nan")) for row in mine),
                "between_p50_s": statistics.median(row["between_s"].get("p50", float("nan")) for row in mine),
                "lost": sum(row["lost"] for row in mine),
            }  # fmt: skip
            if arm != arms[0]:
                middle["ratio"] = ratio(rates[arm], rates[arms[0]])
            found.append(middle)
    return found


def picture(table: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """Draw tokens a second and waits versus the number of clients, as SVG."""
    arms, counts = list(dict.fromkeys(row["arm"] for row in table)), sorted({row["clients"] for row in table})
    across = Axis("clients", {float(count): str(count) for count in counts}, is_log=len(counts) > 1)
    panels = []
    for title, field in (("tokens a second", "tokens_a_second"), ("first token, p90, seconds", "first_p90_s")):
        lines = [
            Line(arm, COLORS[number % len(COLORS)], [
                Point(row["clients"], row[field]) for row in table if row["arm"] == arm
            ])
            for number, arm in enumerate(arms)
        ]  # fmt: skip
        highest = max(point.y for line in lines for point in line.points)
        step = 10 ** math.floor(math.log10(highest)) / 2
        ticks = {step * i: f"{step * i:g}" for i in range(math.ceil(highest / step) + 1)}
        panels.append(Panel(title, across, Axis(title, ticks), lines))
    machine = about["machine"]
    note = f"{about['model']}, {machine['cpu']}, {machine['threads']} threads, medians of launches"
    return line_picture.draw("Servers under the same clients", note, panels)


def main() -> int:
    """Measure every arm, and show the results; return the exit code."""
    from jaxbench.pretrained import assets, tokenizer

    check_arms(VALUES.arms, ARMS)
    clients = [int(each) for each in VALUES.clients]
    outputs.check_file(VALUES.output, overwrite=VALUES.overwrite)
    model = assets.fetch_default_model() if VALUES.model == "default" else Path(VALUES.model)
    text = tokenizer.load_tokenizer(str(model))
    draw = {"drawn": load.drawn, "copying": load.copying}[VALUES.asks]
    # other requests for each number of clients, so that none finds an earlier client's prompt in the cache
    asks = {
        count: draw(text, max(VALUES.least, VALUES.requests * count // max(clients)), seed=count) for count in clients
    }
    warm = load.drawn(text, 4, seed=10**6)
    rows: list[dict[str, Any]] = []
    for launch in range(VALUES.launches):
        order = VALUES.arms if launch % 2 == 0 else VALUES.arms[::-1]
        for name in order:
            log = Path(f"{VALUES.output}.{name}.log")
            with running(name, model, log) as server:
                for count in clients:
                    found = measured(name, server.port, asks[count], count, warm=warm, temperature=VALUES.temperature)
                    rows.append({"arm": name, "launch": launch, "clients": count, "ready_s": server.ready_s} | found)
                    print(
                        f"{name}, {count} clients: {found['tokens_a_second']:.0f} tokens/s, first token "
                        f"{1e3 * found['first_s'].get('p50', float('nan')):.0f} ms (p90 "
                        f"{1e3 * found['first_s'].get('p90', float('nan')):.0f}), {found['lost']} lost", flush=True,
                    )  # fmt: skip
    about = {
        "model": model.name,
        "machine": environment.describe(threads=environment.usable_cores()),
        "requests": {count: len(mine) for count, mine in asks.items()},
        "asks": VALUES.asks,
        "temperature": VALUES.temperature,
    }
    outputs.write_json(VALUES.output, {"about": about, "launches": rows})
    table = compared(rows, VALUES.arms, clients)
    outputs.write_json(VALUES.output, {"about": about, "table": table, "launches": rows})
    outputs.write_text(Path(VALUES.output).with_suffix(".svg"), picture(table, about))
    for row in table:
        over = "" if "ratio" not in row else " ratio {:.2f} [{:.2f}, {:.2f}]".format(*row["ratio"])
        print(f"{row['clients']:4d} clients  {row['arm']:16s} {row['tokens_a_second']:8.1f} tokens/s{over}")
    print(f"written: {VALUES.output}, and .svg beside it")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_model()
    flags.DEFINE_list("arms", ["jaxbench", "jaxbench_int8"], "servers, the first is what others are compared with")
    flags.DEFINE_list("clients", ["1", "8", "32"], "with a request in flight each")
    flags.DEFINE_enum("asks", "drawn", ["drawn", "copying"], "pieces of prose, or passages that answers copy")
    flags.DEFINE_float("temperature", 0.0, "of sampling; 0 takes the most probable token", 0.0, 10.0)
    flags.DEFINE_integer("requests", 256, "of the largest number of clients; fewer in proportion", 1)
    flags.DEFINE_integer("least", 16, "requests that few clients play at least", 1)
    flags.DEFINE_integer("launches", 3, "of every arm", lower_bound=1)
    flags.DEFINE_string("output", None, "figures: a .json file", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")
    cli.run(main, about=__doc__)
