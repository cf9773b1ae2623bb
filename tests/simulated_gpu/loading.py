"""Load the library of the simulated device. Import this module before torch, which looks up device hooks only once."""

import ctypes
import os

from tests.simulated_gpu import building

_LIB = building.torch_folder() / "lib"
for _path in (_LIB / "libtorch_global_deps.so", _LIB / "libc10.so", _LIB / "libtorch_cpu.so", building.library()):
    ctypes.CDLL(str(_path), mode=ctypes.RTLD_GLOBAL)
os.environ.setdefault("TRITON_INTERPRET", "1")
