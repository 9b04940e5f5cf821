"""What torch calls of a CUDA library before an operation, doing nothing: compiled once, kept under
build/.

It asks a guard to select the device, of which a build for the CPU has none, and it initialises CUDA
before the first tensor there. The guard stays registered until the process ends; it is called for
tensors on CUDA only.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

FOLDER = Path(__file__).parents[2] / "build" / "cuda_guard"
SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/device_lazy_init.h>

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
}

extern "C" void require_initialisation(bool required) {
  torch::utils::set_requires_device_init(at::kCUDA, required);
}
"""


def reason_to_skip() -> str:
    """Why there can be no guard here; empty if there can."""
    if torch.cuda.is_available():
        return "there is a real device"
    return "" if shutil.which(cpp_extension.get_cxx_compiler()) else "no C++ compiler"


@cache
def library() -> ctypes.CDLL:
    """The functions of `SOURCE`; from now on there is a guard. Raises `RuntimeError` if they cannot
    be compiled."""
    kept = FOLDER / f"{torch.__version__}.so"
    if not kept.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        # Another process may compile the same.
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            made = Path(folder) / "guard.so"
            _compile(made)
            os.replace(made, kept)
    return ctypes.CDLL(str(kept))


def _compile(made: Path) -> None:
    source = made.with_suffix(".cpp")
    source.write_text(SOURCE, encoding="utf-8")
    command = [
        cpp_extension.get_cxx_compiler(), "-std=c++20", "-shared", "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *[f"-I{path}" for path in cpp_extension.include_paths()], str(source), "-o", str(made),
        *[f"-L{path}" for path in cpp_extension.library_paths()], "-ltorch_python", "-lc10",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the device guard does not compile:\n{done.stderr}")
