"""Devices that are not there are named before anything starts, and JAX's choice of platforms stays the user's."""

from __future__ import annotations

import fnmatch
import sys

import jax
import pytest
import torch

from jaxbench import devices, libtpu, process_environment
from torch_ref import devices as torch_devices


def test_a_build_of_pytorch_without_gpus_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch_devices.check_device("cpu")
    for device in ("gpu", "tpu"):
        with pytest.raises(ValueError, match=rf"--device={device}: PyTorch sees no {device} .* use --device=cpu"):
            torch_devices.check_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch_devices.check_device("gpu")


def found(*paths):
    """Return a stand-in for glob.glob that finds these paths."""
    return lambda pattern: [path for path in paths if fnmatch.fnmatch(path, pattern)]


@pytest.mark.skipif(sys.platform != "linux", reason="devices are looked for in Linux's files")
def test_a_device_that_is_not_attached_is_refused_by_the_system_s_files(monkeypatch, tmp_path):
    monkeypatch.setattr(process_environment.glob, "glob", found())
    for device in ("gpu", "tpu"):
        with pytest.raises(ValueError, match=f"--device={device}, but this machine has none .*use --device=cpu"):
            process_environment.check_attached(device)
        with pytest.raises(ValueError, match=f"--device={device}, but this machine has none"):
            devices.check_device(device)
    for check in (process_environment.check_attached, devices.check_device):
        check("cpu")
        with pytest.raises(ValueError, match="--device=phone is unknown"):
            check("phone")
    monkeypatch.setattr(process_environment.glob, "glob", found("/dev/vfio/vfio", "/dev/kfd"))
    process_environment.check_attached("gpu")
    with pytest.raises(ValueError, match="--device=tpu"):
        process_environment.check_attached("tpu")
    monkeypatch.setattr(process_environment.glob, "glob", found("/dev/vfio/0"))
    process_environment.check_attached("tpu")


@pytest.mark.parametrize(("device", "is_tpu"), [("0x0042", False), ("0x0063", True)])
def test_google_s_network_cards_are_no_tpus(monkeypatch, tmp_path, device, is_tpu):
    (tmp_path / "vendor").write_text(process_environment.GOOGLE + "\n")
    (tmp_path / "device").write_text(device + "\n")
    monkeypatch.setattr(
        process_environment.glob, "glob", lambda pattern: [str(tmp_path / "vendor")] if "pci" in pattern else []
    )
    assert process_environment.is_tpu_attached() == is_tpu


def test_a_device_whose_files_are_there_but_that_jax_cannot_start_is_named(monkeypatch):
    monkeypatch.setattr(process_environment.glob, "glob", found("/dev/nvidia0"))
    assert devices.platforms() == ["cpu"]
    with pytest.raises(ValueError, match="--device=gpu: JAX sees no gpu on this machine .it sees cpu"):
        devices.check_device("gpu")


def test_a_choice_of_platforms_is_kept(monkeypatch):
    monkeypatch.setattr(process_environment, "is_tpu_attached", lambda: False)
    before = jax.config.jax_platforms
    assert before == "cpu", "conftest.py chose it"
    try:
        jax.config.update("jax_platforms", "cpu,cuda")
        libtpu.leave_out_if_absent()
        assert jax.config.jax_platforms == "cpu,cuda"
        jax.config.update("jax_platforms", None)
        monkeypatch.setattr(process_environment, "is_tpu_attached", lambda: True)
        libtpu.leave_out_if_absent()
        assert jax.config.jax_platforms is None
        monkeypatch.setattr(process_environment, "is_tpu_attached", lambda: False)
        libtpu.leave_out_if_absent()
        assert jax.config.jax_platforms == "cpu"
    finally:
        jax.config.update("jax_platforms", before)
