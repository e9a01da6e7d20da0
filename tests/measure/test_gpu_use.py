"""What NVIDIA's GPUs are doing, from lines as nvidia-smi prints them."""

import os

import pytest

from jaxbench.measure import gpu_use
from jaxbench.measure.gpu_use import GpuUse
from jaxbench.profiling import monitor
from jaxbench.regress.site import samples

MIB = 2**20
RTX_2080 = "0, 86, 5312, 7979, 176.98\n"
H200 = "1, 0, 4, 143771, 76.10\n"
NEITHER = "0, [N/A], [N/A], [N/A], 21.52\n"  # memory that the processor shares, or a GPU in parts (MIG)
OLD = "0, 0, 0, 2004, [Not Supported]\n"  # drivers before 440


@pytest.mark.parametrize(
    ("text", "found", "said"),
    [
        (RTX_2080, [GpuUse(0, 86.0, 5312 * MIB, 7979 * MIB, 176.98)], "GPU 86 % busy 5.2 of 7.8 GiB 177 W"),
        (
            RTX_2080 + H200,
            [GpuUse(0, 86.0, 5312 * MIB, 7979 * MIB, 176.98), GpuUse(1, 0.0, 4 * MIB, 143771 * MIB, 76.1)],
            "2 GPUs 43 % busy (0 to 86) 5.2 of 148.2 GiB 253 W",
        ),
        (NEITHER, [GpuUse(0, None, None, None, 21.52)], "GPU 22 W"),
        (OLD, [GpuUse(0, 0.0, 0, 2004 * MIB, None)], "GPU 0 % busy 0.0 of 2.0 GiB"),
        (NEITHER + H200, [GpuUse(0, None, None, None, 21.52), GpuUse(1, 0.0, 4 * MIB, 143771 * MIB, 76.1)],
         "2 GPUs 98 W"),
        ("No devices were found\n", [], ""),
        ("Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.\n" + OLD, [
            GpuUse(0, 0.0, 0, 2004 * MIB, None)], "GPU 0 % busy 0.0 of 2.0 GiB"),
        ("", [], ""),
    ],
)  # fmt: skip
def test_lines_become_figures_and_what_the_driver_does_not_tell_is_none(text, found, said):
    assert gpu_use.parse(text) == found
    assert gpu_use.sentence(found) == said


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts a tool of this name first in the path, which refuses arguments other than those that are meant."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def write(prints, status=0):
        script = tmp_path / "nvidia-smi"
        wanted = "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw --format=csv,noheader,nounits"
        lines = [f'[ "$*" = "{wanted}" ] || exit 2', f"printf '{prints}'", f"exit {status}"]
        script.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
        script.chmod(0o755)

    return write


def test_the_monitor_s_line_has_the_gpus_and_the_site_s_sample_too(tool):
    tool("0, 86, 5312, 7979, 176.98\\n")
    watched = monitor.Watched(os.getpid())
    assert "GPU 86 % busy 5.2 of 7.8 GiB 177 W" in monitor.sentence(watched.look())
    wanted = {"name": "GPU 0", "utilisation_percent": 86.0, "memory_bytes": 5312 * MIB, "watts": 176.98}
    assert samples.devices() == [wanted]


@pytest.mark.parametrize(("prints", "status"), [("No devices were found\\n", 6), (RTX_2080.strip(), 9)])
def test_a_tool_that_fails_has_no_gpus_and_is_not_asked_again(tool, prints, status):
    tool(prints, status)
    assert gpu_use.readings() == [] and samples.devices() == []
    watched = monitor.Watched(os.getpid())
    tool("0, 86, 5312, 7979, 176.98\\n")
    assert "GPU" not in monitor.sentence(watched.look())


def test_without_the_tool_there_are_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_use.readings() == [] and "GPU" not in monitor.sentence(monitor.Watched(os.getpid()).look())
