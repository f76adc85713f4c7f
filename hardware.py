"""The machine: device, threads, precision. The only place where numerics are switched."""

import ctypes
import importlib.util
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

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

    def autocast(self) -> AbstractContextManager:
        """Returns the context in which a backbone runs."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False)


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
    torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it; no effect on a CPU
    torch.backends.cudnn.allow_tf32 = True
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError:
        raise SettingError(f"device={device} is not a device: use auto, cpu, cuda or cuda:N") from None
    require(chosen.type in ("cpu", "cuda"), f"device={device} is not supported: levels are float64, so use cpu or cuda")
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        require((chosen.index or 0) < count, f"device={device} is not there: this machine shows {count} CUDA devices")
    if precision == "auto":
        precision = "bf16" if has_bf16(chosen) else "fp32"
    return Hardware(chosen, precision, torch.get_num_threads())
