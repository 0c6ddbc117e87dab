"""The right findings on machines that are not at hand, and none invented; each with a command, evidence and sources."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from machines import GIB, IVY_BRIDGE, Fake, Gpu, seen

from hivetune.machine.findings import (
    LEAVE_HIPBLASLT,
    WORST_FIRST,
    advised_variables,
    judge_machine,
    llama_build_problem,
)
from hivetune.machine.inventory import Card
from hivetune.train.plan.device import device_of_machine

R9700 = Gpu(120001, "AMD Radeon AI PRO R9700", 32)
MI50 = Gpu(90006, "AMD Instinct MI50", 32, bus=7)
RX6800 = Gpu(100300, "AMD Radeon RX 6800")
RX6700 = Gpu(100301, "AMD Radeon RX 6700 XT", 12)
RX7900 = Gpu(110000, "AMD Radeon RX 7900 XTX", 24)
STRIX_HALO = Gpu(110501, "AMD Radeon 8060S", 96)
RYZEN = Gpu(100306, "AMD Radeon Graphics", 0, bus=0x11)
MI300X = Gpu(90402, "AMD Instinct MI300X", 192)
H200 = Card("cuda", 0, "NVIDIA H200", 141 * GIB, 140 * GIB, "580.95.05", "9.0")
V100 = Card("cuda", 0, "Tesla V100-SXM2-32GB", 32 * GIB, 31 * GIB, "580.95.05", "7.0")
P100 = Card("cuda", 0, "Tesla P100-PCIE-16GB", 16 * GIB, 15 * GIB, "550.54", "6.0")
T4 = Card("cuda", 0, "Tesla T4", 16 * GIB, 15 * GIB, "580.95.05", "7.5")
RTX5090 = Card("cuda", 0, "NVIDIA GeForce RTX 5090", 32 * GIB, 31 * GIB, "580.95.05", "12.0")
SLOT = "sys/devices/0000:03:00.0"
ON_NETWORK = "30 22 0:26 / {home} rw,relatime - nfs4 server:/homes rw\n"
IN_MEMORY = "30 22 0:26 / {home} rw,nosuid - tmpfs tmpfs rw,size=1g\n"


@dataclass(frozen=True)
class Case:
    """`found`: the ids of all findings, the fatal ones in `fatal`."""

    name: str
    fake: Fake
    found: frozenset[str]
    fatal: frozenset[str]
    dtype: str


ALL_GFX = ("gfx1030", "gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201", "gfx942")


def read_case(entry: dict[str, Any]) -> Case:
    def device(said: str | dict[str, Any]) -> Any:
        return globals()[said] if isinstance(said, str) else replace(globals()[said.pop("is")], **said)

    name, dtype = entry.pop("name"), entry.pop("dtype", "auto")
    found, fatal = (frozenset(entry.pop(key, ())) for key in ("found", "fatal"))
    entry |= {key: [device(said) for said in entry[key]] for key in ("gpus", "nvidia") if key in entry}
    entry |= {"kernels": ALL_GFX} if entry.get("kernels") == "all" else {}
    entry |= {"flags": IVY_BRIDGE} if "flags" in entry else {}
    return Case(name, Fake(**entry), found, fatal, dtype)


CASES = [read_case(entry) for entry in yaml.safe_load(Path(__file__).with_name("machines.yaml").read_text())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_right_findings_and_none_invented_each_with_its_source_and_command(case: Case, tmp_path: Path) -> None:
    one = seen(case.fake, tmp_path)
    judgement = judge_machine(one, case.dtype)
    assert {finding.id for finding in judgement.findings} == case.found
    assert {finding.id for finding in judgement.findings if finding.severity == "fatal"} == case.fatal
    assert judgement.fit == (not case.fatal)
    levels = [WORST_FIRST.index(finding.severity) for finding in judgement.findings]
    assert levels == sorted(levels)
    for finding in judgement.findings:
        assert finding.source and finding.explanation and finding.fix and "\n" not in finding.fix


@pytest.mark.parametrize("mount", [IN_MEMORY, ON_NETWORK])
def test_a_home_where_rows_are_not_safe_is_told(mount: str, tmp_path: Path) -> None:
    root = "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
    fake = Fake(files={"proc/self/mountinfo": root + mount.format(home=tmp_path)})
    (finding,) = judge_machine(seen(fake, tmp_path)).findings
    assert finding.id == "home-not-on-disk"


def test_graphics_in_the_processor_are_no_card_beside_one(tmp_path: Path) -> None:
    """Listed first, they were the card of plan, probe and worker."""
    one = seen(Fake(gpus=[replace(RYZEN, memory_gib=4), R9700], torch="2.13.0+rocm7.2"), tmp_path)
    (card,) = one.machine.cards
    assert (card.name, card.index, len(one.cards)) == (R9700.name, 1, 2)
    variables = {variable.name: variable.value for variable in advised_variables(one)}
    assert variables["HIP_VISIBLE_DEVICES"] == "1"
    assert device_of_machine(one.machine).name == R9700.name
    alone = seen(Fake(gpus=[STRIX_HALO], torch="2.11.0+rocm7.2"), tmp_path / "alone")
    assert [card.name for card in alone.machine.cards] == [STRIX_HALO.name]


def test_no_swap_is_taken_away_that_memory_can_not_hold(tmp_path: Path) -> None:
    fake = Fake(memory_gib=16, available_gib=1, swap_used_gib=7)
    (finding,) = judge_machine(seen(fake, tmp_path)).findings
    assert finding.id == "swapping" and "swapoff" not in finding.fix


def test_unified_memory_is_what_the_kernel_lets_the_chip_take(tmp_path: Path) -> None:
    """Of 128 GB the firmware sets 0.5 GB aside; the rest is the kernel's to give."""
    table = {f"{SLOT}/mem_info_gtt_total": f"{120 * GIB}\n"}
    limit = {"sys/module/ttm/parameters/pages_limit": f"{62 * GIB // 4096}\n"}
    halo = replace(STRIX_HALO, memory_gib=1)
    for number, (files, gib) in enumerate([(table | limit, 62), (table, 120), ({}, 1)]):
        fake = Fake(gpus=[halo], torch="2.11.0+rocm7.2", memory_gib=124, available_gib=50, files=files)
        (card,) = seen(fake, tmp_path / str(number)).cards
        assert card.card.memory_bytes == gib * GIB
        assert card.card.free_bytes <= min(gib, 50) * GIB
    discrete = Fake(gpus=[replace(MI300X, memory_gib=16)], torch="2.12.0+rocm7.2", files=table)
    (card,) = seen(discrete, tmp_path / "discrete").cards
    assert card.card.memory_bytes == 16 * GIB


