"""The right findings on machines that are not at hand, and none invented; each with a command, evidence and sources."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from machines import GIB, IVY_BRIDGE, Fake, Gpu, seen

from hivetune.machine.doctor.findings import LEAVE_HIPBLASLT, WORST_FIRST, Demand, advised_variables, judge_machine
from hivetune.machine.doctor.report import facts_as_text, findings_as_text
from hivetune.machine.inventory import Card
from hivetune.run.choices import Choices
from hivetune.train.supervise.ladder import void_rungs

R9700 = Gpu(120001, "AMD Radeon AI PRO R9700", 32)
MI50 = Gpu(90006, "AMD Instinct MI50", 32, bus=7)
RX6800 = Gpu(100300, "AMD Radeon RX 6800")
RX6700 = Gpu(100301, "AMD Radeon RX 6700 XT", 12)
RX7900 = Gpu(110000, "AMD Radeon RX 7900 XTX", 24)
STRIX_HALO = Gpu(110501, "AMD Radeon 8060S", 96)
IN_THE_PROCESSOR = Gpu(100306, "AMD Radeon Graphics", 0, bus=0x11)
MI300X = Gpu(90402, "AMD Instinct MI300X", 192)
H200 = Card("cuda", 0, "NVIDIA H200", 141 * GIB, 140 * GIB, "580.95.05", "9.0")
V100 = Card("cuda", 0, "Tesla V100-SXM2-32GB", 32 * GIB, 31 * GIB, "580.95.05", "7.0")
P100 = Card("cuda", 0, "Tesla P100-PCIE-16GB", 16 * GIB, 15 * GIB, "550.54", "6.0")
T4 = Card("cuda", 0, "Tesla T4", 16 * GIB, 15 * GIB, "580.95.05", "7.5")
RTX5090 = Card("cuda", 0, "NVIDIA GeForce RTX 5090", 32 * GIB, 31 * GIB, "580.95.05", "12.0")
SLOT = "sys/devices/0000:03:00.0"
ON_NETWORK = "30 22 0:26 / {home} rw,relatime - nfs4 server:/homes rw\n"
IN_MEMORY = "30 22 0:26 / {home} rw,nosuid - tmpfs tmpfs rw,size=1g\n"
VOLATILE = "30 22 0:26 / {home} rw,relatime - overlay overlay rw,lowerdir=/l,upperdir=/u,volatile\n"


@dataclass(frozen=True)
class Case:
    """`found`: the ids of all findings, the fatal ones in `fatal`. `unknown`: how many questions stay open."""

    name: str
    fake: Fake
    found: frozenset[str] = frozenset()
    fatal: frozenset[str] = frozenset()
    demand: Demand = Demand()  # noqa: RUF009 (frozen)
    unknown: int = 0


def ids(*names: str) -> frozenset[str]:
    return frozenset(names)


BF16 = Demand(dtype="bfloat16")
ALL_GFX = ("gfx1030", "gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201", "gfx942")
# Of every R9700 with ROCm 7.2 or newer.
GFX12 = ("gfx120x-over-read", "gfx120x-large-strides")
R9700_7_2 = ids("gfx120x-wrong-float32", *GFX12)
CASES = [
    Case(
        "R9700 whose ROCm packages are of 7.12 and whose torch is of 7.11",
        Fake(
            gpus=[R9700],
            torch="2.9.1+rocm7.11.0",
            packages={"rocm": "7.12.0", "rocm-sdk-core": "7.12.0", "rocm-sdk-libraries-gfx120X-all": "7.12.0"},
        ),
        ids("two-rocm-versions", *GFX12),
    ),
    Case(
        "R9700 with an override that says what it is",
        Fake(gpus=[R9700], torch="2.13.0+rocm7.2", environment={"HSA_OVERRIDE_GFX_VERSION": "12.0.1"}),
        ids("gfx120x-wrong-float32", "override-redundant", *GFX12),
    ),
    Case(
        "MI50 with torch 2.5.1 for ROCm 6.2 and the override of another card",
        Fake(gpus=[MI50], torch="2.5.1+rocm6.2", environment={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}),
        ids("old-torch", "gfx906-torch-2.5.1", "hipblaslt-by-default", "override-contradicts"),
        ids("old-torch"),
    ),
    Case(
        "MI50 with a current torch",
        Fake(gpus=[MI50], torch="2.13.0+rocm7.2", kernels=ALL_GFX),
        ids("gfx906-rocm-6.4", "no-kernels-in-this-torch"),
        ids("gfx906-rocm-6.4", "no-kernels-in-this-torch"),
    ),
    Case("MI50 as it works", Fake(gpus=[MI50], torch="2.7.0+rocm6.3", kernels=(*ALL_GFX, "gfx906"))),
    Case("RX 6800", Fake(gpus=[RX6800], torch="2.7.1+rocm6.3", kernels=ALL_GFX)),
    Case(
        "RX 6800 with bfloat16",
        Fake(gpus=[RX6800], torch="2.7.1+rocm6.3", kernels=ALL_GFX),
        ids("bf16-without-units"),
        demand=BF16,
    ),
    Case(
        "RX 6700 XT without the override that it needs",
        Fake(gpus=[RX6700], torch="2.7.1+rocm6.3", kernels=ALL_GFX),
        ids("needs-an-override"),
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
        ids("gfx110x-kernel-6.18"),
    ),
    Case(
        "7900 XTX that a model server fills",
        Fake(gpus=[replace(RX7900, used_bytes=22 << 30)], torch="2.9.1+rocm6.4"),
        ids("card-held"),
    ),
    Case("7900 XTX beside graphics in the processor", Fake(gpus=[IN_THE_PROCESSOR, RX7900], torch="2.9.1+rocm6.4")),
    Case("Strix Halo", Fake(gpus=[STRIX_HALO], torch="2.11.0+rocm7.2"), ids("unified-memory")),
    Case(
        "Strix Halo with a torch from before it",
        Fake(gpus=[STRIX_HALO], torch="2.9.1+rocm6.4"),
        ids("gfx115x-before-7", "unified-memory"),
        ids("gfx115x-before-7"),
    ),
    Case(
        "two different cards, of which torch can use one",
        Fake(gpus=[RX7900, MI50], torch="2.9.1+rocm6.4"),
        ids("gfx906-rocm-6.4"),
    ),
    Case(
        "cards of two makers",
        Fake(gpus=[RX7900], nvidia=[H200], torch="2.13.0", cuda="12.8"),
        ids("two-cards-of-two-makers"),
    ),
    Case("EPYC without a card", Fake()),
    Case("old Xeon without AVX-512", Fake(flags=IVY_BRIDGE, cpu="Intel(R) Xeon(R) CPU E5-2670 v2")),
    Case(
        "old Xeon that is asked for bfloat16",
        Fake(flags=IVY_BRIDGE, cpu="Intel(R) Xeon(R) CPU E5-2670 v2"),
        ids("bf16-on-an-old-processor"),
        demand=BF16,
    ),
    Case(
        "container without the kernel's log, Redis, systemd or llama.cpp",
        Fake(files={".dockerenv": ""}, without=("dev/kmsg", "run/systemd/system/marker")),
    ),
    Case(
        "container that was not given the card",
        Fake(gpus=[RX7900], torch="2.9.1+rocm6.4", files={".dockerenv": ""}, without=("dev/kfd", "dev/kmsg")),
        ids("no-kfd-in-container"),
    ),
    Case(
        "a user without the right to the card",
        Fake(gpus=[RX7900], torch="2.9.1+rocm6.4", closed=("dev/kfd",)),
        ids("no-access"),
    ),
    Case("H200", Fake(nvidia=[H200], torch="2.13.0", cuda="12.8")),
    Case(
        "no GPU but a CUDA build",
        Fake(torch="2.13.0", cuda="13.0"),
        ids("gpu-build-without-a-card"),
    ),
    Case(
        "AMD card with a CUDA build",
        Fake(gpus=[RX7900], torch="2.13.0", cuda="12.8"),
        ids("cuda-build-on-amd"),
    ),
    Case("everything fine", Fake(gpus=[MI300X], torch="2.12.0+rocm7.2", kernels=ALL_GFX)),
    Case(
        "V100 with a torch for CUDA 13",
        Fake(nvidia=[V100], torch="2.13.0", cuda="13.0"),
        ids("cuda-13-old-card"),
        ids("cuda-13-old-card"),
    ),
    Case(
        "P100 with an old driver and the right torch",
        Fake(nvidia=[replace(P100, driver="515.65")], torch="2.9.0+cu126", cuda="12.6"),
        ids("cuda-12-driver"),
        ids("cuda-12-driver"),
    ),
    Case(
        "RTX 5090 with a torch from before it",
        Fake(nvidia=[RTX5090], torch="2.7.0+cu126", cuda="12.6"),
        ids("blackwell-before-12.8"),
        ids("blackwell-before-12.8"),
    ),
    Case(
        "no torch and a Python that it has no wheels for",
        Fake(gpus=[MI50], torch="", python="3.14.1"),
        ids("no-torch", "python-without-wheels"),
        ids("no-torch", "python-without-wheels"),
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
                "PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:512",
            },
        ),
        ids(
            *("set-GPU_MAX_HW_QUEUES", "set-HSA_FORCE_FINE_GRAIN_PCIE", "set-AMD_SERIALIZE_KERNEL"),
            *("expandable-segments-on-rocm", "two-allocator-settings"),
        ),
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
    Case(
        "packages with known holes",
        Fake(packages={"transformers": "5.2.0", "jinja2": "3.1.4", "redis": "4.5.1"}),
        ids("transformers-cve", "jinja2-cve", "redis-cve"),
    ),
    Case(
        "T4 that is asked for bfloat16",
        Fake(nvidia=[T4], torch="2.13.0", cuda="12.8"),
        ids("bf16-before-ampere"),
        demand=BF16,
    ),
    Case(
        "V100 with a torch for CUDA 12.8 that no longer has it",
        Fake(nvidia=[V100], torch="2.11.0+cu128", cuda="12.8"),
        ids("cuda-12.8-volta"),
        ids("cuda-12.8-volta"),
    ),
    Case("V100 with the one before", Fake(nvidia=[V100], torch="2.10.0+cu128", cuda="12.8"), unknown=1),
    Case(
        "P100 with a torch for CUDA 12.8",
        Fake(nvidia=[P100], torch="2.9.0+cu128", cuda="12.8"),
        ids("cuda-12.8-old-card"),
        ids("cuda-12.8-old-card"),
    ),
    Case(
        "H200 with a torch that is newer than its driver",
        Fake(nvidia=[replace(H200, driver="570.86")], torch="2.13.0", cuda="13.0"),
        ids("cuda-13-driver"),
        ids("cuda-13-driver"),
    ),
    Case("H200 with a ROCm build", Fake(nvidia=[H200], torch="2.13.0+rocm7.2"), ids("rocm-build-on-nvidia")),
    Case("H200 with the build for processors", Fake(nvidia=[H200]), ids("cpu-build-with-a-card")),
    Case("RX 6800 with ROCm 7", Fake(gpus=[RX6800], torch="2.13.0+rocm7.2"), ids("gfx1030-rocm-7")),
    Case("RX 6800 with ROCm 6.4", Fake(gpus=[RX6800], torch="2.9.1+rocm6.4"), ids("gfx1030-nan-copies")),
    Case("7900 XTX with torch 2.11", Fake(gpus=[RX7900], torch="2.11.0+rocm7.2"), ids("gfx110x-torch-2.11")),
    Case(
        "R9700 with ROCm 6.3",
        Fake(gpus=[R9700], torch="2.7.1+rocm6.3"),
        ids("gfx120x-before-6.4"),
        ids("gfx120x-before-6.4"),
    ),
    Case(
        "R9700 with the firmware of a bad day",
        Fake(gpus=[R9700], torch="2.14.0+rocm7.3", files={"var/lib/pacman/local/linux-firmware-20251125-2/desc": ""}),
        ids("gfx120x-firmware", *GFX12),
    ),
    Case(
        "R9700 with ROCm 7.0, whose loads are within bounds",
        Fake(gpus=[R9700], torch="2.10.0+rocm7.0"),
        ids("gfx120x-large-strides"),
    ),
    Case("R9700 with ROCm 7.14", Fake(gpus=[R9700], torch="2.13.0+rocm7.14.0"), ids(*GFX12)),
    Case(
        "MI50 and R9700: no build has kernels for both",
        Fake(gpus=[MI50, R9700], torch="2.13.0+rocm7.2"),
        R9700_7_2 | ids("two-generations", "gfx906-rocm-6.4"),
    ),
    Case("two cards of one generation", Fake(gpus=[MI300X, replace(MI300X, bus=9)], torch="2.12.0+rocm7.2")),
    Case(
        "an old and a new NVIDIA card, which one build serves",
        Fake(nvidia=[V100, T4], torch="2.10.0", cuda="12.6"),
        unknown=1,
    ),
    Case(
        "an override that is no version",
        Fake(gpus=[MI300X], torch="2.12.0+rocm7.2", environment={"HSA_OVERRIDE_GFX_VERSION": "gfx1030"}),
        ids("override-malformed"),
    ),
    Case(
        "one card, and a variable that names the sixth",
        Fake(gpus=[MI300X], torch="2.12.0+rocm7.2", environment={"HIP_VISIBLE_DEVICES": "5"}),
        ids("card-not-there"),
    ),
    Case(
        "memory whose errors were corrected, and a number of threads in words",
        Fake(files={"sys/devices/system/edac/mc/mc0/ce_count": "12\n"}, environment={"OMP_NUM_THREADS": "zwei"}),
        ids("memory-corrected", "threads-malformed"),
    ),
    Case(
        "memory whose errors were not corrected, and a limit of addresses",
        Fake(
            files={
                "sys/devices/system/edac/mc/mc1/ue_count": "1\n",
                "proc/self/limits": "Limit  Soft  Hard  Units\nMax address space  858993459  unlimited  bytes\n",
            },
            environment={"OMP_NUM_THREADS": "4,2"},
        ),
        ids("memory-uncorrected", "address-limit"),
    ),
    Case(
        "a card in a narrow slot, hot, with errors, and a compiler's variable",
        Fake(
            gpus=[MI300X],
            torch="2.12.0+rocm7.2",
            environment={"AMDGCN_USE_BUFFER_OPS": "1"},
            files={
                f"{SLOT}/current_link_width": "1\n",
                f"{SLOT}/hwmon/hwmon3/temp2_input": "108000\n",
                f"{SLOT}/hwmon/hwmon3/temp2_crit": "110000\n",
                f"{SLOT}/ras/umc_err_count": "ue: 1\nce: 7\n",
            },
        ),
        ids("narrow-slot", "card-hot", "card-memory-uncorrected", "compile-knobs"),
    ),
    Case(
        "a card whose errors were corrected",
        Fake(gpus=[MI300X], torch="2.12.0+rocm7.2", files={f"{SLOT}/ras/gfx_err_count": "ue: 0\nce: 7\n"}),
        ids("card-memory-corrected"),
    ),
    Case("R9700 with ROCm 10.0", Fake(gpus=[R9700], torch="2.14.0+rocm10.0.0"), ids("gfx120x-rocm-10", *GFX12)),
    Case(
        "R9700 with ROCm 7.1",
        Fake(gpus=[R9700], torch="2.10.0+rocm7.1"),
        ids("gfx120x-rocm-7.1", "gfx120x-large-strides"),
    ),
    Case(
        "Strix Halo with ROCm 7.1",
        Fake(gpus=[STRIX_HALO], torch="2.10.0+rocm7.1"),
        ids("gfx1151-rocm-7.1", "unified-memory"),
    ),
    Case(
        "7900 XTX without the compute driver",
        Fake(gpus=[RX7900], torch="2.9.1+rocm6.4", without=("dev/kfd",)),
        ids("no-kfd"),
    ),
    Case(
        "MI300X that is to train in four bits, with an old bitsandbytes and TunableOp",
        Fake(
            gpus=[MI300X],
            torch="2.12.0+rocm7.2",
            packages={"bitsandbytes": "0.48.2"},
            environment={"PYTORCH_TUNABLEOP_ENABLED": "1"},
        ),
        ids("bitsandbytes-wave64", "tunableop"),
        demand=Demand(method="qlora"),
    ),
    Case(
        "7900 XTX that is to train in four bits",
        Fake(gpus=[RX7900], torch="2.9.1+rocm6.4", packages={"bitsandbytes": "0.50.2"}),
        ids("bitsandbytes-gfx1100"),
        demand=Demand(method="qlora"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_right_findings_and_none_invented(case: Case, tmp_path: Path) -> None:
    judgement = judge_machine(seen(case.fake, tmp_path), case.demand)
    assert {finding.id for finding in judgement.findings} == case.found
    assert {finding.id for finding in judgement.findings if finding.severity == "fatal"} == case.fatal
    assert judgement.fit == (not case.fatal)
    assert len(judgement.not_known) == case.unknown
    levels = [WORST_FIRST.index(finding.severity) for finding in judgement.findings]
    assert levels == sorted(levels)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_finding_says_what_was_seen_what_to_do_and_who_says_so(case: Case, tmp_path: Path) -> None:
    one = seen(case.fake, tmp_path)
    judgement = judge_machine(one, case.demand)
    for finding in judgement.findings:
        assert finding.source and finding.confidence and finding.says
        assert finding.mend or finding.id == "two-cards-of-two-makers"
        assert "\n" not in finding.mend
    text = facts_as_text(one) + findings_as_text(judgement)
    assert all(finding.title in text and finding.mend in text for finding in judgement.findings)


@pytest.mark.parametrize(
    ("mount", "name"), [(IN_MEMORY, "home-in-memory"), (VOLATILE, "no-fsync"), (ON_NETWORK, "home-on-network")]
)
def test_a_home_where_rows_are_not_safe_is_told(mount: str, name: str, tmp_path: Path) -> None:
    root = "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
    fake = Fake(files={"proc/self/mountinfo": root + mount.format(home=tmp_path)})
    (finding,) = judge_machine(seen(fake, tmp_path)).findings
    assert finding.id == name


def test_no_swap_is_taken_away_that_memory_can_not_hold(tmp_path: Path) -> None:
    fake = Fake(memory_gib=16, available_gib=1, swap_used_gib=7)
    (finding,) = judge_machine(seen(fake, tmp_path)).findings
    assert finding.id == "swapping" and "swapoff" not in finding.mend


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


@pytest.mark.parametrize(
    ("files", "date"),
    [
        (
            {"var/lib/dpkg/status": "Package: x\nVersion: 5\n\nPackage: linux-firmware\nVersion: 20240318.git3b1\n"},
            "20240318",
        ),
        ({"var/lib/dpkg/status": "Package: firmware-amd-graphics\nVersion: 20230625-2\n"}, "20230625"),
        ({"var/lib/pacman/local/linux-firmware-amdgpu-20251021-1/desc": ""}, "20251021"),
        ({"var/lib/dpkg/status": "Package: linux-firmware\nStatus: broken"}, ""),
    ],
)
def test_the_date_of_the_firmware(files: dict[str, str], date: str, tmp_path: Path) -> None:
    assert seen(Fake(files=files), tmp_path).host.firmware_package == date


def test_a_disk_without_room_is_told(tmp_path: Path) -> None:
    one = seen(Fake(), tmp_path)
    full = replace(one, host=replace(one.host, disk=replace(one.host.disk, free_bytes=GIB)))
    assert [finding.id for finding in judge_machine(full).findings] == ["little-room"]


def test_fsync_that_a_preloaded_library_takes_away_is_told(tmp_path: Path) -> None:
    fake = Fake(environment={"LD_PRELOAD": "libeatmydata.so"})
    assert [finding.id for finding in judge_machine(seen(fake, tmp_path)).findings] == ["no-fsync"]


def test_the_card_is_what_the_kernel_says_whatever_the_override_says(tmp_path: Path) -> None:
    fake = Fake(gpus=[MI50], torch="2.7.0+rocm6.3", environment={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"})
    (card,) = seen(fake, tmp_path).cards
    assert card.card.architecture == "gfx906" and card.firmware == {"mec": "0x00000a1f"} and card.access == "ok"


def test_with_one_broken_card_of_two_the_run_is_kept_from_it(tmp_path: Path) -> None:
    judgement = judge_machine(seen(Fake(gpus=[MI50, RX7900], torch="2.9.1+rocm6.4"), tmp_path))
    (finding,) = judgement.findings
    assert judgement.fit and finding.severity == "risk"
    assert finding.mend == "export HIP_VISIBLE_DEVICES=1"
    (variable,) = advised_variables(seen(Fake(gpus=[MI50, RX7900], torch="2.9.1+rocm6.4"), tmp_path / "again"))
    assert (variable.name, variable.value) == ("HIP_VISIBLE_DEVICES", "1")
    two = [replace(P100, driver="580.1"), replace(H200, index=1)]
    judgement = judge_machine(seen(Fake(nvidia=two, torch="2.13.0", cuda="13.0"), tmp_path / "nvidia"))
    assert judgement.findings[0].mend == "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1"


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
        assert " uv pip install " in worst.mend and worst.mend.endswith(f" {options}")


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
