"""Builds the second device, and runs functions on ranks that have it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_name("second_device.cpp")
NAME = "npu"  # of the device types that plugins take, the one that torch keeps for devices from outside
MEMORY = 10**9  # that the device says it has
library: Any = None  # what was built, once this process has loaded it


def why_not() -> str | None:
    """Why it cannot be built here, if so."""
    if sys.platform != "linux":
        return f"the second device is built on Linux alone, and this is {sys.platform}"
    if shutil.which("c++") is None:
        return "the second device needs a C++ compiler, and there is no c++"
    if not Path(_python_headers(), "Python.h").exists():
        return "the second device needs Python's headers, and there are none"
    return None


def build(folder: Path) -> Path:
    """The library, built once in a folder that several processes may share; about 20 s, of which headers take most."""
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    built = folder / f"second_device_{version}.so"
    with built.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            command = ["c++", "-std=c++20", "-O0", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={built.stem}"]
            command += [f"-isystem{path}" for path in (*include_paths(), _python_headers())]
            command += [str(SOURCE), "-o", str(built.with_suffix(".part"))]
            command += [f"-L{path}" for path in library_paths()]
            command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-4000:]
            built.with_suffix(".part").rename(built)
    return built


def _python_headers() -> str:
    return sysconfig.get_paths()["include"]


def on_second_device(built: Path, store: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on a rank of a pool, with groups over both devices in the place of the pool's.

    Raises:
        RaceError: If accesses of the function to the device's memory were in no order.
        HangError: If NCCL would hang in the calls of all ranks.
    """
    from tests.unit_tests.second_device import manners
    from tests.unit_tests.second_device.order import ordered

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # the other rank may still be connecting, and would find this one's sockets closed
    dist.destroy_process_group()
    start(built)
    dist.init_process_group(f"cpu:gloo,{NAME}:second", init_method=f"file://{store}", rank=rank, world_size=world)
    manners.begin()
    with ordered():
        result = function(torch.device(NAME, 0), *arguments)
    manners.compare_logs(dist.FileStore(f"{store}-logs", world), rank, world)
    return result


def start(built: Path) -> None:
    """Make the device known to torch in this process, once."""
    global library
    if library is not None:
        return
    spec = importlib.util.spec_from_file_location(built.stem, built)
    assert spec is not None and spec.loader is not None
    loaded: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module_of_torch())
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("second", _collectives, extended_api=True, devices=[NAME])
    library = loaded


def _collectives(options: Any, _: Any) -> Any:
    from tests.unit_tests.second_device.manners import Communicators

    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return library.collectives(gloo, Communicators(options))


def _set_device(*_: Any) -> None:
    from tests.unit_tests.second_device import manners

    manners.has_set_device = True


def _module_of_torch() -> types.ModuleType:
    """What is `torch.cuda` of this device."""
    module: Any = types.ModuleType(NAME)
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.set_device, module.manual_seed_all = _set_device, lambda *_: None
    module.synchronize = lambda *_: library.synchronize()
    module.get_rng_state = lambda *_: torch.get_rng_state()  # its random numbers are the CPU's
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.Stream = lambda device=None, priority=0: torch.Stream(device or NAME, priority=priority)
    module.Event = lambda **options: torch.Event(NAME, **options)
    module.current_stream = lambda *_: torch.accelerator.current_stream(NAME)
    module.stream = lambda stream: stream if stream is not None else contextlib.nullcontext()
    module.mem_get_info = lambda *_: (MEMORY, MEMORY)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
