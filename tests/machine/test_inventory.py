"""The machine as the kernel shows it: limits of cgroups, AMD cards from sysfs, fingerprints, profiles."""

from dataclasses import replace
from pathlib import Path

import pytest

from hivetune.base.kernel import usable_cores
from hivetune.errors import UsageError
from hivetune.machine.cards import known_card, similar_card
from hivetune.machine.inventory import Card, Machine, read_amd_cards, read_machine
from hivetune.machine.profile import Profile, profile_path, read_profile, write_profile

GIB = 1 << 30


def a_tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {60 * GIB // 1024} kB\n"
CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t\t: fpu sse avx fma avx2 avx512_bf16\n\nprocessor\t: 1\n"


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    machine = read_machine(a_tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO}), tmp_path)
    assert (machine.memory_bytes, machine.available_bytes) == (64 * GIB, 60 * GIB)
    assert machine.memory_limit == "machine"
    assert machine.cpu == "AMD EPYC 7763" and machine.isa == ("avx", "avx2", "fma", "avx512_bf16")


def test_the_tightest_cgroup_of_version_2_holds_and_page_cache_is_free(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user.slice/job"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/user.slice/job\n",
        "sys/fs/cgroup/user.slice/memory.max": str(32 * GIB),
        "sys/fs/cgroup/user.slice/memory.current": str(8 * GIB),
        f"{group}/memory.max": str(16 * GIB),
        f"{group}/memory.current": str(6 * GIB),
        f"{group}/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
    }
    machine = read_machine(a_tree(tmp_path, files), tmp_path)
    assert (machine.memory_bytes, machine.available_bytes) == (16 * GIB, 12 * GIB)
    assert machine.memory_limit == f"/{group}/memory.max"


def test_a_cgroup_of_version_1_holds(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    }
    machine = read_machine(a_tree(tmp_path, files), tmp_path)
    assert (machine.memory_bytes, machine.available_bytes) == (4 * GIB, 3 * GIB)


def amd_tree(root: Path) -> Path:
    slot = root / "sys/devices/pci0000:00/0000:03:00.0"
    a_tree(
        slot,
        {
            "vendor": "0x1002\n",
            "device": "0x7551\n",
            "revision": "0xc0\n",
            "mem_info_vram_total": f"{32 * GIB}\n",
            "mem_info_vram_used": f"{2 * GIB}\n",
        },
    )
    a_tree(root, {"sys/class/drm/card0/device/vendor": "0x8086\n", "sys/class/drm/card1/name": ""})
    (root / "sys/class/drm/card1/device").symlink_to(slot)
    return a_tree(
        root,
        {
            "sys/module/amdgpu/version": "6.14.14\n",
            "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 8\ngfx_target_version 0\n",
            "sys/class/kfd/kfd/topology/nodes/1/properties": "gfx_target_version 120001\nlocation_id 768\ndomain 0\n",
        },
    )


def test_an_amd_card_is_read_from_sysfs(tmp_path: Path) -> None:
    root = amd_tree(tmp_path)
    expected = Card("rocm", 0, "AMD GPU 7551", 32 * GIB, 30 * GIB, "6.14.14", "gfx1201", "0000:03:00.0")
    assert read_amd_cards(root) == [expected]
    a_tree(root, {"usr/share/libdrm/amdgpu.ids": "1.0.0\n7551,\tC0,\tAMD Radeon AI PRO R9700\n"})
    assert read_amd_cards(root) == [replace(expected, name="AMD Radeon AI PRO R9700")]


@pytest.mark.parametrize(
    ("version", "name"), [(90006, "gfx906"), (90010, "gfx90a"), (90402, "gfx942"), (110000, "gfx1100")]
)
def test_the_kernels_number_is_the_name_that_people_know(tmp_path: Path, version: int, name: str) -> None:
    root = amd_tree(tmp_path)
    properties = f"gfx_target_version {version}\nlocation_id 768\n"
    a_tree(root, {"sys/class/kfd/kfd/topology/nodes/1/properties": properties})
    assert read_amd_cards(root)[0].architecture == name


def test_a_card_without_a_name_is_known_by_its_chip_and_memory() -> None:
    found = similar_card("AMD GPU 7551", "gfx1201", 32 * GIB)
    assert found is not None and found["name"] == "Radeon AI PRO R9700"
    assert similar_card("AMD GPU 9999", "gfx9999", 32 * GIB) is None


def test_cards_are_found_by_the_names_people_type() -> None:
    assert known_card("r9700")["memory_gb"] == 32
    assert known_card("NVIDIA H200")["name"] == "H200"
    with pytest.raises(UsageError, match="R9900") as refused:
        known_card("R9900")
    assert "did you mean" in refused.value.hint


def a_machine(**changes: object) -> Machine:
    plain = Machine(
        cpu="x",
        isa=("avx2",),
        cores=8,
        memory_bytes=GIB,
        available_bytes=GIB,
        memory_limit="machine",
        disk_free_bytes=GIB,
        versions={"torch": "2.13.0"},
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_the_fingerprint_follows_what_changes_rates_and_not_what_is_free() -> None:
    first = a_machine().fingerprint
    assert a_machine(available_bytes=1, disk_free_bytes=1).fingerprint == first
    card = Card("rocm", 0, "R9700", GIB, GIB, "6.14")
    changed = [{"cores": 4}, {"versions": {"torch": "2.7.0"}}, {"isa": ("avx",)}, {"cards": (card,)}]
    prints = {a_machine(**change).fingerprint for change in changed}
    assert len(prints) == len(changed) and first not in prints


def test_a_profile_round_trips_and_a_damaged_one_is_empty() -> None:
    profile = Profile("abc", rates={"smollm2 on cpu": 1e11}, rungs={"m": {"blas": 5}})
    assert read_profile("abc") == Profile("abc")
    write_profile(profile)
    assert read_profile("abc") == profile
    for damage in ("", "[]", '{"schema": 99}', '{"schema": 2, "rates": 3}', "\x00"):
        profile_path("abc").write_text(damage)
        assert read_profile("abc") == Profile("abc")


SERVICE, QUOTA = "0::/user.slice/run.service\n", "100000 100000\n"
OLD = "sys/fs/cgroup/cpu/x/cpu.cfs_"


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        (SERVICE, {"sys/fs/cgroup/user.slice/run.service/cpu.max": QUOTA}, 1),
        (SERVICE, {"sys/fs/cgroup/user.slice/cpu.max": QUOTA}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": QUOTA}, 1),
        ("3:cpu,cpuacct:/x\n", {f"{OLD}quota_us": "100000\n", f"{OLD}period_us": "100000\n"}, 1),
        (SERVICE, {"sys/fs/cgroup/other.slice/cpu.max": QUOTA}, 2),
    ],
)
def test_the_quota_of_every_cgroup_above_counts(
    cgroup: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd's CPUQuota is of the service's own cgroup, which was never read."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert usable_cores(a_tree(tmp_path, {"proc/self/cgroup": cgroup, **files})) == cores
