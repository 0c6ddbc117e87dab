"""The use of the machine, and the kernel's words about a death."""

import os
from pathlib import Path

from machines import write_tree

from hivetune.machine.telemetry import KernelLog, oom_kills, resident_bytes, sample


def test_a_sample_of_this_process(tmp_path: Path) -> None:
    taken = sample(os.getpid(), tmp_path, root=tmp_path)
    assert taken["resident_bytes"] > 1 << 20 and taken["available_bytes"] > 0 and "cards" not in taken
    assert resident_bytes(2**22 + 1) == 0


KMSG = (
    "3,1,1,-;amdgpu 0000:03:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:8 pasid:32770)\n"
    "6,2,2,-;usb 1-1: new device\n"
    "3,3,3,-;Out of memory: Killed process 4711 (python) total-vm:1kB\n"
    "3,4,4,-;Out of memory: Killed process 42 (firefox) total-vm:1kB\n"
)


def test_the_kernels_lines_about_this_process_and_no_other(tmp_path: Path) -> None:
    write_tree(tmp_path, {"dev/kmsg": "3,0,0,-;amdgpu: an old line\n"})
    log = KernelLog(tmp_path)
    with open(tmp_path / "dev/kmsg", "a") as file:
        file.write(KMSG.splitlines()[0] + "\n")
    assert log.lines(4711) == [KMSG.splitlines()[0].partition(";")[2]]
    log.close()


def test_the_kernels_count_of_kills(tmp_path: Path) -> None:
    files = {"proc/vmstat": "nr_free_pages 1\noom_kill 3\n", "proc/self/cgroup": "0::/user.slice\n"}
    write_tree(tmp_path, {**files, "sys/fs/cgroup/user.slice/memory.events": "low 0\noom 2\noom_kill 2\n"})
    assert oom_kills(tmp_path) == 5
    assert oom_kills(tmp_path / "nothing") == 0
