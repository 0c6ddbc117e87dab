"""The right findings on machines that are not at hand, and none invented; each with a command, evidence and sources."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from machines import GIB, IVY_BRIDGE, Fake, Gpu, seen

from hivetune.machine.doctor.findings import LEAVE_HIPBLASLT, WORST_FIRST, advised_variables, judge_machine
from hivetune.machine.doctor.report import facts_as_text, findings_as_text
from hivetune.machine.inventory import Card
from hivetune.run.choices import Choices
from hivetune.train.plan.device import device_of_machine
from hivetune.train.supervise.ladder import void_rungs

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
    found: frozenset[str] = frozenset()
    fatal: frozenset[str] = frozenset()
    dtype: str = "auto"


def ids(*names: str) -> frozenset[str]:
    return frozenset(names)


ALL_GFX = ("gfx1030", "gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201", "gfx942")
GFX12 = ids("gfx12-over-read")  # of every R9700 with ROCm 7.2 or newer
CASES = [
    Case(
        "R9700 whose ROCm packages are of 7.12 and whose torch is of 7.11",
        Fake(
            gpus=[R9700],
            torch="2.9.1+rocm7.11.0",
            packages={"rocm": "7.12.0", "rocm-sdk-core": "7.12.0", "rocm-sdk-libraries-gfx120X-all": "7.12.0"},
        ),
        GFX12 | ids("two-rocm-versions"),
    ),
    Case(
        "R9700 whose torch of 7.11 brings no ROCm, on a system's ROCm of 7.12",
        Fake(
            gpus=[R9700],
            torch="2.9.1+rocm7.11.0",
            brings_rocm=False,
            files={"opt/rocm/.info/version": "7.12.0-43\n", "opt/rocm-7.12.0/.info/version": "7.12.0-43\n"},
        ),
        GFX12 | ids("two-rocm-versions"),
    ),
    Case(
        "R9700 whose torch of 7.11 brings no ROCm, on a system's ROCm of 7.11",
        Fake(
            gpus=[R9700],
            torch="2.9.1+rocm7.11.0",
            brings_rocm=False,
            files={"opt/rocm/.info/version": "7.11.2-43\n"},
        ),
        GFX12,
    ),
    Case(
        "R9700 behind graphics in a Ryzen processor",
        Fake(gpus=[replace(RYZEN, memory_gib=4), R9700], torch="2.13.0+rocm7.2", kernels=ALL_GFX),
        GFX12,
    ),
    Case(
        "R9700 with an override that says what it is",
        Fake(gpus=[R9700], torch="2.13.0+rocm7.2", environment={"HSA_OVERRIDE_GFX_VERSION": "12.0.1"}),
        GFX12,
    ),
    Case(
        "R9700 that is asked for float32",
        Fake(gpus=[R9700], torch="2.13.0+rocm7.2"),
        GFX12 | ids("gfx12-wrong-float32"),
        dtype="float32",
    ),
    Case("R9700 with ROCm 7.0, whose loads are within bounds", Fake(gpus=[R9700], torch="2.10.0+rocm7.0")),
    Case("R9700 with ROCm 7.1", Fake(gpus=[R9700], torch="2.10.0+rocm7.1"), ids("known-bad-rocm")),
    Case("R9700 with ROCm 7.14", Fake(gpus=[R9700], torch="2.13.0+rocm7.14.0"), GFX12),
    Case("R9700 with ROCm 10.0", Fake(gpus=[R9700], torch="2.14.0+rocm10.0.0"), GFX12),
    Case("R9700 with ROCm 6.3", Fake(gpus=[R9700], torch="2.7.1+rocm6.3"), ids("no-kernels"), ids("no-kernels")),
    Case(
        "MI50 with torch 2.5.1 and the override of another card",
        Fake(gpus=[MI50], torch="2.5.1+rocm6.2", environment={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}),
        ids("no-torch", "wrong-override"),
        ids("no-torch"),
    ),
    Case(
        "MI50 with a current torch",
        Fake(gpus=[MI50], torch="2.13.0+rocm7.2", kernels=ALL_GFX),
        ids("no-kernels"),
        ids("no-kernels"),
    ),
    Case("MI50 as it works", Fake(gpus=[MI50], torch="2.7.0+rocm6.3", kernels=(*ALL_GFX, "gfx906"))),
    Case("RX 6800", Fake(gpus=[RX6800], torch="2.7.1+rocm6.3", kernels=ALL_GFX)),
    Case(
        "RX 6800 with bfloat16",
        Fake(gpus=[RX6800], torch="2.7.1+rocm6.3", kernels=ALL_GFX),
        ids("bf16-without-units"),
        dtype="bfloat16",
    ),
    Case("RX 6800 with ROCm 7", Fake(gpus=[RX6800], torch="2.13.0+rocm7.2"), ids("known-bad-rocm")),
    Case(
        "RX 6700 XT without the override that it needs",
        Fake(gpus=[RX6700], torch="2.7.1+rocm6.3", kernels=ALL_GFX),
    ),
    Case(
        "RX 6700 XT with it",
        Fake(
            gpus=[RX6700],
            torch="2.7.1+rocm6.3",
            kernels=ALL_GFX,
            environment={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"},
        ),
    ),
    Case(
        "7900 XTX on Linux 6.18",
        Fake(gpus=[RX7900], torch="2.9.1+rocm6.4", kernel="6.18.2-arch1-1"),
        ids("gfx110-kernel-6.18"),
    ),
    Case(
        "7900 XTX that a model server fills",
        Fake(gpus=[replace(RX7900, used_bytes=22 << 30)], torch="2.9.1+rocm6.4"),
        ids("card-held"),
    ),
    Case("7900 XTX beside graphics in the processor", Fake(gpus=[RYZEN, RX7900], torch="2.9.1+rocm6.4")),
    Case("Strix Halo", Fake(gpus=[STRIX_HALO], torch="2.11.0+rocm7.2"), ids("unified-memory")),
    Case(
        "Strix Halo with a torch from before it",
        Fake(gpus=[STRIX_HALO], torch="2.9.1+rocm6.4"),
        ids("no-kernels", "unified-memory"),
        ids("no-kernels"),
    ),
    Case(
        "Strix Halo with ROCm 7.1",
        Fake(gpus=[STRIX_HALO], torch="2.10.0+rocm7.1"),
        ids("known-bad-rocm", "unified-memory"),
    ),
    Case(
        "two different cards, of which torch can use one",
        Fake(gpus=[RX7900, MI50], torch="2.9.1+rocm6.4"),
        ids("no-kernels"),
    ),
    Case("cards of two makers", Fake(gpus=[RX7900], nvidia=[H200], torch="2.13.0", cuda="12.8")),
    Case("EPYC without a card", Fake()),
    Case("old Xeon without AVX-512", Fake(flags=IVY_BRIDGE, cpu="Intel(R) Xeon(R) CPU E5-2670 v2")),
    Case(
        "old Xeon that is asked for bfloat16",
        Fake(flags=IVY_BRIDGE, cpu="Intel(R) Xeon(R) CPU E5-2670 v2"),
        ids("bf16-without-units"),
        dtype="bfloat16",
    ),
    Case(
        "container without systemd or llama.cpp",
        Fake(files={".dockerenv": ""}, without=("dev/kmsg", "run/systemd/system/marker")),
    ),
    Case(
        "container that was not given the card",
        Fake(gpus=[RX7900], torch="2.9.1+rocm6.4", files={".dockerenv": ""}, without=("dev/kfd", "dev/kmsg")),
        ids("no-kfd-in-container"),
    ),
    Case(
        "7900 XTX without the compute driver",
        Fake(gpus=[RX7900], torch="2.9.1+rocm6.4", without=("dev/kfd",)),
        ids("no-kfd"),
    ),
    Case(
        "a user without the right to the card",
        Fake(gpus=[RX7900], torch="2.9.1+rocm6.4", closed=("dev/kfd",)),
        ids("no-access"),
    ),
    Case("H200", Fake(nvidia=[H200], torch="2.13.0", cuda="12.8")),
    Case("no GPU but a CUDA build", Fake(torch="2.13.0", cuda="13.0")),
    Case("AMD card with a CUDA build", Fake(gpus=[RX7900], torch="2.13.0", cuda="12.8"), ids("wrong-build")),
    Case("H200 with a ROCm build", Fake(nvidia=[H200], torch="2.13.0+rocm7.2"), ids("wrong-build")),
    Case("H200 with the build for processors", Fake(nvidia=[H200]), ids("wrong-build")),
    Case("everything fine", Fake(gpus=[MI300X], torch="2.12.0+rocm7.2", kernels=ALL_GFX)),
    Case(
        "V100 with a torch for CUDA 13",
        Fake(nvidia=[V100], torch="2.13.0", cuda="13.0"),
        ids("no-kernels"),
        ids("no-kernels"),
    ),
    Case(
        "V100 with a torch for CUDA 12.8 that no longer has it",
        Fake(nvidia=[V100], torch="2.11.0+cu128", cuda="12.8"),
        ids("no-kernels"),
        ids("no-kernels"),
    ),
    Case("V100 with the one before", Fake(nvidia=[V100], torch="2.10.0+cu128", cuda="12.8")),
    Case(
        "P100 with an old driver and the right torch",
        Fake(nvidia=[replace(P100, driver="515.65")], torch="2.9.0+cu126", cuda="12.6"),
        ids("old-driver"),
        ids("old-driver"),
    ),
    Case(
        "P100 with a torch for CUDA 12.8",
        Fake(nvidia=[P100], torch="2.9.0+cu128", cuda="12.8"),
        ids("no-kernels"),
        ids("no-kernels"),
    ),
    Case(
        "RTX 5090 with a torch from before it",
        Fake(nvidia=[RTX5090], torch="2.7.0+cu126", cuda="12.6"),
        ids("no-kernels"),
        ids("no-kernels"),
    ),
    Case(
        "H200 with a torch that is newer than its driver",
        Fake(nvidia=[replace(H200, driver="570.86")], torch="2.13.0", cuda="13.0"),
        ids("old-driver"),
        ids("old-driver"),
    ),
    Case(
        "T4 that is asked for bfloat16",
        Fake(nvidia=[T4], torch="2.13.0", cuda="12.8"),
        ids("bf16-without-units"),
        dtype="bfloat16",
    ),
    Case("no torch", Fake(gpus=[MI50], torch=""), ids("no-torch"), ids("no-torch")),
    Case(
        "no torch and a Python that it has no wheels for",
        Fake(gpus=[MI50], torch="", python="3.14.1"),
        ids("python-without-wheels"),
        ids("python-without-wheels"),
    ),
    Case(
        "folklore in the environment",
        Fake(
            gpus=[MI300X],
            torch="2.12.0+rocm7.2",
            environment={
                "GPU_MAX_HW_QUEUES": "4",
                "HSA_FORCE_FINE_GRAIN_PCIE": "1",
                "AMD_SERIALIZE_KERNEL": "3",
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "PYTORCH_TUNABLEOP_ENABLED": "1",
            },
        ),
        ids("no-effect", "slow-variables", "expandable-segments", "slow-variables"),
    ),
    Case(
        "the same folklore where there is no card to harm",
        Fake(environment={"GPU_MAX_HW_QUEUES": "4", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ),
    Case(
        "every card hidden",
        Fake(nvidia=[H200], torch="2.13.0", cuda="12.8", environment={"CUDA_VISIBLE_DEVICES": ""}),
        ids("card-hidden"),
    ),
    Case(
        "one card, and a variable that names the sixth",
        Fake(gpus=[MI300X], torch="2.12.0+rocm7.2", environment={"HIP_VISIBLE_DEVICES": "5"}),
        ids("card-hidden"),
    ),
    Case(
        "another ROCm first on the loader's path",
        Fake(
            gpus=[MI300X],
            torch="2.12.0+rocm7.2",
            files={"opt/rocm-6.4.1/.info/version": "6.4.1-83\n", "opt/rocm-7.2.0/.info/version": "7.2.0-43\n"},
            environment={"LD_LIBRARY_PATH": "/usr/lib:/opt/rocm-6.4.1/lib:/opt/rocm-7.2.0/lib"},
        ),
        ids("foreign-rocm-first"),
    ),
    Case(
        "two ROCm versions on the disk, which nothing mixes",
        Fake(
            gpus=[MI300X],
            torch="2.12.0+rocm7.2",
            files={"opt/rocm-6.4.1/.info/version": "6.4.1-83\n", "opt/rocm-7.2.0/.info/version": "7.2.0-43\n"},
        ),
    ),
    Case("short of memory and swapping", Fake(available_gib=2, swap_used_gib=6), ids("swapping")),
    Case("swap that is used without need", Fake(available_gib=50, swap_used_gib=6)),
    Case("two cards of one generation", Fake(gpus=[MI300X, replace(MI300X, bus=9)], torch="2.12.0+rocm7.2")),
    Case("an old and a new NVIDIA card, which one build serves", Fake(nvidia=[V100, T4], torch="2.10.0", cuda="12.6")),
    Case(
        "an override that is no version",
        Fake(gpus=[MI300X], torch="2.12.0+rocm7.2", environment={"HSA_OVERRIDE_GFX_VERSION": "gfx1030"}),
        ids("wrong-override"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_right_findings_and_none_invented(case: Case, tmp_path: Path) -> None:
    judgement = judge_machine(seen(case.fake, tmp_path), case.dtype)
    assert {finding.id for finding in judgement.findings} == case.found
    assert {finding.id for finding in judgement.findings if finding.severity == "fatal"} == case.fatal
    assert judgement.fit == (not case.fatal)
    levels = [WORST_FIRST.index(finding.severity) for finding in judgement.findings]
    assert levels == sorted(levels)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_finding_says_what_was_seen_what_to_do_and_who_says_so(case: Case, tmp_path: Path) -> None:
    one = seen(case.fake, tmp_path)
    judgement = judge_machine(one, case.dtype)
    for finding in judgement.findings:
        assert finding.source and finding.explanation
        assert finding.fix and "\n" not in finding.fix
    text = facts_as_text(one) + findings_as_text(judgement)
    assert all(finding.title in text and finding.fix in text for finding in judgement.findings)


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
    full = replace(one, host=replace(one.host, free_bytes=GIB))
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


def test_what_is_advised_on_gfx12_leaves_nothing_for_the_first_rung(tmp_path: Path) -> None:
    one = seen(Fake(gpus=[R9700], torch="2.13.0+rocm7.2"), tmp_path)
    advised = {variable.name: variable.value or "" for variable in advised_variables(one)}
    assert "blas" in void_rungs(advised, Choices())
