"""Runs Python with PyTorch's CUDA build on a machine that has no GPU.

    python tests/cuda_on_cpu tests/test_gpu.py --only out_of_memory

where ``python`` has a torch that was built for CUDA (the default of PyPI's); everything after the folder is
Python's own. Needs a C++ compiler and CUDA's headers (``CUDA_HOME``, or /usr/local/cuda). What is real there
and what is not, and the variables of the environment that say how late things are, is described in
``runtime.cpp`` and ``compute.cpp``.
"""

import os
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from compiled import CannotBuild, compiled  # noqa: E402


def environment() -> dict[str, str]:
    """What a process of Python needs to have it.

    Raises:
        CannotBuild: no compiler, no headers, or not the torch that it needs.
    """
    if torch.version.cuda is None:
        raise CannotBuild(f"torch {torch.__version__} was not built for CUDA")
    at = Path(torch.__file__).parent
    cuda = f"-I{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/include"
    includes = [f"-I{at / 'include'}", f"-I{at / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{at / 'lib'}", "-ltorch_cpu", "-lc10", "-lc10_cuda"]
    runtime = compiled(HERE / "runtime.cpp", cuda)
    compute = compiled(HERE / "compute.cpp", cuda, *includes, *libraries, of=torch.__version__)
    drivers = runtime.with_suffix("")
    drivers.mkdir(exist_ok=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        if not (drivers / name).exists():
            (drivers / name).symlink_to(runtime)
    before = os.environ

    def first(path: object, name: str) -> str:
        return os.pathsep.join(filter(None, [str(path), before.get(name)]))

    return {
        **before,
        "CUDA_ON_CPU": str(compute),
        "LD_PRELOAD": first(runtime, "LD_PRELOAD"),
        "LD_LIBRARY_PATH": first(drivers, "LD_LIBRARY_PATH"),
        "PYTHONPATH": first(HERE, "PYTHONPATH"),
    }


if __name__ == "__main__":
    try:
        found = environment()
    except CannotBuild as reason:
        sys.exit(f"cuda_on_cpu: {reason}")
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], found)
