"""Stages that run in milliseconds, for tests of how they are run."""

import shlex

from jaxbench.gpu.stages import Stage
from jaxbench.measure import records


def stage(name, command, **fields):
    return Stage(**{"name": name, "about": "x", "command": command, "limit_s": 600} | fields)


def python(code):
    """Return the command of a program; {work} and {device} in it are places."""
    return shlex.join(["python", "-c", code])


def braced(text):
    return text.replace("{", "{{").replace("}", "}}")


def writing(name, text):
    """Return a program that writes a file of its folder."""
    return f"open({'{work}/' + name!r}, 'a').write({braced(text)!r}); "


def measuring(*found):
    """Return a program that writes records as compare.py does."""
    return writing(records.RESULTS_NAME, "".join(each.model_dump_json(exclude_defaults=True) + "\n" for each in found))


def counting(name, code=""):
    """Return a stage that leaves a mark each time it runs."""
    return stage(name, python(writing("runs", "x") + code))


def runs(call, name):
    """Return how often a counting stage has run."""
    path = call.results.parent / "work" / name / "runs"
    return len(path.read_text()) if path.exists() else 0
