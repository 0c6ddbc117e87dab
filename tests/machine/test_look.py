"""The look of this machine is one document; whatever the files of a machine hold, it has a report without names."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from machines import Fake, Gpu, seen

from hivetune.machine.doctor import redacted, report_document
from hivetune.machine.findings import advised_variables, as_shell, judge_machine

GPU = Gpu(120001, "AMD Radeon AI PRO R9700", 32)
DEVICE = "sys/devices/0000:03:00.0"
PATHS = (
    *("proc/cpuinfo", "proc/meminfo", "proc/self/mountinfo", "proc/self/cgroup", "proc/sys/kernel/osrelease"),
    *("etc/os-release", "opt/rocm-7/.info/version", "opt/rocm/.info/version"),
    *("sys/class/kfd/kfd/topology/nodes/1/properties", f"{DEVICE}/mem_info_vram_total", f"{DEVICE}/product_name"),
    "sys/fs/cgroup/cpu.max",
    *("site/torch/version.py", "sys/module/amdgpu/version"),
)
LINES = ("gfx_target_version 99999999999999999999", "MemTotal: -1 kB", "SwapFree: x", "22 1 259:2 / /\\ rw - ext4")
LINES += ("0::/../../..", "max max", "-1 0", "location_id 4294967295", "PRETTY_NAME=", "0x", "7.2")
CONTENT = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(LINES), max_size=4).map("\n".join))
VALUES = st.sampled_from(["", "1", "-1", "10.3.0", "a.b.c", "9999.1.1", "expandable_segments:True", "/opt/rocm-7/lib:"])
NAMES = st.sampled_from(
    ["HSA_OVERRIDE_GFX_VERSION", "PYTORCH_ALLOC_CONF", "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "CXX"]
)


@given(
    files=st.dictionaries(st.sampled_from(PATHS), CONTENT, max_size=6),
    environment=st.dictionaries(NAMES, VALUES, max_size=4),
    torch=st.sampled_from(["", "2.13.0+rocm7.2", "2.13.0+rocm", "nightly", "2.7", "2.9.0a0+git123"]),
)
@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_any_tree_has_a_report(files: dict[str, str], environment: dict[str, str], torch: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one = seen(Fake(gpus=[GPU], files=files, environment=environment, torch=torch), Path(folder))
        assert json.dumps(report_document(one, judge_machine(one)))
        as_shell(advised_variables(one))


def doctor(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hivetune", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


@pytest.mark.slow
def test_the_look_of_this_machine_is_one_document_and_changes_nothing(own_home: Path) -> None:
    ended = doctor("--json")
    assert list(own_home.iterdir()) == []  # it wrote the profile that later runs obey
    document = json.loads(ended.stdout)
    assert document["schema"] == 1 and ended.returncode == (0 if document["fit"] else 4)
    assert document["machine"]["cores"] >= 1 and document["machine"]["memory_bytes"] > 0
    assert document["observed"]["kernel"] and document["observed"]["torch"]


def test_names_of_people_and_machines_are_taken_out_and_nothing_else() -> None:
    text = "/home/alice/x /data/alice alice@box7.example.org box7 malice box77 /srv/alice/models"
    said = redacted({"alice": [text, 1]}, "alice", "box7.example.org")
    assert said == {"alice": ["/home/USER/x /data/USER USER@HOST HOST malice box77 /srv/USER/models", 1]}
    assert redacted("root@localhost:/x", "root", "localhost") == "root@localhost:/x"
