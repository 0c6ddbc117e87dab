"""NVIDIA's cards as `nvidia-smi` prints them, of a program that stands in for it."""

from pathlib import Path

import pytest

from hivetune.machine.nvidia import read_nvidia

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
    assert spark["memory_bytes"] == 0 and spark["hot"]


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
