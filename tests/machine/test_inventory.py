"""The machine as the kernel shows it: limits of cgroups, fingerprints, profiles, known cards."""

from pathlib import Path

import pytest
from machines import GIB, write_tree

from hivetune.base.kernel import usable_cores
from hivetune.errors import UsageError
from hivetune.machine.cards import known_card, similar_card
from hivetune.machine.inventory import Card, Machine, as_torch_sees, read_machine
from hivetune.machine.profile import Profile, profile_path, read_profile, write_profile

MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {60 * GIB // 1024} kB\n"
CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t\t: fpu sse avx fma avx2 avx512_bf16\n\nprocessor\t: 1\n"
CGROUPS, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory/memory"
JOB = {"proc/self/cgroup": "0::/user.slice/job\n"}
OLD_JOB = {"proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n"}


@pytest.mark.parametrize(
    ("files", "total_gib", "available_gib", "limit"),
    [
        ({}, 64, 60, "machine"),
        (  # the tightest cgroup of version 2 holds, and page cache is free
            JOB
            | {f"{CGROUPS}/user.slice/memory.max": str(32 * GIB)}
            | {f"{CGROUPS}/user.slice/job/memory.max": str(16 * GIB)}
            | {f"{CGROUPS}/user.slice/job/memory.current": str(6 * GIB)}
            | {f"{CGROUPS}/user.slice/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n"},
            *(16, 12, f"/{CGROUPS}/user.slice/job/memory.max"),
        ),
        (JOB | {f"{CGROUPS}/user.slice/memory.max": "max"}, 64, 60, "machine"),
        (
            OLD_JOB | {f"{OLD}.limit_in_bytes": str(4 * GIB), f"{OLD}.usage_in_bytes": str(GIB)},
            *(4, 3, f"/{OLD}.limit_in_bytes"),
        ),
        (OLD_JOB | {f"{OLD}.limit_in_bytes": "9223372036854771712"}, 64, 60, "machine"),
    ],
)
def test_memory_is_the_machines_or_what_the_cgroups_leave(
    files: dict[str, str], total_gib: int, available_gib: int, limit: str, tmp_path: Path
) -> None:
    root = write_tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO, **files})
    machine = read_machine(root, tmp_path)
    assert (machine.memory_bytes, machine.available_bytes) == (total_gib * GIB, available_gib * GIB)
    assert machine.memory_limit == limit
    assert machine.cpu == "AMD EPYC 7763" and machine.isa == ("avx", "avx2", "fma", "avx512_bf16")


SERVICE, QUOTA = "0::/user.slice/run.service\n", "100000 100000\n"
OLD_CPU = f"{CGROUPS}/cpu/x/cpu.cfs_"


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        (SERVICE, {f"{CGROUPS}/user.slice/run.service/cpu.max": QUOTA}, 1),
        (SERVICE, {f"{CGROUPS}/user.slice/cpu.max": QUOTA}, 1),
        ("0::/\n", {f"{CGROUPS}/cpu.max": "150000 100000"}, 1),
        ("0::/\n", {f"{CGROUPS}/cpu.max": "max 100000"}, 2),
        ("3:cpu,cpuacct:/x\n", {f"{OLD_CPU}quota_us": "100000\n", f"{OLD_CPU}period_us": "100000\n"}, 1),
        (SERVICE, {f"{CGROUPS}/other.slice/cpu.max": QUOTA}, 2),
    ],
)
def test_the_quota_of_every_cgroup_above_counts(
    cgroup: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd's CPUQuota is of the service's own cgroup, which was never read."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert usable_cores(write_tree(tmp_path, {"proc/self/cgroup": cgroup, **files})) == cores


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, {1: "R9700", 2: "MI50"}),
        ({"HIP_VISIBLE_DEVICES": "1"}, {0: "R9700"}),  # as a run is kept from graphics in the processor, number 0
        ({"HIP_VISIBLE_DEVICES": "2, 1"}, {0: "MI50", 1: "R9700"}),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, {1: "MI50"}),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,1"}, {0: "MI50"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5a3c"}, {1: "R9700", 2: "MI50"}),
        ({"HIP_VISIBLE_DEVICES": None}, {1: "R9700", 2: "MI50"}),
    ],
)
def test_torch_numbers_the_cards_that_it_sees(environment: dict[str, str | None], seen: dict[int, str]) -> None:
    """A run beside graphics in the processor ended with "device cuda is not available"."""
    cards = tuple(Card("rocm", number, name, 32 * GIB, 30 * GIB, "") for number, name in ((1, "R9700"), (2, "MI50")))
    machine = Machine("cpu", (), 8, 64 * GIB, 60 * GIB, "machine", 0, cards)
    assert {card.index: card.name for card in as_torch_sees(machine, environment).cards} == seen


def test_cards_are_found_by_the_names_people_type_and_by_chip_and_memory() -> None:
    assert known_card("r9700")["memory_gb"] == 32
    assert known_card("NVIDIA H200")["name"] == "H200"
    with pytest.raises(UsageError, match="R9900") as refused:
        known_card("R9900")
    assert "did you mean" in refused.value.hint
    found = similar_card("AMD GPU 7551", "gfx1201", 32 * GIB)
    assert found is not None and found["name"] == "Radeon AI PRO R9700"
    assert similar_card("AMD GPU 9999", "gfx9999", 32 * GIB) is None


def test_a_profile_round_trips_and_a_damaged_one_is_empty() -> None:
    profile = Profile("abc", rates={"smollm2 on cpu": 1e11}, rungs={"m": {"blas": 5}})
    assert read_profile("abc") == Profile("abc")
    write_profile(profile)
    assert read_profile("abc") == profile
    for damage in ("", "[]", '{"schema": 99}', '{"schema": 2, "rates": 3}', "\x00"):
        profile_path("abc").write_text(damage)
        assert read_profile("abc") == Profile("abc")
