"""Cards as `nvidia-smi` prints them, of a program that stands in for it, and as the kernel shows those of AMD."""

from pathlib import Path

import pytest
from machines import GIB, write_tree

from hivetune.base.kernel import memory_sizes
from hivetune.machine.drivers import read_amd, read_nvidia
from hivetune.machine.inventory import Card, read_cards
from hivetune.machine.telemetry import sample

H100 = "NVIDIA H100 80GB HBM3, 580.95.05, 9.0, 81559, 1024, 80535, 41, 118.22, 7"
SPARK = "NVIDIA GB10, 580.95.05, 12.1, [N/A], [N/A], [N/A], 44, 11.50, 0"
COOL = ", Not Active, Not Active, Not Active, Not Active"


def smi(folder: Path, script: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_cards_and_their_sensors(tmp_path: Path) -> None:
    (card, spark) = read_nvidia(smi(tmp_path, f"echo '{H100}{COOL}'; echo '{SPARK}, Active, Not Active, N/A, N/A'"))
    assert (card["name"], card["driver"], card["architecture"]) == ("NVIDIA H100 80GB HBM3", "580.95.05", "9.0")
    assert (card["memory_bytes"], card["free_bytes"], card["used_bytes"]) == (81559 << 20, 80535 << 20, 1024 << 20)
    assert (card["temperature_c"], card["watts"], card["busy_percent"], card["hot"]) == (41.0, 118.22, 7.0, False)
    assert (spark["index"], spark["hot"]) == (1, True)
    assert spark["memory_bytes"] == memory_sizes()["MemTotal"], "it shares the machine's"


def test_a_field_that_this_driver_does_not_know_is_left_out(tmp_path: Path) -> None:
    script = (
        'case "$1" in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; esac\n'
        f"echo '{H100.replace(' 9.0,', '')}{COOL}'"
    )
    (card,) = read_nvidia(smi(tmp_path, script))
    assert card["architecture"] == "" and card["memory_bytes"] == 81559 << 20


@pytest.mark.parametrize("script", ["echo 'NVIDIA-SMI has failed'; exit 9", "echo 'No devices were found'"])
def test_a_driver_that_does_not_answer_is_no_card(script: str, tmp_path: Path) -> None:
    assert read_nvidia(smi(tmp_path, script)) == []


def test_no_driver_is_no_card(tmp_path: Path) -> None:
    assert read_nvidia(str(tmp_path / "nvidia-smi")) == []


def amd_card(root: Path, junction: int = 88_000, version: int = 120001) -> Path:
    device, nodes = root / "sys/devices/pci0000:00/0000:03:00.0", "sys/class/kfd/kfd/topology/nodes"
    files = {
        f"{device}/vendor": "0x1002\n",
        f"{device}/device": "0x7551\n",
        f"{device}/mem_info_vram_total": f"{32 * GIB}\n",
        f"{device}/mem_info_vram_used": f"{2 * GIB}\n",
        f"{device}/gpu_busy_percent": "97\n",
        f"{device}/hwmon/hwmon3/temp1_input": "61000\n",
        f"{device}/hwmon/hwmon3/temp2_input": f"{junction}\n",
        f"{device}/hwmon/hwmon3/temp2_crit": "110000\n",
        f"{device}/hwmon/hwmon3/power1_average": "287000000\n",
        "sys/class/drm/card0/device/vendor": "0x8086\n",
        "sys/class/drm/card1/name": "",
        "sys/module/amdgpu/version": "6.14.14\n",
        f"{nodes}/0/properties": "cpu_cores_count 8\ngfx_target_version 0\n",
        f"{nodes}/1/properties": f"gfx_target_version {version}\nlocation_id 768\ndomain 0\n",
    }
    write_tree(root, files)
    (root / "sys/class/drm/card1/device").symlink_to(device)
    return root


@pytest.mark.parametrize(
    ("version", "architecture"), [(120001, "gfx1201"), (90006, "gfx906"), (90010, "gfx90a"), (110000, "gfx1100")]
)
def test_an_amd_card_is_read_from_sysfs_with_its_junction_not_its_edge(
    tmp_path: Path, version: int, architecture: str
) -> None:
    assert read_amd(amd_card(tmp_path, version=version)) == [
        {
            "index": 0,
            "slot": "0000:03:00.0",
            "name": "AMD GPU 7551",
            "driver": "6.14.14",
            "architecture": architecture,
            "memory_bytes": 32 * GIB,
            "used_bytes": 2 * GIB,
            "free_bytes": 30 * GIB,
            "busy_percent": 97,
            "watts": 287.0,
            "temperature_c": 88.0,
            "hot": False,
        }
    ]
    (card,) = read_cards(tmp_path, list)
    assert card == Card("rocm", 0, "AMD GPU 7551", 32 * GIB, 30 * GIB, "6.14.14", architecture, "0000:03:00.0")
    (sensors,) = sample(None, tmp_path, root=tmp_path)["cards"]
    assert sensors == {
        "memory_bytes": 32 * GIB, "used_bytes": 2 * GIB, "temperature_c": 88.0, "watts": 287.0, "busy_percent": 97,
        "hot": False,
    }  # fmt: skip


def test_a_card_at_its_limit_is_hot(tmp_path: Path) -> None:
    assert read_amd(amd_card(tmp_path, 107_000))[0]["hot"]
