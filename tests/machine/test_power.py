"""Energy from counters and sensors, and what is estimated where there are none."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hivetune.machine.telemetry import (
    CORE_W,
    REST_W,
    Energy,
    PowerSample,
    busy_core_seconds,
    energy_between,
    sample_power,
)


def rapl(root: Path, zone: str, value: int) -> None:
    folder = root / "sys/class/powercap" / zone
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{value}\n")
    (folder / "max_energy_range_uj").write_text("262143328850\n")


def test_rapl_is_measured_and_its_counter_begins_again(tmp_path: Path) -> None:
    rapl(tmp_path, "intel-rapl:0", 262_143_000_000)
    rapl(tmp_path, "intel-rapl:1", 5_000_000)
    rapl(tmp_path, "intel-rapl:0:0", 7)  # the cores alone: part of intel-rapl:0
    before = sample_power(10.0, tmp_path)
    rapl(tmp_path, "intel-rapl:0", 671_150)  # 1 J over its end
    rapl(tmp_path, "intel-rapl:1", 65_000_000)
    found = energy_between(before, sample_power(12.0, tmp_path))
    assert found.joules == pytest.approx(61.0, abs=1e-3)
    assert found.measured


def test_a_card_tells_its_watts(tmp_path: Path) -> None:
    sensors = tmp_path / "sys/class/drm/card0/device/hwmon/hwmon3"
    sensors.mkdir(parents=True)
    (sensors.parent.parent / "mem_info_vram_total").write_text("17163091968\n")
    (sensors / "power1_average").write_text("220000000\n")
    for value in (0, 50_000_000):
        rapl(tmp_path, "intel-rapl:0", value)
        sample = sample_power(float(value > 0), tmp_path)
        if value == 0:
            before = sample
    assert energy_between(before, sample).joules == pytest.approx(270.0)
    assert energy_between(before, sample).measured


def test_the_time_of_niced_programs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = SimpleNamespace(user=1.0, nice=2.0, system=4.0, idle=8.0, iowait=16.0, irq=32.0, softirq=64.0, steal=128.0)
    monkeypatch.setattr("psutil.cpu_times", lambda: times)
    assert busy_core_seconds() == 103.0


def test_without_sensors_it_is_estimated_and_says_so() -> None:
    found = energy_between(PowerSample(0.0, 100.0), PowerSample(10.0, 140.0))
    assert found == Energy(40 * CORE_W + 10 * REST_W, 40 * CORE_W + 10 * REST_W)
    assert not found.measured


def test_a_card_without_a_sensor_marks_the_sum() -> None:
    package = {"intel-rapl:0": (0.0, 1e6)}
    before = PowerSample(0.0, 0.0, package)
    after = PowerSample(10.0, 0.0, {"intel-rapl:0": (500.0, 1e6)}, ({"busy_percent": 50},))
    assert energy_between(before, after) == Energy(1500.0, 1000.0)


def test_counters_that_can_not_be_read_any_more_are_not_taken_for_nothing() -> None:
    found = energy_between(PowerSample(0.0, 0.0, {"intel-rapl:0": (9.0, 1e6)}), PowerSample(10.0, 10.0))
    assert found.joules == 10 * CORE_W + 10 * REST_W and not found.measured


def test_energy_adds_up_in_kwh() -> None:
    whole = Energy(1.8e6) + Energy(1.8e6, 1.0)
    assert whole.kwh == pytest.approx(1.0)
    assert not whole.measured


def test_this_machine_can_be_sampled_twice() -> None:
    first = sample_power(0.0)
    assert energy_between(first, sample_power(1.0)).joules >= 0
