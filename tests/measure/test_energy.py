"""Energy counters as the kernel shows them: files in a folder."""

import pytest

from jaxbench.measure import energy


def package(folder, name, used, limit=1_000_000):
    (folder / name).mkdir()
    (folder / name / "energy_uj").write_text(f"{used}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{limit}\n")


def test_packages_count_and_their_parts_do_not(tmp_path):
    package(tmp_path, "intel-rapl:0", 500_000)
    package(tmp_path, "intel-rapl:0:0", 400_000)
    package(tmp_path, "intel-rapl:1", 250_000)
    before = energy.readings(tmp_path)
    assert {name: reading.joules for name, reading in before.items() if "rapl" in name} == {
        "intel-rapl:0": 0.5,
        "intel-rapl:1": 0.25,
    }
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100000\n")  # begun again after 1 J
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("300000\n")
    after = {name: reading for name, reading in energy.readings(tmp_path).items() if "rapl" in name}
    assert energy.spent(before, after) == pytest.approx(0.6 + 0.05)


def test_a_counter_that_cannot_be_read_is_no_figure(tmp_path):
    (tmp_path / "intel-rapl:0").mkdir()
    package(tmp_path, "intel-rapl:1", "no number")
    package(tmp_path, "intel-rapl:2", 500_000, limit=0)  # by which a difference cannot be divided
    assert not any("rapl" in name for name in energy.readings(tmp_path))
    assert energy.spent({}, {}) is None
    assert energy.spent({"a": energy.Reading(1.0, 9.0)}, {}) is None


def test_the_counter_of_the_whole_platform_is_not_added_to_its_packages(tmp_path):
    package(tmp_path, "intel-rapl:0", 5_000_000)
    package(tmp_path, "intel-rapl:1", 9_000_000)
    (tmp_path / "intel-rapl:0" / "name").write_text("package-0\n")
    (tmp_path / "intel-rapl:1" / "name").write_text("psys\n")
    assert [name for name in energy.readings(tmp_path) if "rapl" in name] == ["intel-rapl:0"]
