"""Serve a model behind OpenAI's interface, many requests in one running batch.

    serve.py                                             the default model on http://127.0.0.1:8000
    serve.py --model=FOLDER --set=port=8080              another model, another port
    serve.py --device=gpu --set=engine.kernels=xla       on a GPU, with XLA's own programs
    JAXBENCH_API_KEY=... serve.py --set=host=0.0.0.0     for other machines, with an API key
    serve.py --input=requests.jsonl --output=answers.jsonl   a file of requests, lines as in OpenAI's batch interface

Ends at SIGTERM or Ctrl-C when the answers in progress have ended. docs/serving.md
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, log_lines, outputs, process_environment, store

VALUES = flags.FLAGS


def main() -> int:
    """Serve until told to end; return the exit code."""
    from jaxbench.memory.serving import MemoryServerConfig

    config = cli.load_config(MemoryServerConfig)
    if VALUES.model != "default":
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"model": VALUES.model})})
    _check_place(config.engine)
    process_environment.ensure(VALUES.device, library="PyTorch" if config.engine.backend == "torch" else "XLA")
    if VALUES.input is not None or VALUES.output is not None:
        return answer_file(config)
    if VALUES["overwrite"].present:
        raise ValueError(f"--overwrite={VALUES.overwrite} needs --input and --output; leave it out")
    if VALUES.replicas is not None:
        return serve_fleet(config)
    try:
        import uvicorn

        from jaxbench.serve import app, head_limit
    except ImportError as error:
        raise ValueError(f"serve: {error}; pip install -e '.[serve]'") from error
    from jaxbench.pretrained import tokenizer

    _check(config)
    log_lines.start("jaxbench.serve", "jaxbench.result_cache")
    made = app.make(config, lambda: tokenizer.load_tokenizer(config.engine.model), _watermarks(config.engine))
    options = uvicorn.Config(
        made, http=head_limit.protocol(config.silence_s), log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=max(1, round(config.drain_s) + 5),
    )  # fmt: skip
    started, listening = time.monotonic(), _socket(config.host, config.port)
    host = f"[{config.host}]" if ":" in config.host else config.host
    print(f"http://{host}:{listening.getsockname()[1]} (model {made.state.name}; Ctrl-C ends it)", flush=True)
    server = _server(made, options)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again that ended it
        server.run(sockets=[listening])
    if server.problem:
        raise ValueError(f"engine: {server.problem}")
    print(f"served for {time.monotonic() - started:.0f} s")
    return cli.EXIT_OK


def _server(made: Any, options: Any) -> Any:
    """Return uvicorn's server of an application, with an end of its own."""
    import uvicorn

    class Server(uvicorn.Server):
        """Takes no new requests after the signal, while answers in progress end; ends if it has no engine for good."""

        problem = ""  # why the model cannot be loaded

        async def on_tick(self, counter: int) -> bool:
            """End once the model is known not to load: nobody would start the engine again."""
            if made.state.service.state == "failed":
                self.problem, self.should_exit = made.state.service.problem, True
            return await super().on_tick(counter)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Drain the service, then shut down as uvicorn, which alone would tell the application only at the end.

            /ready and /metrics respond while answers end; slow readers of answers have what is left of the time. A
            second Ctrl-C (force_exit) ends the answers at once, and a third leaves those who still read.
            """
            until = time.monotonic() + self.config.timeout_graceful_shutdown
            await made.state.service.end(is_hurried=lambda: self.force_exit)
            left = 0 if self.force_exit else round(until - time.monotonic())
            self.config.timeout_graceful_shutdown, self.force_exit = max(5, left), False
            await super().shutdown(sockets)

    return Server(options)


def _check_place(engine: Any) -> None:
    """Check that the engine can compute on the device.

    Raises:
      ValueError: its kernels are not for the device, or --replicas is given.
    """
    if VALUES.device == "cpu":
        return
    if engine.kernels != "xla" or engine.backend != "flax":
        raise ValueError(
            f"--device={VALUES.device}: engine.kernels={engine.kernels}, engine.backend={engine.backend} compute on "
            "the CPU; wanted --set=engine.kernels=xla and flax"
        )
    if VALUES.replicas is not None:
        raise ValueError(f"--device={VALUES.device}, --replicas={VALUES.replicas}: one engine a device; leave one out")


def _check(config: Any) -> None:
    """Check what can be checked before anything starts.

    Raises:
      ValueError: the model cannot be read, a setting is invalid, or other machines could use the server without a key.
    """
    from jaxbench.serve import watch
    from jaxbench.serve.intake import KEY_VARIABLE

    engine, key = config.engine, os.environ.get(KEY_VARIABLE)
    config.result_cache.open()
    if config.jobs.folder is not None:
        outputs.check_folder(config.jobs.folder, flag="jobs.folder")
    if config.alerts.send is not None:
        watch.channels_of(config.alerts.send)
    if key is not None and not key.strip():
        raise ValueError(f"{KEY_VARIABLE}={key!r} is blank; wanted a key, or no such variable")
    sizes = [engine.read_config(path).vocab_size for path in (engine.model, engine.draft or engine.model)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"draft={engine.draft} has {sizes[1]} tokens, and the model {sizes[0]}; wanted the same ones")
    if config.host not in ("127.0.0.1", "::1", "localhost") and not os.environ.get(KEY_VARIABLE):
        raise ValueError(
            f"host={config.host}: other machines could use this server; set {KEY_VARIABLE} to a key that clients "
            "send, or leave host at 127.0.0.1"
        )


def answer_file(config: Any) -> int:
    """Answer the requests of --input into --output."""
    for name in ("input", "output"):
        if VALUES[name].value is None:
            raise ValueError(f"--{name} is missing: name a .jsonl file of requests, and one for the answers")
    if VALUES.replicas is not None:
        raise ValueError(
            f"--replicas={VALUES.replicas} is for a server, and --input is answered by one engine; leave it out"
        )
    from jaxbench import terminal
    from jaxbench.pretrained import tokenizer
    from jaxbench.serve import batch
    from jaxbench.serve.service import Service

    engine = config.engine
    engine.read_config(engine.model)
    watermarks = _watermarks(engine)
    identity = [batch.FORMAT, *_identity(config, watermarks)]
    job = batch.check(VALUES.input, VALUES.output, identity, overwrite=VALUES.overwrite)
    text = tokenizer.load_tokenizer(engine.model)
    cli.keep(f"finished answers are in {job.part}; the same command goes on", when=job.part.exists)

    async def run() -> int:
        service = Service(config.model_copy(update={"drain_s": 0.0}), text, watermarks)
        try:
            with terminal.progress(job.total) as advance:
                return await batch.run(service, config.shown_name, job, advance)
        finally:
            await service.end()

    with store.alone(job.output):
        failed = asyncio.run(run())
    print(f"written: {job.output} ({job.total} answers, {failed} of them errors)")
    return cli.EXIT_OK


def _identity(config: Any, watermarks: Any) -> list[Any]:
    """Return what the answers to a file depend on in addition to the file, as JSON values; a key as its hash."""
    from jaxbench.pretrained import weights

    engine = config.engine
    decides = engine.model_dump(include={"backend", "weights", "cache", "activations", "watermarks"})
    if engine.kernels == "xla":
        sizes = {"kernels", "segment", "slot_tokens", "cache_tokens", "limits"}  # of the compiled programs
        decides |= engine.model_dump(include=sizes)
    else:  # what has no room is refused; a larger cache changes nothing more
        decides["context"] = min(engine.cache_tokens, engine.read_config(engine.model).max_seq_len)
    if VALUES.device != "cpu":
        decides["device"] = VALUES.device
    most = min(config.max_choices, engine.limits.max_requests)
    how = config.shown_name, most, config.default_new_tokens, weights.checksum(engine.model)
    identity = [decides, *how]
    if watermarks is not None:  # another key in the same file is another watermark
        from jaxbench.watermark import run_identity

        salt = hashlib.sha256(json.dumps(identity).encode()).digest()
        identity.append(run_identity.digest([each.key for each in watermarks.candidates()], salt))
    return identity


def serve_fleet(config: Any) -> int:
    """Serve with several engines until told to end; return the exit code."""
    from jaxbench import ray_pool
    from jaxbench.measure import environment

    _check(config)
    for name, is_set in (("jobs.folder", config.jobs.folder), ("alerts.rules", config.alerts.rules)):
        if is_set:
            raise ValueError(f"{name} is of one server, and --replicas={VALUES.replicas} starts several; leave one out")
    cores, is_local = environment.usable_cores(), "RAY_ADDRESS" not in os.environ
    threads = config.engine.threads or (max(1, cores // VALUES.replicas) if is_local else 1)
    if config.engine.kernels == "native":  # XLA's and PyTorch's own operations use all cores that they find
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"threads": threads})})
    _socket(config.host, config.port).close()  # raises if the port is taken, which Ray Serve would wait for
    interrupt = signal.getsignal(signal.SIGTERM)
    ray_pool.start(max(cores, threads * VALUES.replicas))
    try:
        import ray
        from ray import serve

        from jaxbench.serve import fleet
    except ImportError as error:
        raise ValueError(f"replicas={VALUES.replicas}: {error}; pip install -e '.[serve,ray]'") from error
    serve.start(http_options={"host": config.host, "port": config.port}, logging_config={"log_level": "ERROR"})
    made = fleet.application(config, _watermarks(config.engine), replicas=VALUES.replicas, cpus=threads)
    signal.signal(signal.SIGTERM, interrupt)  # Ray's own handler ends the process and its answers at once
    try:
        gateway = serve.run(made, name="jaxbench", route_prefix="/")
        print(f"http://{config.host}:{config.port} (model {config.shown_name}, {VALUES.replicas} replicas)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        cut = gateway.drain.remote(config.drain_s).result()
        if cut:
            print(f"{cut} answers did not end in {config.drain_s:g} s and were cut off")
    finally:
        serve.shutdown()
        ray.shutdown()
    return cli.EXIT_OK


def _watermarks(config: Any) -> Any:
    """Return the watermarks that requests may name; None = none are configured."""
    if not config.watermarks:
        return None
    from jaxbench.watermark.serving import Watermarks

    return Watermarks(config.watermarks, package={"flax": "jaxbench", "torch": "torch_ref"}[config.backend])


def _socket(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
      ValueError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(f"host={host}, port={port}: {error.strerror}; name another with --set=port=PORT") from error


if __name__ == "__main__":
    cli.define_config("configs/serve/cpu.yaml")
    cli.define_model()
    cli.define_device()
    flags.DEFINE_integer("replicas", None, "engines behind one address, by Ray Serve (RAY_ADDRESS: of a cluster)", 1)
    flags.DEFINE_string("input", None, "answer a file instead: a .jsonl file of OpenAI's batch interface")
    flags.DEFINE_string("output", None, "answers of --input, in its order: a .jsonl file")
    flags.DEFINE_bool("overwrite", False, "replace the output; never an input")
    cli.run(main, about=__doc__)
