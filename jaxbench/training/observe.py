"""Records, TensorBoard scalars, throughput, MFU and memory of a training run (S file).

Records are JSON lines that hold only functions of the configuration, so that two runs of it can be compared byte for
byte; times and memory go to TensorBoard and the terminal.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxbench import outputs, store, terminal
from jaxbench.config import TransformerConfig
from jaxbench.initial import parameter_shapes
from jaxbench.measure import event_files

# Dense peak rates, TFLOP/s; the first name in a device's name applies, at a word's end (an RTX A1000 is no A100); other
# devices are measured. Sources: NVIDIA's data sheets of A100 (2020), H100 SXM and PCIe, and H200 (2023, 2024). NVL
# cards are slower than their namesakes, and a part of a GPU (MIG) is slower than the whole.
PEAK_TFLOPS = {
    "MIG ": {},
    "H100 PCIe": {"bfloat16": 756.0, "float16": 756.0, "tf32": 378.0, "float32": 51.0},
    "NVL": {},
    "A100": {"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5},
    "H100": {"bfloat16": 989.4, "float16": 989.4, "tf32": 494.7, "float32": 66.9},
    "H200": {"bfloat16": 989.4, "float16": 989.4, "tf32": 494.7, "float32": 66.9},
}
# Rows of the square product that measures other devices: on an accelerator 1,024 take microseconds, less than starting.
GEMM_SIZE, ACCELERATOR_GEMM_SIZE = 1024, 8192

_MEASURED: dict[tuple[str, str, str], float] = {}  # peak_of's measured rates, FLOP/s

FLUSH_S = 2.0  # seconds after which a scalar is on disk: of a run that is killed, a checkpoint may hold its step
SCHEME = "jaxbench"  # prefix of the paths that tensorboardX opens through _BoardFiles


# Records


class Records:
    """A file of JSON lines, each with a step; its end can be dropped."""

    def __init__(self, path: Path, *, is_written: bool = True):
        """Set the path without opening the file. is_written=False only reads: another process writes."""
        self.path, self.is_written = path, is_written

    def read(self) -> list[dict[str, Any]]:
        """Records of the complete lines; one that a crash truncated is left out.

        Raises:
          ValueError: a line is no record of a step.
        """
        return [self._record(number, line) for number, line in enumerate(store.rows(self.path), start=1)]

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:  # not JSON, or not UTF-8
            record = None
        if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
            raise ValueError(
                f"records: {self.path} line {number} is no record of a step ({line[:40]!r}), wanted JSON with one; "
                "take the line out, or use another --workdir"
            )
        return record

    def keep_until(self, step: int) -> None:
        """Drop the records after this many steps: a run that resumes there writes them again."""
        if not self.is_written:
            return
        kept = [record for record in self.read() if record["step"] <= step]
        outputs.write_text(self.path, store.lines(kept))

    def add(self, records: list[dict[str, Any]]) -> None:
        """Append complete lines and wait until they are on disk, so that no checkpoint is ahead of them."""
        if not self.is_written:
            return
        store.append(self.path, records)


# Throughput and FLOPs


class Throughput:
    """Tokens per second over the time spent in steps; `pause` leaves out compiling, evaluating and saving."""

    def __init__(self, clock: Any = time.perf_counter):
        """Start paused."""
        self._clock, self._started = clock, None
        self.tokens, self.seconds = 0, 0.0  # in total
        self.rate = 0.0  # of the last window, tokens/s

    def start(self) -> None:
        """Begin a window, if none is open."""
        self._started = self._clock() if self._started is None else self._started

    def pause(self, tokens: int) -> None:
        """Close the window in which `tokens` tokens were trained on; the device must have finished them."""
        seconds = self._clock() - self._started
        self._started = None
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.rate = tokens / seconds if seconds > 0 else 0.0

    @property
    def mean(self) -> float:
        """Tokens per second over all windows."""
        return self.tokens / self.seconds if self.seconds else 0.0


def flops_per_token(
    config: TransformerConfig, seq_len: int, *, is_causal: bool, is_trained: Callable[[str], bool] = lambda name: True
) -> float:
    """FLOPs of forward and backward for one token: 6 N + 4 M + 12 (heads * head_dim) K.

    N counts the trained parameters that are multiplied: all but a position table and an untied embedding; M counts the
    frozen ones, which need no weight gradient (is_trained, by dotted name). K is the number of keys that a row's last
    token attends to, summed over the layers: T in each, fewer in one with a window, none in one without attention.
    is_causal counts the keys of the mean token, which are half of T without a window (both conventions are in use;
    Chowdhery et al. 2022, arXiv:2204.02311, appendix B counts all of it). Rematerialisation is not counted, nor is what
    a memory learns as it reads.
    """
    shapes = parameter_shapes(config)
    left_out = {"position.embedding"} | (set() if config.tie_embeddings else {"embed.embedding"})
    products = sum(
        (6 if is_trained(name) else 4) * math.prod(shape) for name, shape in shapes.items() if name not in left_out
    )
    keys = [config.num_keys(i, seq_len) for i in range(config.num_layers)]
    if is_causal:  # the first K tokens of a row see half as many on average
        keys = [count * (1 - count / (2 * seq_len)) for count in keys]
    return products + 12 * config.num_heads * config.head_dim * sum(keys)


def utilisation(
    config: TransformerConfig, seq_len: int, *, tokens_per_s: float, peak: float,
    is_trained: Callable[[str], bool] = lambda name: True,
) -> dict[str, float]:  # fmt: skip
    """Model FLOPs utilisation at a peak rate in FLOP/s: by both conventions of `flops_per_token`."""
    conventions = {"mfu": False, "mfu_causal": True}
    count = functools.partial(flops_per_token, config, seq_len, is_trained=is_trained)
    work = {name: count(is_causal=causal) for name, causal in conventions.items()}
    return {name: tokens_per_s * flops / peak for name, flops in work.items()}


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Dense peak rate of a device in FLOP/s for products of a type (Engine.product_type); None if it is not known."""
    rates = next((rates for name, rates in PEAK_TFLOPS.items() if re.search(rf"{name}\b", device_kind)), {})
    return rates[dtype] * 1e12 if dtype in rates else None


