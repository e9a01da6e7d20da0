"""Mesh sizes: the rest, impossible factorisations, settings that exclude each other."""

from __future__ import annotations

import math

import pytest

from jaxbench import config
from jaxbench.mesh import AXES, AXES_2D, MeshConfig, ParallelConfig, factorisations


def test_one_axis_takes_the_devices_that_the_others_leave():
    assert MeshConfig().sizes(8) == dict.fromkeys(AXES, 1) | {"data": 8}
    assert MeshConfig(data=1, fsdp=-1, model=2, stage=2).sizes(8)["fsdp"] == 2
    assert MeshConfig(model_x=2, model_y=2).sizes(8) == dict.fromkeys(AXES_2D, 1) | {
        "data": 2, "model_x": 2, "model_y": 2,
    }  # fmt: skip


def test_an_impossible_factorisation_lists_the_possible_ones():
    with pytest.raises(ValueError) as error:
        MeshConfig(data=3, model=2).sizes(8)
    message = str(error.value)
    assert "data=3, model=2 needs 6 devices, there are 8; possible: data=4, model=2; " in message
    listed = {tuple(int(part.split("=")[1]) for part in one.split(", ")) for one in message.split(": ")[2].split("; ")}
    assert listed == {(1, 8), (2, 4), (4, 2), (8, 1)}
    with pytest.raises(ValueError, match="stage=3, data=-1 needs a multiple of 3 devices, there are 8; possible: "):
        MeshConfig(stage=3).sizes(8)


def test_a_long_list_of_factorisations_is_cut_and_counted():
    with pytest.raises(ValueError, match=r"; .* and \d+ more$") as error:
        MeshConfig(stage=3, data=3, fsdp=2, model=2).sizes(64)
    assert str(error.value).count(";") == 12


def test_factorisations_are_complete_and_distinct():
    found = list(factorisations(12, 3))
    assert all(math.prod(sizes) == 12 for sizes in found)
    assert len(found) == len(set(found)) == 18  # 6 ways for 2**2 times 3 ways for 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": -1, "fsdp": -1}, "data and fsdp are all -1"),
        ({"stage": 0}, "stage=0: a size is a number of devices from 1"),
        ({"model": 2, "model_x": 2}, "model=2 and model_x=2, model_y=1 exclude each other"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(**sizes)


def test_a_yaml_file_sets_a_mesh_and_names_unknown_keys(tmp_path):
    path = tmp_path / "parallel.yaml"
    path.write_text("mesh: {fsdp: -1, data: 1, model: 2}\nzero: 2\nschedule: gpipe\n")
    loaded = config.load(path, ["micro_batches=4"], ParallelConfig)
    assert loaded.mesh.sizes(8)["fsdp"] == 4 and loaded.micro_batches == 4 and loaded.zero == 2
    with pytest.raises(ValueError, match=r"mesh.modell.*nearest is mesh.model"):
        config.load(path, ["mesh.modell=2"], ParallelConfig)
    with pytest.raises(ValueError, match="zero"):
        config.load(path, ["zero=4"], ParallelConfig)
