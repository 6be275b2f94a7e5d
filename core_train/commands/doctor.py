"""``python -m core doctor``: report this machine's hardware, fast kernels and missing packages.

A check that fails prints its error, and the others continue. The exit status is 1 if a package that training needs
is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import core

OLDEST_TORCH, FIRST_UNTRIED_TORCH = (2, 11), (2, 14)
EXTRAS = {
    "train": ("tyro", "matplotlib", "tensorboard", "tokenizers"),
    "safetensors": ("safetensors",),
    "transformers": ("transformers", "safetensors"),
    "peft": ("peft", "safetensors"),
    "integrations": ("accelerate", "transformers", "lightning-fabric", "safetensors"),
    "trl": ("trl", "peft", "accelerate", "transformers", "datasets", "safetensors"),
    "data": ("datasets",),
}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROBE_LIMIT_S = 20.0

Verdict = Literal["ok", "slower", "without", "MISSING"]


@dataclass(frozen=True)
class Line:
    """One line. 'slower': it works, and could be faster; 'without': an option needs it; 'MISSING': nothing trains."""

    verdict: Verdict
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all lines; the exit status."""
    if arguments and arguments[0] in ("-h", "--help"):
        print("usage: python -m core doctor\n\nSays what this machine has for training. It takes no arguments.")
        return 0
    if arguments:
        print(f"error: python -m core doctor takes no arguments, and was given {arguments[0]!r}", file=sys.stderr)
        return 2
    found = [(name, look(ask)) for name, ask in QUESTIONS.items()]
    width = max(map(len, QUESTIONS))
    print(f"gradient-core {core.__version__} in {Path(core.__file__).parent}")
    for name, finding in found:
        print(f"{finding.verdict:8} {name:{width}}  {finding.text}")
    missing = [name for name, finding in found if finding.verdict == "MISSING"]
    ready = "Ready. Next: python -m core train, or a loop of yours."
    print(f"Mend first: {', '.join(missing)}." if missing else ready)
    return 1 if missing else 0


def look(ask: Callable[[], Line]) -> Line:
    """The finding; one that cannot be had becomes a line that says so."""
    try:
        return ask()
    except Exception as error:  # a broken driver or a file that may not be read must not hide the other lines
        words = str(error).strip().splitlines()
        return Line("without", f"cannot be found: {words[0] if words else type(error).__name__}")


def python() -> Line:
    """The interpreter and the system."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform == "win32":
        return Line("MISSING", f"{text}; Windows has no fork and no file locks as used here; use WSL 2")
    return Line("ok", text)


def torch_version() -> Line:
    """Look for torch in a version that is tested."""
    if importlib.util.find_spec("torch") is None:
        return Line("MISSING", "not installed: pip install torch")
    import torch

    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    oldest, untried = (".".join(map(str, bound)) for bound in (OLDEST_TORCH, FIRST_UNTRIED_TORCH))
    if version < OLDEST_TORCH:
        return Line("MISSING", f"{torch.__version__} is too old: pip install 'torch>={oldest},<{untried}'")
    if version >= FIRST_UNTRIED_TORCH:
        return Line("without", f"{torch.__version__}; tests ran with {oldest} and later, below {untried}")
    return Line("ok", str(torch.__version__))


def backends() -> Line:
    """List the backends of collectives."""
    import torch.distributed as dist

    if not dist.is_available():
        return Line("MISSING", "this torch was built without torch.distributed")
    there = {"gloo (CPU)": dist.is_gloo_available(), "nccl (GPU)": dist.is_nccl_available()}
    text = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in there.items())
    return Line("ok" if any(there.values()) else "MISSING", text)


def address() -> Line:
    """gloo connects ranks by the address of the host's name."""
    name = socket.gethostname()
    try:
        return Line("ok", f"this host's name is found at {socket.gethostbyname(name)}")
    except OSError as error:
        return Line("slower", f"this host's name {name!r} is not found ({error.strerror}); set GLOO_SOCKET_IFNAME")


def cores() -> Line:
    """Cores, and the threads that a rank takes of them."""
    from core_plan.machine.threads import available_cores

    count, threads = available_cores(), os.environ.get("OMP_NUM_THREADS")
    said = f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set"
    text = f"{count}; {said}; 4 ranks take {max(1, count // 4)} thread(s) each"
    if threads and threads.isdigit() and int(threads) > count:
        return Line("slower", f"{text}; more threads than cores: every step waits for the slowest")
    return Line("ok", text)


