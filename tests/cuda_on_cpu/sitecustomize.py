"""Puts compute.cpp's library into each Python process, as soon as it has imported torch."""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class _AfterTorch(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.ops.load_library(os.environ["CUDA_ON_CPU"])
            _wait_at_exit()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wait_at_exit() -> None:
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    import torch

    from engine_threads import wait_at_exit

    sys.path.pop()
    wait_at_exit(lambda: [torch.device("cuda", 0)] if torch.cuda.is_initialized() else [])


if "CUDA_ON_CPU" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