def test_a_disk_without_room_is_told(tmp_path: Path) -> None:
    one = seen(Fake(), tmp_path)
    full = replace(one, observed={**one.observed, "free_gb": "1"})
    assert [finding.id for finding in judge_machine(full).findings] == ["little-room"]


def test_the_card_is_what_the_kernel_says_whatever_the_override_says(tmp_path: Path) -> None:
    fake = Fake(gpus=[MI50], torch="2.7.0+rocm6.3", environment={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"})
    (card,) = seen(fake, tmp_path).cards
    assert card.card.architecture == "gfx906" and card.access == "ok"


def test_with_one_broken_card_of_two_the_run_is_kept_from_it(tmp_path: Path) -> None:
    judgement = judge_machine(seen(Fake(gpus=[MI50, RX7900], torch="2.9.1+rocm6.4"), tmp_path))
    (finding,) = judgement.findings
    assert judgement.fit and finding.severity == "risk"
    assert finding.fix == "export HIP_VISIBLE_DEVICES=1"
    (variable,) = advised_variables(seen(Fake(gpus=[MI50, RX7900], torch="2.9.1+rocm6.4"), tmp_path / "again"))
    assert (variable.name, variable.value) == ("HIP_VISIBLE_DEVICES", "1")
    two = [replace(P100, driver="580.1"), replace(H200, index=1)]
    judgement = judge_machine(seen(Fake(nvidia=two, torch="2.13.0", cuda="13.0"), tmp_path / "nvidia"))
    assert judgement.findings[0].fix == "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1"


def test_the_command_installs_the_torch_of_this_very_card(tmp_path: Path) -> None:
    wanted = {
        "rocm6.3": (Fake(gpus=[MI50], torch="2.13.0+rocm7.2", kernels=ALL_GFX), "torch==2.7.0"),
        "cu126": (Fake(nvidia=[V100], torch="2.13.0", cuda="13.0"), "torch>=2.7"),
        "rocm7.2": (Fake(gpus=[STRIX_HALO], torch="2.9.1+rocm6.4"), "torch>=2.11"),
        "cpu": (Fake(torch=""), "torch>=2.7"),
    }
    for number, (backend, (fake, requirement)) in enumerate(wanted.items()):
        worst = judge_machine(seen(fake, tmp_path / str(number))).findings[0]
        options = f"--torch-backend {backend} --reinstall-package torch '{requirement}'"
        assert " uv pip install " in worst.fix and worst.fix.endswith(f" {options}")


def test_variables_are_for_the_card_with_a_reason_each(tmp_path: Path) -> None:
    def advised(fake: Fake, name: str) -> dict[str, str | None]:
        return {one.name: one.value for one in advised_variables(seen(fake, tmp_path / name)) if one.why}

    assert advised(Fake(gpus=[R9700], torch="2.13.0+rocm7.2"), "r9700") == LEAVE_HIPBLASLT
    assert advised(Fake(gpus=[RX7900], torch="2.9.1+rocm6.4", kernel="6.18.2"), "7900") == {"HSA_ENABLE_SDMA": "0"}
    assert advised(Fake(gpus=[RX6700], torch="2.7.1+rocm6.3"), "6700") == {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}
    assert advised(Fake(nvidia=[H200], torch="2.13.0", cuda="12.8"), "h200") == {}
    wrong = {"HSA_OVERRIDE_GFX_VERSION": "10.3.0", "PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}
    assert advised(Fake(gpus=[MI50], torch="2.7.0+rocm6.3", environment=wrong), "mi50") == dict.fromkeys(wrong)
    two = Fake(gpus=[R9700, RX7900], torch="2.11.0+rocm7.2", kernel="6.12.1")
    assert advised(two, "two") == {}


def test_before_answers_are_computed_it_is_said_that_the_card_will_not(tmp_path: Path) -> None:
    """By `eval` and `plan`."""
    on_card, on_cpu = (
        Fake(nvidia=[H200], torch="2.13.0", cuda="12.8", packages={"xllamacpp": version})
        for version in ("2026.10.1+cu128", "2026.10.1")
    )
    assert llama_build_problem(seen(on_card, tmp_path / "card")) == ""
    assert "a processor's build" in llama_build_problem(seen(on_cpu, tmp_path / "cpu"))


@pytest.mark.parametrize(("build", "is_used"), [(99999, True), (8952, False)])
def test_a_llama_server_that_is_too_old_does_not_answer(build: int, is_used: bool, tmp_path: Path) -> None:
    """Nothing was said where the user's own program is passed over for xllamacpp's build for processors."""
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'version: {build} (0123abc)'\n")
    program.chmod(0o755)
    path = {"PATH": str(program.parent)}
    fake = Fake(nvidia=[H200], torch="2.13.0", cuda="12.8", packages={"xllamacpp": "2026.10.1"}, environment=path)
    assert (llama_build_problem(seen(fake, tmp_path / "root")) == "") is is_used
