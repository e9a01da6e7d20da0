"""Send requests at random times, below and above a server's capacity: what is answered, refused, lost (S file).

    python -m jaxbench.serve.study.rush --arm=jaxbench_int8 --seconds=600 --output=FILE

Capacity is the rate at which the server answers 160 requests of 32 clients; then requests come at the shares of it
that --shares gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from jaxbench import cli, outputs
from jaxbench.measure import environment
from jaxbench.serve.study import clients, load

VALUES = flags.FLAGS


def memory_mb(pid: int) -> float:
    """Return the resident memory, MB, of a process and of those that it started."""
    import psutil

    whole = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (whole, *whole.children(recursive=True))) / 1e6


@contextlib.contextmanager
def watched(pid: int) -> Iterator[list[float]]:
    """Record the memory of a server, MB, every second."""
    found, ended = [], threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            with contextlib.suppress(Exception):  # a process that ends while it is read
                found.append(memory_mb(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def main() -> int:
    """Measure, and show the results; return the exit code."""
    from jaxbench.pretrained import assets, tokenizer

    if VALUES.arm not in clients.ARMS:
        raise ValueError(f"--arm={VALUES.arm}; wanted one of {', '.join(clients.ARMS)}")
    shares = [float(each) for each in VALUES.shares]
    outputs.check_file(VALUES.output, overwrite=VALUES.overwrite)
    model, text = assets.fetch_default_model(), tokenizer.load_tokenizer(None)
    rows: list[dict[str, Any]] = []
    with clients.running(VALUES.arm, model, Path(f"{VALUES.output}.log"), settings=VALUES.set) as server:
        asks = load.drawn(text, 2000)
        seen, seconds = asyncio.run(load.closed(clients.HOST, server.port, "model", asks[:160], clients=32))
        capacity = sum(each.is_whole for each in seen) / seconds
        print(f"capacity: {capacity:.2f} requests a second", flush=True)
        for number, share in enumerate(shares):
            rate, length = share * capacity, VALUES.seconds
            # no prompt comes twice: its beginning would be in the cache, and the capacity would change
            mine = load.drawn(text, 100 + round(1.2 * rate * length), seed=number + 1)
            started = time.monotonic()
            with watched(server.pid) as memory:
                coming = load.poisson(clients.HOST, server.port, "model", mine, rate=rate, seconds=length)
                seen = asyncio.run(coming)
            found = load.summary(seen, time.monotonic() - started)
            found |= {"share": share, "rate": rate, "memory_mb": [memory[0], max(memory), memory[-1]]}
            rows.append(found)
            first, whole = found["first_s"], found["whole_s"]
            print(
                f"{share:.0%} of capacity: {found['requests']} requests, {found['answered']} answered, "
                f"{found['refused']} refused, {found['lost']} lost; first token p50 {first['p50']:.2f} s, p99 "
                f"{first['p99']:.2f} s; whole answer p99 {whole['p99']:.1f} s; {max(memory):.0f} MB", flush=True,
            )  # fmt: skip
    about = {"machine": environment.describe(threads=environment.usable_cores()), "arm": VALUES.arm, "set": VALUES.set}
    outputs.write_json(VALUES.output, {"about": about, "capacity": capacity, "rows": rows})
    print(f"written: {VALUES.output}")
    return cli.EXIT_OK


if __name__ == "__main__":
    flags.DEFINE_string("arm", "jaxbench_int8", "the server")
    flags.DEFINE_multi_string("set", [], "change one key of the server's config; may be repeated")
    flags.DEFINE_list("shares", ["0.5", "0.8", "1.2"], "of the capacity, at which requests come")
    flags.DEFINE_integer("seconds", 600, "of each share of the capacity", lower_bound=10)
    flags.DEFINE_string("output", None, "figures: a .json file", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")
    cli.run(main, about=__doc__)
