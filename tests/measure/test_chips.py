"""The chip table and topology names."""

from __future__ import annotations

import pytest

from jaxbench.measure import chips


def test_every_chip_has_positive_rates_and_a_source():
    for chip in chips.CHIPS.values():
        assert min(chip.flops_per_s, chip.hbm_bytes_per_s, chip.hbm_bytes, chip.ici_bytes_per_s) > 0
        assert "docs.cloud.google.com/tpu" in chip.source
        # All published chips do between 100 and 1000 FLOP per byte of memory: a slipped unit shows here.
        assert 100 < chip.flops_per_s / chip.hbm_bytes_per_s < 1000
        assert 2 < chip.hbm_bytes_per_s / chip.ici_bytes_per_s < 10


def test_published_rates_of_v5e_and_v5p():
    assert chips.CHIPS["v5e"][1:5] == (197e12, 819e9, 16 * 2**30, 200e9)
    assert chips.CHIPS["v5p"][1:5] == (459e12, 2765e9, 95 * 2**30, 600e9)


@pytest.mark.parametrize(("name", "count"), [("v5e:1x1", 1), ("v6e:2x4", 8), ("v5p:2x2x1", 4), ("v4:2x2x2", 8)])
def test_topology_names_give_chip_and_count(name, count):
    topology = chips.parse_topology(name)
    assert topology.num_chips == count
    assert topology.chip.name == name.split(":")[0]


@pytest.mark.parametrize("bad", ["v5e:3x3", "v5e-2x2", "V5E:2x2", "h100", ""])
def test_unknown_topology_lists_the_known_ones(bad):
    with pytest.raises(ValueError, match="unknown topology") as error:
        chips.parse_topology(bad)
    assert repr(bad) in str(error.value) and "v6e:2x4" in str(error.value)


def test_near_miss_suggests_the_name():
    with pytest.raises(ValueError, match="did you mean 'v5e:2x2'"):
        chips.parse_topology("v5e-2x2")
