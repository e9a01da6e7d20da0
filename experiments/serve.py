"""Serve a model behind OpenAI's interface, many requests in one running batch.

    serve.py                                             the default model on http://127.0.0.1:8000
    serve.py --model=FOLDER --set=port=8080              another model, another port
    JAXBENCH_API_KEY=... serve.py --set=host=0.0.0.0     to other machines, behind a key

Ends at SIGTERM or Ctrl-C when the answers in progress have ended. docs/serving.md
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment

VALUES = flags.FLAGS


class JsonLines(logging.Formatter):
    """A log record as one line of JSON: time, level, what happened, its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def main() -> int:
    """Serve until told to end; return the exit code."""
    from jaxbench.serve.settings import ServerConfig

    config = cli.load_config(ServerConfig)
    if VALUES.model != "default":
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"model": VALUES.model})})
    process_environment.ensure("cpu", library="PyTorch" if config.engine.backend == "torch" else "XLA")
    try:
        import uvicorn

        from jaxbench.serve import app
    except ImportError as error:
        raise ValueError(f"serve: {error}; pip install 'jaxbench[serve]'") from error
    from jaxbench.pretrained import tokenizer, weights

    weights.read_config(config.engine.model)  # a model that cannot be read is said before anything starts
    if config.host not in ("127.0.0.1", "::1", "localhost") and not os.environ.get(app.KEY_VARIABLE):
        raise ValueError(
            f"host={config.host}: other machines could use this server; set {app.KEY_VARIABLE} to a key that clients "
            "send, or leave host at 127.0.0.1"
        )
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.getLogger("jaxbench.serve").addHandler(handler)
    logging.getLogger("jaxbench.serve").setLevel(logging.INFO)
    made = app.make(config, lambda: tokenizer.load_tokenizer(config.engine.model))
    options = uvicorn.Config(
        made, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=max(1, round(config.drain_s) + 5),
    )  # fmt: skip
    started, listening = time.monotonic(), _socket(config.host, config.port)
    host = f"[{config.host}]" if ":" in config.host else config.host
    print(f"http://{host}:{listening.getsockname()[1]} (model {made.state.name}; Ctrl-C ends it)", flush=True)

    class Server(uvicorn.Server):
        """Takes nothing new from the signal on, while answers in progress end."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """As uvicorn's, which by itself tells the application at the very end."""
            draining = asyncio.create_task(made.state.service.end())
            await super().shutdown(sockets)
            await draining

    with contextlib.suppress(KeyboardInterrupt):  # uvicorn hands on the signal that it ended for
        Server(options).run(sockets=[listening])
    print(f"served for {time.monotonic() - started:.0f} s")
    return cli.EXIT_OK


def _socket(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
      ValueError: the place cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(f"host={host}, port={port}: {error.strerror}; name another with --set=port=PORT") from error


if __name__ == "__main__":
    cli.define_config("configs/serve/cpu.yaml")
    cli.define_model()
    cli.run(main, about=__doc__)