def peak_of(engine: Any, peak_tflops: float | None) -> float:
    """Peak rate of an engine's device in FLOP/s: the one given, a data sheet's, or a measured product's.

    It is measured once per process, so that shares of several engines are of the same rate.
    """
    if peak_tflops is not None:
        return peak_tflops * 1e12
    device, product = engine.device_kind(), engine.product_type()
    if known := peak_flops(device, product):
        return known
    key = type(engine).__module__, device, product  # libraries have rates of their own
    if key not in _MEASURED:
        _MEASURED[key] = engine.matmul_rate()
    return _MEASURED[key]


def gemm_size(device: str) -> int:
    """Rows and columns of the product that measures a device's rate; device: cpu, or any other."""
    return GEMM_SIZE if device == "cpu" else ACCELERATOR_GEMM_SIZE


def host_bytes() -> int:
    """Resident memory of this process, bytes."""
    import psutil

    return psutil.Process().memory_info().rss


# TensorBoard and terminal


class Board:
    """TensorBoard scalars of a run; if they cannot be written, one line reports it and the run continues without."""

    def __init__(self, folder: Path, *, start: int, is_written: bool = True):
        """Open the folder; TensorBoard discards scalars that an earlier process wrote after step `start`."""
        boards = event_files.library()
        self._folder, self._files = folder, _BoardFiles()
        boards.record_writer.register_writer_factory(SCHEME, self._files)  # for the file that is opened next
        self._writer = boards.SummaryWriter(
            f"{SCHEME}:{folder}", purge_step=start + 1, flush_secs=FLUSH_S, write_to_disk=is_written
        )

    def add(self, step: int, values: Mapping[str, float | int]) -> None:
        """Write the scalars of a step; a non-finite one is left out, since the writer warns about each."""
        for name, value in values.items():
            if math.isfinite(value) and not self._is_dropped():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out and close."""
        self._writer.close()
        self._is_dropped()

    def _is_dropped(self) -> bool:
        """Return True if writing has failed; the first time, report it."""
        problem = self._files.problem
        if problem is not None and not self._files.is_told:
            self._files.is_told = True
            text = f"cannot write {self._folder}: {problem.strerror or problem}; the run goes on without TensorBoard"
            terminal.console(stderr=True).print(text, soft_wrap=True, markup=False)
        return problem is not None


class _BoardFiles:
    """File access for tensorboardX that keeps errors: its thread would end with a traceback and the run wait for it."""

    def __init__(self) -> None:
        self.problem: OSError | None = None  # the first one; nothing is written after it
        self.is_told = False
        self._file: Any = None

    def directory_check(self, path: str) -> None:
        """Make a folder."""
        Path(path.partition(":")[2]).mkdir(parents=True, exist_ok=True)

    def open(self, path: str) -> _BoardFiles:
        """Open a file."""
        self._file = open(path.partition(":")[2], "wb")
        return self

    def write(self, data: bytes) -> None:
        """Write."""
        self._try(self._file.write, data)

    def flush(self) -> None:
        """Write the buffered data, and wait for the disk."""
        self._try(self._file.flush)
        self._try(os.fsync, self._file)

    def close(self) -> None:
        """Close."""
        try:
            self._file.close()
        except OSError as error:
            self.problem = self.problem or error

    def _try(self, work: Callable[..., Any], *given: Any) -> None:
        if self.problem is None:
            try:
                work(*given)
            except OSError as error:
                self.problem = error


class Display:
    """A progress bar with the time left on a terminal; occasional lines elsewhere."""

    def __init__(self, total: int, *, what: str = "step", is_shown: bool = True):
        """Prepare for a run of `total` steps (or other units); `say` works at once, the bar after `start`.

        is_shown=False prints nothing: another process does.
        """
        from rich import progress

        self.console = terminal.console(stderr=True, quiet=not is_shown)
        columns = (
            progress.TextColumn(what), progress.MofNCompleteColumn(), progress.BarColumn(),
            progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[text]}"),
        )  # fmt: skip
        self._bar = progress.Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("train", total=total, text="")

    def start(self, step: int) -> None:
        """Show the bar, with this many steps done."""
        self.update(step, "")
        self._bar.start()

    def update(self, step: int, text: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step, text=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Stop the bar, and leave it as it is."""
        self._bar.stop()


def reading(description: str) -> Any:
    """Progress bar for reading a file: `bar, callback`, used as `with bar: prepare(..., progress=callback)`."""
    from rich import progress

    console = terminal.console(stderr=True)
    bar = progress.Progress(
        progress.TextColumn(description), progress.BarColumn(), progress.DownloadColumn(),
        progress.TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True,
    )  # fmt: skip
    task = bar.add_task(description, total=None)
    return bar, lambda done, total: bar.update(task, completed=done, total=total)