def instructions() -> Line:
    """Instructions that torch's CPU kernels were compiled for and use here."""
    import torch

    return Line("ok", torch.backends.cpu.get_cpu_capability())


def memory() -> Line:
    """Memory of the machine."""
    page = os.sysconf("SC_PAGE_SIZE") / 2**30
    text = f"{os.sysconf('SC_PHYS_PAGES') * page:.1f} GiB"
    free = f", {os.sysconf('SC_AVPHYS_PAGES') * page:.1f} GiB not used" if "SC_AVPHYS_PAGES" in os.sysconf_names else ""
    return Line("ok", text + free)


def gpus() -> Line:
    """Accelerators, alike ones counted."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "no device or driver is found" if built else "this torch is a CPU build"
        return Line("without", f"none ({why}); everything runs on the CPU")
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    kinds = Counter(
        f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute {device.major}.{device.minor}"
        for device in devices
    )
    return Line("ok", "; ".join(f"{count} x {kind}" for kind, count in kinds.items()) + "; one rank each")


def shared_memory() -> Line:
    """Try whether ranks of this host can read each other's gradients through mapped memory."""
    from core.distributed.wire.shared_memory import new_mapped_file

    otherwise = "ranks of one host send gradients through sockets"
    try:
        fd = new_mapped_file()
    except OSError as error:
        return Line("slower", f"{otherwise}: {error.strerror or error}")
    try:
        program = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"
        place = f"/proc/{os.getpid()}/fd/{fd}"
        done = subprocess.run(
            [sys.executable, "-S", "-c", program, place], capture_output=True, timeout=PROBE_LIMIT_S, check=False
        )
    finally:
        os.close(fd)
    if done.returncode:
        return Line("slower", f"{otherwise}: another process of this user may not open {place}")
    return Line("ok", "ranks of one host add each other's gradients in place")


def huge_pages() -> Line:
    """Look whether large buffers get huge pages."""
    if not HUGE_PAGES.exists():
        return Line("slower", "this system has none to ask for")
    chosen = re.search(r"\[(\w+)\]", HUGE_PAGES.read_text())
    if chosen is None or chosen[1] == "never":
        return Line("slower", f"switched off: echo madvise | sudo tee {HUGE_PAGES}")
    return Line("ok", f"{chosen[1]}: buffers of 4 MiB and more lie in them")


def optimizer() -> Line:
    """Name the kernel that steps Adam."""
    from core.optimizer.algorithms.backends import report

    kernel = report()
    return Line("slower" if "foreach" in kernel else "ok", kernel)


def compiler() -> Line:
    """Report the C++ compiler, which torch.compile needs on the CPU."""
    found = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
    return Line("ok", found) if found else Line("without", "no C++ compiler; only torch.compile needs one")


def triton() -> Line:
    """Kernels that torch.compile makes for GPUs."""
    if importlib.util.find_spec("triton") is not None:
        return Line("ok", "installed")
    return Line("without", "not installed; only torch.compile on a GPU needs it: pip install 'gradient-core[triton]'")


def extra(name: str) -> Callable[[], Line]:
    """Look for the packages of an extra, and for a transformers version whose plans are read."""

    def ask() -> Line:
        missing = [package for package in EXTRAS[name] if importlib.util.find_spec(package.replace("-", "_")) is None]
        if missing:
            return Line("without", f"{', '.join(missing)} not installed: pip install 'gradient-core[{name}]'")
        if "transformers" in EXTRAS[name]:
            from core.hugging_face.read.plan import PlanError
            from core.hugging_face.read.transformers_plans import check_version

            try:
                check_version(importlib.metadata.version("transformers"))
            except PlanError as error:
                return Line("without", str(error))
        return Line("ok", "installed")

    return ask


def disk() -> Line:
    """Look for room on the disk that the main job writes to."""
    here = Path.cwd()
    text = f"{shutil.disk_usage(here).free / 2**30:.1f} GiB free in {here}"
    return Line("ok", text) if os.access(here, os.W_OK) else Line("slower", f"{text}, and it cannot be written to")


QUESTIONS: dict[str, Callable[[], Line]] = {
    "python": python,
    "torch": torch_version,
    "backends": backends,
    "address": address,
    "cores": cores,
    "memory": memory,
    "instructions": instructions,
    "GPUs": gpus,
    "shared memory": shared_memory,
    "huge pages": huge_pages,
    "optimizer": optimizer,
    "C++ compiler": compiler,
    "triton": triton,
    **{f"extra {name}": extra(name) for name in EXTRAS},
    "disk": disk,
}
