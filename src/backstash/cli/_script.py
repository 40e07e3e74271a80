"""Runs a script as the interpreter itself would, with a stash around it.

`backstash run` starts this file by its path, in a fresh interpreter whose allocator and
environment it has chosen, with a plan in one environment variable. What happens here must not be
seen by the script: it finds `sys.argv`, `sys.path`, `__main__`, the environment and the command
line as plain Python gives them.

torch is not imported here: a script may set `OMP_NUM_THREADS` and the like before it imports
torch, and that has to work. The stash is entered when the script's own import of torch has ended.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from typing import Any

__all__: list[str] = []

_PLAN_VARIABLE = "BACKSTASH_RUN"


class _NotRunnable(SystemExit):
    """There is no script to run; a message about it has been printed."""


class _TorchImport(MetaPathFinder):
    """A finder that calls ``then`` once, right after torch has been imported.

    A script may import a part of backstash first, which imports torch. ``then`` is called after both imports
    have ended, since it imports backstash itself. ``importlib.util.find_spec("torch")`` alone does not call it.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._under_way = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch" and name.partition(".")[0] != "backstash":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # another finder may have asked us twice
            self._under_way += 1
            try:
                execute(module)
            finally:
                self._under_way -= 1
            if self._under_way == 0 and "torch" in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = exec_module


class _Run:
    """One script's run: its plan, and the stash once there is one."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._pid = os.getpid()
        self._session: Any = None

    def begin(self) -> None:
        """Enter the stash. Called when torch has just been imported."""
        if importlib.util.find_spec("backstash") is None:
            sys.path.append(self._plan["root"])
        from backstash.errors import StashError

        session = importlib.import_module(f"backstash.cli.{self._plan['session']}")
        try:
            self._session = session.Session(self._plan)
        except StashError as error:
            print(f"backstash {self._plan['name']}: {error}", file=sys.stderr)
            raise _NotRunnable(2) from None
        _restore(self._plan["restore_later"])

    def end(self, error: BaseException | None) -> None:
        """Leave the stash and print the summary; in a process that the script forked, neither."""
        if os.getpid() != self._pid or isinstance(error, _NotRunnable):
            return
        if self._session is not None:
            try:
                self._session.end(error)
            except Exception as problem:  # how the script ended must not depend on the summary
                print(f"backstash: no summary: {problem!r}", file=sys.stderr)
        elif not self._plan["quiet"]:
            print("backstash: the script did not import torch, nothing was held", file=sys.stderr)


def _main() -> None:
    plan = json.loads(os.environ.pop(_PLAN_VARIABLE))
    _restore(plan["restore"])
    run = _Run(plan)
    sys.meta_path.insert(0, _TorchImport(run.begin))
    error = _execute(plan)
    _report(error)
    run.end(error)
    if error is None:
        return
    if isinstance(error, SystemExit) and not _is_status(error.code):
        sys.exit(1)
    # What there was to print has been printed, without the frames of this file. Raising once more
    # lets the interpreter end as it would: atexit first, then the status, or SIGINT for a
    # KeyboardInterrupt.
    sys.excepthook = lambda *_: None
    raise error


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _is_status(code: object) -> bool:
    return code is None or isinstance(code, int)


def _execute(plan: dict[str, Any]) -> BaseException | None:
    """Run the script to its end; return what it raised, without this file's frames."""
    try:
        code, main = _prepare(plan["target"], plan["is_module"])
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and _is_before_the_script(traceback.tb_frame.f_code):
            traceback = traceback.tb_next
        return error.with_traceback(traceback)
    return None


def _is_before_the_script(code: types.CodeType) -> bool:
    return code.co_filename == __file__ or code.co_filename.startswith("<frozen ")


def _report(error: BaseException | None) -> None:
    """Print what the interpreter would print for ``error``."""
    if isinstance(error, SystemExit):
        if not _is_status(error.code):
            print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)


def _prepare(target: str, is_module: bool) -> tuple[types.CodeType, types.ModuleType]:
    """Set ``sys.path`` and ``sys.argv``; return the code and the module that it will run as."""
    safe = getattr(sys.flags, "safe_path", False)
    if not safe:
        del sys.path[0]  # this file's directory
    if is_module:
        if not safe:
            sys.path.insert(0, os.getcwd())
        sys.argv[0] = "-m"
        return _module(target)
    sys.argv[0] = target
    if os.path.isdir(target) or target.endswith((".zip", ".pyz")):
        sys.path.insert(0, os.path.abspath(target))
        return _module("__main__")
    if not safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
    return _file(os.path.abspath(target))


def _file(path: str) -> tuple[types.CodeType, types.ModuleType]:
    loader: Any
    if path.endswith(".pyc"):
        loader = SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)
    return code, _main_module(None, loader, path)


def _module(name: str) -> tuple[types.CodeType, types.ModuleType]:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    loader: Any = None if spec is None else spec.loader
    if spec is None or loader is None or not hasattr(loader, "get_code"):
        print(
            f"backstash: {name!r} is nothing to run; allowed: what `python -m` takes",
            file=sys.stderr,
        )
        raise _NotRunnable(2)
    if sys.argv[0] == "-m" and spec.origin:
        sys.argv[0] = spec.origin
    return loader.get_code(spec.name), _main_module(spec, loader, spec.origin)


def _find(name: str) -> ModuleSpec | None:
    if name == "__main__":  # of the directory or archive that is first on the path, not this file
        return PathFinder.find_spec(name, sys.path[:1])
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _main_module(spec: ModuleSpec | None, loader: Any, path: str | None) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __builtins__=sys.modules["builtins"],
        __cached__=None if spec is None else spec.cached,
        __file__=path,
        __loader__=loader,
        __package__=None if spec is None else spec.parent,
        __spec__=spec,
    )
    return main


if __name__ == "__main__":
    _keep = sys.modules[
        "__main__"
    ]  # its globals serve this file after the script has taken the name
    _main()
