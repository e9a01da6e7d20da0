"""The commands `benchmarks.py site` and `benchmarks.py dashboard` (S file)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from jaxbench import cli, outputs
from jaxbench.regress import history_commands

VALUES = flags.FLAGS
SHOWN = {"case", "backend", "passed", "layers"}  # of a parity result
HeatMap = Callable[[dict[str, Any]], dict[str, Any]]


ABOUT_SITE = "Write the history as pages that open anywhere."
ABOUT_DASHBOARD = "Serve the same pages with live samples of this machine."


def define_site() -> None:
    """Define the flags of site."""
    history_commands.define_folder()
    flags.DEFINE_string("output", "out/site", "folder of the pages; a site that is there is replaced")
    _define_parity()


def _define_parity() -> None:
    flags.DEFINE_multi_string("parity", [], "a parity.json whose layers are shown; may be repeated")


def _layers(heat_map: HeatMap) -> list[dict[str, Any]]:
    """Return the parity results whose layers are shown, each with its figure."""
    layers = []
    for path in VALUES.parity:
        if not Path(path).is_file():
            raise ValueError(f"--parity={path} is no file; wanted what experiments/parity.py writes")
        found = outputs.read_json(Path(path))
        if not isinstance(found, list) or not all(isinstance(each, dict) and each.keys() >= SHOWN for each in found):
            raise ValueError(f"--parity={path} is not what experiments/parity.py writes; wanted a list of results")
        layers += [each | {"figure": heat_map(each)} for each in found if each["layers"]]
    return layers


def site(heat_map: HeatMap) -> int:
    """Write the history as pages that open from a folder and from any web host.

    Args:
      heat_map: draws the figure of a parity result's layers.
    """
    from jaxbench.regress.site import write

    made = write.write(Path(VALUES.output), history_commands.folder(), layers=_layers(heat_map))
    print(f"{len(made.runs)} runs and {len(made.series)} series: {Path(VALUES.output) / 'index.html'}")
    for name, why in made.damaged.items():
        print(f"left out: {name}: {why}")
    return cli.EXIT_OK


def define_dashboard() -> None:
    """Define the flags of dashboard."""
    history_commands.define_folder()
    _define_parity()
    flags.DEFINE_string("host", "127.0.0.1", "address to listen on; another machine's needs --token_variable")
    flags.DEFINE_integer("port", 8001, "port to listen on; 0: any that is free", lower_bound=0, upper_bound=65535)
    flags.DEFINE_string("token_variable", None, "variable of the environment with the token that requests bring")
    flags.DEFINE_string("runs", "out/benchmarks", "folder of the runs at work")
    flags.DEFINE_float("interval_s", 1.0, "seconds between samples", lower_bound=0.1, upper_bound=3600)


def dashboard(heat_map: HeatMap) -> int:
    """Serve the same pages with live samples of this machine.

    Args:
      heat_map: as `site` takes it.
    """
    try:
        import uvicorn

        from jaxbench.regress.site import serve
    except ImportError as error:
        raise ValueError(f"dashboard needs {error.name}: pip install -e '.[serve]'") from error

    token = None
    if VALUES.token_variable is not None:
        token = os.environ.get(VALUES.token_variable, "").strip()
        if len(token) < 16:
            raise ValueError(f"--token_variable={VALUES.token_variable}: it holds {len(token)} characters; wanted 16")
    if token is None and not serve.is_own(VALUES.host):
        raise ValueError(f"--host={VALUES.host} can be reached from other machines; name a token with --token_variable")
    app = serve.make_app(
        history_commands.folder(),
        Path(VALUES.runs),
        layers=_layers(heat_map),
        token=token,
        interval_s=VALUES.interval_s,
    )
    listening = _listening(VALUES.host, VALUES.port)
    address, port = listening.getsockname()[:2]
    print(f"http://{f'[{address}]' if ':' in address else address}:{port}", flush=True)
    config = uvicorn.Config(
        app,
        log_level="warning",
        limit_concurrency=serve.MOST_REQUESTS,
        timeout_graceful_shutdown=1,
        server_header=False,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listening])
    return cli.EXIT_OK


def _listening(host: str, port: int) -> Any:
    """Return a listening socket.

    Raises:
      ValueError: the address is invalid or in use.
    """
    import socket

    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host={host} --port={port}: {error}") from error
