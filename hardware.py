"""The machine: device, threads, precision, versions. The only place where numerics are switched."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import SettingError, require


@dataclass(frozen=True)
class Hardware:
    """What a run computes on.

    Attributes:
        precision: `fp32` or `bf16` (matrix products in bfloat16 by autocast; parameters, loss and EDM's coefficients stay
            float32).
    """

    device: torch.device
    precision: str
    threads: int

    @property
    def name(self) -> str:
        """The GPU's model, or `cpu`."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def free_memory(self) -> int | None:
        """Returns the bytes that can still be had on the device; of a host that is not Linux, None."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        info = Path("/proc/meminfo")
        found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.is_file() else None
        return int(found[1]) * 1024 if found else None

    def autocast(self) -> AbstractContextManager:
        """Returns the context in which a backbone runs."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a batch's tensor to the device; from pinned memory, so that a GPU's step does not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def has_bf16(device: torch.device) -> bool:
    """Returns whether the device multiplies matrices in bfloat16 natively (a CPU: AMX or AVX512-BF16)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def has_compiler(device: torch.device) -> bool:
    """Returns whether torch.compile finds what it compiles kernels with: Triton for a GPU, a C++ compiler for a CPU."""
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None
    return shutil.which(os.environ.get("CXX", "g++")) is not None


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Lets glibc keep what a step frees for the next one; other C libraries are left as they are.

    By default large tensors go back to the system when they are freed, and come again as pages of zeros: 100,000 page faults
    in an end-to-end step of DiT-S/2, 9% of its time (11% of a block's). The peak is the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def set_up(device: str, precision: str, threads: int | None) -> Hardware:
    """Chooses device and precision and sets what is global: threads, and TensorFloat-32 for float32 products on a GPU.

    Raises:
        SettingError: the device is not there.
    """
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError:
        raise SettingError(f"device={device} is not a device: use auto, cpu, cuda or cuda:N") from None
    require(chosen.type in ("cpu", "cuda"), f"device={device} is not supported: levels are float64, so use cpu or cuda")
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        require((chosen.index or 0) < count, f"device={device} is not there: this machine shows {count} CUDA devices")
        torch.cuda.set_device(chosen)  # libraries that say `.cuda()` follow
        torch.set_float32_matmul_precision("high")  # fp32 on a GPU means TF32 products
        torch.backends.cudnn.allow_tf32 = True
    if precision == "auto":
        precision = "bf16" if has_bf16(chosen) else "fp32"
    return Hardware(chosen, precision, torch.get_num_threads())


def environment() -> dict[str, Any]:
    """Returns versions, processor, threads and the commit of this code (None outside git; `-dirty` with changed files)."""
    packages = ("torch", "torchvision", "torch-fidelity", "numpy", "scipy", "scikit-learn")
    return {
        **{package: importlib.metadata.version(package) for package in packages},
        "python": platform.python_version(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "commit": _commit(Path(__file__).resolve().parent),
    }


def _cpu() -> str:
    """Returns the processor's model name as Linux tells it, elsewhere what the platform says."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit(folder: Path) -> str | None:
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-dirty" if changes else "")
