"""A training run from configuration to exported model, in Flax or PyTorch (S file: neither JAX nor PyTorch).

    result = run(config, make_engine, workdir="out/shakespeare", backend="flax")

The backend is an Engine (engine.py, torch_ref/training/engine.py). The configuration, (seed, step) and the checkpoint
alone determine what is computed: a run that is killed at any moment and restarted with the same command ends with the
same losses and parameters, bit for bit, on the same machine and mesh.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import cli, config, initial, outputs
from jaxbench.config import TransformerConfig
from jaxbench.lora import config as lora
from jaxbench.lora import peft_files
from jaxbench.parallel.processes import ALONE, Processes, held
from jaxbench.pretrained import weights
from jaxbench.training import observe, run_folder, schedules, train_inputs
from jaxbench.training.checkpoint import Checkpoints
from jaxbench.training.run_folder import ADAPTERS, BOARD, CHECKPOINTS, CONFIG, EXPORT, PROFILE, RECORDS, SUMMARY
from jaxbench.training.train_config import TrainConfig


class Result(NamedTuple):
    """Results of a finished run."""

    steps: int  # taken in all
    validation_loss: float  # nats per token, after the last step
    bits_per_byte: float | None
    tokens_per_s: float  # of this process, without compiling, evaluation and saving
    skipped: int = 0  # of the steps, those whose loss or gradient was not finite, which changed nothing


def run(
    settings: TrainConfig,
    make_engine: Callable[..., Any],
    *,
    workdir: str | Path,
    backend: str,
    data_path: str | None = None,
    profile_steps: tuple[int, int] | None = None,
    processes: Processes = ALONE,
) -> Result:
    """Train, evaluate, save and export; resume the run that the folder holds.

    Args:
      make_engine: Engine, with its device bound if it takes one.
      backend: its name, kept with the checkpoint.
      data_path: text to use instead of settings.data.path.
      profile_steps: (a, b) writes a trace of steps a + 1 to b into profile/.
      processes: those that run this together, each with the same settings and folder.

    Raises:
      ValueError: bad input, a folder in use, a checkpoint or files of another run, or processes given different inputs.
      GateFailed: the loss was not finite and step.nonfinite is stop; the message names the first bad module.
      OSError: full disk; the last good checkpoint stays.
    """
    workdir = Path(workdir)
    data, model, params = train_inputs.prepare(settings, data_path)  # bad data leaves no folder behind
    places = {"data": {"path", "validation_path"}}  # the texts themselves count, not their paths
    given = settings.model_dump(mode="json", exclude=places)
    processes.check_alike(given | {"text_sha256": data.joined_sha256})
    with held(workdir, processes):
        engine = make_engine(settings, model, params)
        del params  # the engine has its own, and in float64 these are twice their size
        trainer = _Trainer(settings, engine, model, data, workdir, backend, processes)
        try:
            return trainer.run(profile_steps or (-1, -1))
        finally:
            trainer.close()


class _Trainer:
    """One run in progress: the engine, the output files, and the progress."""

    def __init__(
        self, settings: TrainConfig, engine: Any, model: TransformerConfig, data: train_inputs.Data, workdir: Path,
        backend: str, processes: Processes,
    ):  # fmt: skip
        self.settings, self.engine, self.model, self.data = settings, engine, model, data
        self.workdir, self.backend, self.processes = workdir, backend, processes
        self.records = observe.Records(workdir / RECORDS, is_written=processes.is_first)
        self.identity = {
            "config": settings.identity(), "text_sha256": data.joined_sha256, "tokenizer": data.tokenizer_id,
            "backend": backend,
        }  # fmt: skip
        self.num_parameters = initial.num_parameters(model)
        # gain_loss: loss at the last gain that counted; the next gain is measured from it.
        self.progress = {"best_loss": None, "best_step": 0, "gain_loss": None, "without_gain": 0}
        self.throughput = observe.Throughput()
        self.validation: dict[str, float] = {}
        self.measured_at = -1  # the step of the last evaluation in `progress`
        self.is_traced = False  # now
        self.pending: list[tuple[int, float, Any]] = []
        self.display = observe.Display(settings.steps, is_shown=processes.is_first)
        self.checkpoints = Checkpoints(
            workdir / CHECKPOINTS, keep=settings.checkpoints.keep, say=self.display.say, processes=processes
        )
        self.start = self._resume()
        if processes.is_first and run_folder.saved_config(workdir, settings) != settings:
            config.dump(settings, workdir / CONFIG)
        self.records.keep_until(self.start)
        counts = [record["skipped"] for record in self.records.read() if "skipped" in record]
        self.skipped = counts[-1] if counts else 0  # each record's count is cumulative
        self.board = observe.Board(workdir / BOARD, start=self.start, is_written=processes.is_first)
        self.peak_flops_per_s = observe.peak_of(self.engine, settings.logging.peak_tflops)
        self.peak_learning_rate = schedules.scaled_peak(
            settings.learning_rate, settings.learning_rate_scaling,
            batch=settings.batch_size, base_batch=settings.base_batch,
        )  # fmt: skip

    def _resume(self) -> int:
        """Load the newest intact checkpoint, and return how many steps are done."""
        checkpoint = self.checkpoints.restore(self.engine.arrays(), check_meta=self._check_meta)
        if checkpoint is None:
            self._check_start()
            return 0
        if checkpoint.step > self.settings.steps:
            raise ValueError(
                f"train: {self.workdir} has {checkpoint.step} steps, and steps={self.settings.steps}; wanted "
                f"{checkpoint.step} or more, or another --workdir"
            )
        self.engine.load(checkpoint.arrays)
        progress = checkpoint.meta["progress"]
        gain_loss = progress.get("gain_loss", progress["best_loss"])  # absent from old checkpoints
        self.progress = progress | {"gain_loss": gain_loss}
        self.measured_at = checkpoint.meta.get("measured_at", checkpoint.step)  # absent from old checkpoints
        return checkpoint.step

    def _check_start(self) -> None:
        """Raise if the folder has files that a run from the first step on would replace and that are not its own."""
        refused, sha256 = None, self.data.joined_sha256
        try:
            if self.processes.is_first:
                run_folder.check_start(self.workdir, self.settings, backend=self.backend, text_sha256=sha256)
        except ValueError as error:
            refused = error
        if not self.processes.agree(refused is None):
            raise refused or ValueError(f"train: process {self.processes.index} stops, {self.workdir} is another run's")

    def _check_meta(self, meta: dict[str, Any]) -> None:
        """Raise if a checkpoint was made by another run."""
        ours, theirs = self.identity, meta["identity"]
        theirs["config"]["data"].pop("validation_path", None)  # in old identities
        (theirs["config"].get("memory") or {}).pop("max_documents", None)  # likewise
        theirs.setdefault("tokenizer", ours["tokenizer"])  # not in them
        if listed := run_folder.differences(ours, theirs):
            raise ValueError(f"train: {self.workdir} holds another run: {listed}; use another --workdir")

    def run(self, profile_steps: tuple[int, int]) -> Result:
        """Take the remaining steps, and trace some of them."""
        s, batch = self.settings, self.settings.batch_size
        products = ", native products" if self.engine.step_config.kernels == "native" else ""
        self.display.say(
            f"{self.backend} on {self.engine.device_kind()}{products}: {self.num_parameters / 1e6:.2f} M parameters, "
            f"{self.data.train.num_tokens} tokens, {s.steps} steps of {batch} x {s.data.seq_len}; "
            f"compiled in {self.engine.compile_seconds:.1f} s; starts at step {self.start}"
        )
        held_out = f", held out {self.data.held_out_sha256}" if self.data.held_out_sha256 else ""
        self.display.say(f"text sha256 {self.data.text_sha256}{held_out}")
        self.display.start(self.start)
        done, early = self.start, self._is_early()
        first_traced, last_traced = self._traced(profile_steps)
        first, count = self.engine.rows  # a process reads its own rows
        own_rows = functools.partial(self.data.train.batch, batch_size=batch, first=first, count=count)
        with ThreadPoolExecutor(1) as ahead:  # the next batch is packed while the device works
            upcoming = ahead.submit(own_rows, done)
            while done < s.steps and not early:
                arrays, upcoming = upcoming.result(), ahead.submit(own_rows, done + 1)
                if done == first_traced:
                    self._flush(done)  # else the trace would hold the steps that the device still works on
                    if self.processes.is_first:
                        self.engine.start_profile(str(self.workdir / PROFILE))
                        self.is_traced = True
                self.throughput.start()
                rate = schedules.learning_rate(s.schedule, done, peak=self.peak_learning_rate, steps=s.steps)
                self.pending.append((done, rate, self.engine.step(arrays, rate)))
                done += 1
                if done == last_traced:
                    self._flush(done)
                    self._stop_trace()
                early = self._after_step(done)
        self._stop_trace()  # of a run that stopped early
        return self._finish(done)

    def _traced(self, wanted: tuple[int, int]) -> tuple[int, int]:
        """Return the range of remaining steps to trace; print a line if all wanted ones were taken before."""
        first, last = wanted
        if 0 <= first < last <= self.start:
            self.display.say(f"no trace: steps {first + 1} to {last} were taken before; the run is at {self.start}")
        return (max(first, self.start), last) if self.start < last else (-1, -1)

    def _stop_trace(self) -> None:
        """End the trace, if one is running, and write it."""
        if self.is_traced:
            self.is_traced = False
            self.engine.stop_profile()

    def _after_step(self, done: int) -> bool:
        """Log, evaluate and save when due; return True if the run stops early."""
        s, is_last = self.settings, done == self.settings.steps
        evaluates = is_last or done % s.evaluation.every_steps == 0
        saves = is_last or done % s.checkpoints.every_steps == 0
        if evaluates or saves or done % s.logging.every_steps == 0:
            self._flush(done)
        if evaluates:
            self._evaluate(done)
        early = evaluates and self._is_early()
        if saves or early:
            self._save(done)
        return early

    def _flush(self, done: int) -> None:
        """Fetch and write the metrics of the steps since the last flush; stop if one was not finite."""
        if not self.pending:
            return
        fetched = [(step, rate, self.engine.fetch(metrics)) for step, rate, metrics in self.pending]
        self.throughput.pause(len(self.pending) * self.settings.batch_size * self.settings.data.seq_len)
        self.pending = []
        records = []
        for step, rate, m in fetched:
            records.append({"step": step + 1, "loss": m.loss, "grad_norm": m.grad_norm, "learning_rate": rate})
            records[-1] |= {"loss_scale": m.loss_scale, "skipped": m.skipped}
            self.skipped = m.skipped
            halts = self.settings.step.nonfinite == "stop" and not m.is_finite
            if halts and not (self.engine.policy.is_scaled and math.isfinite(m.loss)):
                self.records.add(records)
                self._stop(step, m)
        self.records.add(records)
        for record in records:
            self.board.add(record["step"], {f"train/{k}": v for k, v in record.items() if k != "step"})
        rate, memory = self.throughput.rate, self.engine.memory()
        mfu = self._mfu(rate)
        self.board.add(done, {"speed/tokens_per_s": rate} | {f"speed/{name}": share for name, share in mfu.items()})
        sizes = {"device_live_bytes": memory["live"], "step_bytes": memory["step"], "host_bytes": observe.host_bytes()}
        self.board.add(done, {f"memory/{name}": size for name, size in sizes.items()})
        shown = f" held-out {self.validation['loss']:.4f}" if self.validation else ""
        self.display.update(
            done, f"loss {records[-1]['loss']:.4f}{shown} {rate:,.0f} tokens/s MFU {100 * mfu['mfu']:.1f} %"
        )

    def _mfu(self, rate: float) -> dict[str, float]:
        """Model FLOPs utilisation of all devices at a rate of tokens/s, by both conventions."""
        peak = self.peak_flops_per_s * self.engine.num_devices
        optimizer = self.settings.step.optimizer
        return observe.utilisation(
            self.model, self.settings.data.seq_len, tokens_per_s=rate, peak=peak, is_trained=optimizer.is_trained
        )

    def _stop(self, step: int, metrics: Any) -> None:
        """End a run whose loss or gradient is not finite; that step changed nothing and nothing of it is saved."""
        batch = self.data.train.batch(step, self.settings.batch_size)
        why = self.engine.diagnose(batch, step)
        kept = self.checkpoints.steps()
        raise cli.GateFailed(
            f"step {step + 1}: loss {metrics.loss}, gradient norm {metrics.grad_norm}: {why}; the parameters before it "
            f"are kept (checkpoints at {kept or 'no step'}); with another --workdir, lower "
            "learning_rate, or pass --set=step.nonfinite=skip"
        )

    def _evaluate(self, done: int) -> None:
        """Measure the held-out loss on the same rows every time; every process reads all of them, for their bytes."""
        s, total, count, size = self.settings, 0.0, 0, 0
        for batch in train_inputs.evaluation_batches(s, self.data):
            part, targets = self.engine.evaluate(batch)
            total, count = total + part, count + targets
            if self.data.byte_lengths is not None:
                size += int(self.data.byte_lengths[batch.targets[batch.mask]].sum())
        loss = total / count
        self.measured_at = done
        self.validation = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if size:
            self.validation["bits_per_byte"] = total / size / math.log(2.0)
        self.progress = _advanced(self.progress, loss, done, s.evaluation.min_gain)
        self.records.add([{"step": done} | {f"validation_{k}": v for k, v in self.validation.items()}])
        self.board.add(done, {f"validation/{k}": v for k, v in self.validation.items()})
        self.board.add(done, self.engine.watched(self.data.held_out.batch(0, s.batch_size)))
        words = ", ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in self.validation.items())
        rate = f"; {self.throughput.rate:,.0f} tokens/s" if self.throughput.tokens else ""
        self.display.say(f"step {done}: held-out {words}{rate}")

    def _is_early(self) -> bool:
        """Return True if `patience` evaluations in a row brought no gain in the held-out loss."""
        patience = self.settings.evaluation.patience
        return patience is not None and self.progress["without_gain"] >= patience

    def _save(self, done: int) -> None:
        """Start to save a checkpoint after `done` steps."""
        meta = {
            "identity": self.identity,
            "config": self.settings.model_dump(mode="json"),
            "progress": self.progress,
            "measured_at": self.measured_at,
        }
        is_measured = self.measured_at == done and math.isfinite(self.validation["loss"])
        loss = self.validation["loss"] if is_measured else None
        self.checkpoints.save(done, self.engine.arrays(), meta, loss=loss)

    def _finish(self, done: int) -> Result:
        """Wait for the last save, export the model and write the summary."""
        self.checkpoints.wait()
        if not self.validation:  # restarted after its last step
            self._measure_again(done)
        loss, size = self.validation.get("loss", math.nan), self.validation.get("bits_per_byte")
        result = Result(done, loss, size, self.throughput.mean, self.skipped)
        summary = result._asdict() | self._speed()
        summary |= {"backend": self.backend, "parameters": self.num_parameters, "text_sha256": self.data.joined_sha256}
        summary |= self.progress
        if self.processes.is_first:
            outputs.write_json(self.workdir / SUMMARY, summary)
        exported = f", {self._export()}" if self.settings.checkpoints.export else ""
        if 2 * self.skipped > done:
            self.display.say(
                f"warning: most steps changed nothing, since their loss or gradient was not finite ({self.skipped} of "
                f"{done}); lower learning_rate={self.settings.learning_rate}"
            )
        skipped = f", {self.skipped} of them skipped" if self.skipped else ""
        self.display.say(
            f"finished {done} steps{skipped}: held-out loss {loss:.4f}"
            + (f", {size:.4f} bits per byte" if size else "")
            + (f", {self.throughput.mean:,.0f} tokens/s" if self.throughput.tokens else "")
            + f"; in {self.workdir}: {SUMMARY}, {RECORDS}, {BOARD}/{exported}"
        )
        return result

    def _measure_again(self, done: int) -> None:
        """Take the held-out loss after `done` steps from the records of an earlier start, or measure it."""
        found = {
            key.removeprefix("validation_"): math.nan if value is None else value  # records have no NaN
            for record in self.records.read()
            for key, value in record.items()
            if record["step"] == done and key.startswith("validation_")
        }
        if not self.processes.agree(bool(found)):
            self._evaluate(done)
            return
        self.validation = found
        if self.measured_at != done:  # measured by a start that found the last step's checkpoint without it
            self.progress = _advanced(self.progress, found["loss"], done, self.settings.evaluation.min_gain)

    def _speed(self) -> dict[str, float | None]:
        """Tokens/s and MFU of this process's steps; of the process before it if there was no step left to take."""
        if self.throughput.tokens:
            return {"tokens_per_s": self.throughput.mean} | self._mfu(self.throughput.mean)
        try:
            before = json.loads((self.workdir / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none, or a damaged one
            before = {}
        return {name: before.get(name) for name in ("tokens_per_s", "mfu", "mfu_causal")}

    def _export(self) -> str:
        """Write the folder that other tools read, or report why there is none."""
        params = self.engine.params()
        if not self.processes.is_first:
            return ""
        try:
            with run_folder.replaced(self.workdir / EXPORT) as made:
                if self.settings.lora is None:
                    self.settings.export(made, self.model, params, self.data.tokenizer)
                else:
                    plain, merged = lora.plain(self.model), lora.merged(self.model, params)
                    weights.save_checkpoint(made, plain, merged, tokenizer=self.data.tokenizer)
        except ValueError as error:  # no Hugging Face architecture is this decoder
            return f"not exported ({error})"
        if self.settings.lora is None:
            return f"{EXPORT}/"
        try:
            with run_folder.replaced(self.workdir / ADAPTERS) as made:
                peft_files.save(made, self.model, params, base=self.settings.start)
        except ValueError as error:  # PEFT has no such adapters
            return f"{EXPORT}/ (adapters merged), no {ADAPTERS}/ ({error})"
        return f"{EXPORT}/ (adapters merged), {ADAPTERS}/"

    def close(self) -> None:
        """Stop the display and free the threads of the checkpoints."""
        self.display.close()
        self.board.close()
        self._stop_trace()  # of a run that an error or an interrupt ended
        with contextlib.suppress(OSError):  # reported already
            self.checkpoints.close()


def _advanced(progress: dict[str, Any], loss: float, done: int, min_gain: float) -> dict[str, Any]:
    """Progress of a run after an evaluation at step `done`; the best loss is the lowest, however small its gain."""
    best, before = progress["best_loss"], progress["gain_loss"]
    found = progress | {"without_gain": progress["without_gain"] + 1}
    if math.isfinite(loss) and (best is None or loss < best):
        found |= {"best_loss": loss, "best_step": done}
    if math.isfinite(loss) and (before is None or loss < before - min_gain):
        found |= {"gain_loss": loss, "without_gain": 0}
    return found
