"""Run a script as the interpreter itself would, with a stash around it.

`backstash run` starts this file by its path, in a fresh interpreter with the chosen allocator and environment,
and passes a plan in one environment variable. The script must not notice: it finds `sys.argv`, `sys.path`,
`__main__`, the environment and the command line as in plain Python.

This file does not import torch, because a script may set `OMP_NUM_THREADS` and similar variables before it
imports torch. The stash is entered when the script's own import of torch has ended, and left when the threads
that the script waits for have ended, too.

Python's warnings skip a frame whose file name contains `importlib` and `_bootstrap` when they count
`stacklevel`. Hence this file's name: a warning that points beyond the script names `sys:1`, as in plain Python,
and not this file.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from typing import Any, NoReturn

__all__: list[str] = []

_PLAN_VARIABLE = "BACKSTASH_RUN"
_OTHER_NAME = "backstash_beside"  # our package's name if the script has its own package `backstash`


class _NotRunnable(Exception):
    """There is no script to run; the message names what was found instead."""


class _TorchImport(MetaPathFinder):
    """A finder that calls ``now`` right after the import of torch, and then ``then``, each once.

    A script may first import a part of backstash, which imports torch. ``then`` is called after both imports
    have ended, since it imports backstash itself. ``importlib.util.find_spec("torch")`` alone calls neither.
    """

    def __init__(self, now: Callable[[], None], then: Callable[[], None]) -> None:
        self._now = now
        self._then = then
        self._under_way = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch" and name.partition(".")[0] != "backstash":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._follow(spec.loader, name)
        return spec

    def _follow(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # another finder may have called us twice
            self._under_way += 1
            try:
                execute(module)
            finally:
                self._under_way -= 1
            if name == "torch":
                self._now()
            if self._under_way == 0 and "torch" in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = exec_module


class _Run:
    """One run of a script: its plan, and the stash once it exists."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._pid = os.getpid()
        self._session: Any = None
        self._package = ""
        self._outcome = "finished"
        self._refused = False

    def let_torch_read(self) -> None:
        """Show torch the settings that it reads at its first allocation, and then hide them."""
        with _variables(self._plan["read_later"]):
            sys.modules["torch"].empty(1)

    def begin(self) -> None:
        """Enter the stash, right after the import of torch."""
        module, _, name = self._plan["session"].partition(".")
        errors, session = self._part("errors"), getattr(self._part(f"cli.{module}"), name)
        try:
            with _variables(self._plan["read_later"]):
                self._session = session(self._plan)
        except errors.StashError as error:
            self.refuse(f"{' '.join(self._plan['command'].split()[:2])}: {error}")

    def refuse(self, text: str) -> NoReturn:
        """Exit with status 2 after ``text`` and without a summary: the script itself did not end."""
        self._refused = True
        self._say(text)
        raise SystemExit(2) from None

    def failed(self, error: BaseException) -> None:
        """Record that ``error`` ended the script's main module. Threads that the script waits for may still
        run."""
        if self._session is not None:
            self._outcome = self._part("cli._summary").outcome(error)

    def end(self) -> None:
        """Leave the stash and print the summary; in a process that the script forked, neither."""
        if os.getpid() != self._pid:
            return
        if self._refused:
            return
        if self._session is not None:
            try:
                self._session.end(self._outcome)
            except Exception as problem:  # the summary must not change how the script ends
                self._say(f"backstash: no summary: {problem!r}")
        elif not self._plan.get("quiet"):
            self._say("backstash: the script did not import torch, nothing was held")

    def _part(self, name: str) -> Any:
        self._package = self._package or _import_own(self._plan["root"])
        return importlib.import_module(f"{self._package}.{name}")

    def _say(self, text: str) -> None:
        self._part("cli._say").say(text)


def _import_own(root: str) -> str:
    """Import this file's package, and return its name.

    The name is not ``backstash`` if the script would find another package of that name, or none: then it still
    does.
    """
    own = os.path.join(root, "backstash", "__init__.py")
    try:
        spec = importlib.util.find_spec("backstash")
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == own:
        return "backstash"
    where = [os.path.dirname(own)]
    spec = importlib.util.spec_from_file_location(
        _OTHER_NAME, own, submodule_search_locations=where
    )
    assert spec is not None and spec.loader is not None
    sys.modules[_OTHER_NAME] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _OTHER_NAME


def _main() -> None:
    plan = json.loads(os.environ.pop(_PLAN_VARIABLE))
    _set(plan["restore"])
    plan["arguments"] = sys.argv[1:]
    sys.orig_argv[:] = [*plan["started"], *sys.argv[1:]]
    run = _Run(plan)
    atexit.register(run.end)  # registered first, so called last
    sys.meta_path.insert(0, _TorchImport(run.let_torch_read, run.begin))
    try:
        code, main = _prepare(plan["target"], plan["is_module"])
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except _NotRunnable as problem:
        run.refuse(f"backstash: {problem}")
    except BaseException as error:
        run.failed(error)
        if not isinstance(error, SystemExit):  # the interpreter prints no traceback for SystemExit
            _hide_own_frames()
        raise


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a moment, so that processes that the script starts do not see them."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _hide_own_frames() -> None:
    """Make the interpreter print the script's traceback as if it had run the script itself."""
    hook = getattr(sys, "excepthook", sys.__excepthook__)

    def show(
        kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
    ) -> None:
        sys.excepthook = hook
        while traceback is not None and _is_before_the_script(traceback.tb_frame.f_code):
            traceback = traceback.tb_next
        sys.last_traceback = error.__traceback__ = traceback
        hook(kind, error, traceback)

    sys.excepthook = show


def _is_before_the_script(code: types.CodeType) -> bool:
    return code.co_filename == __file__ or code.co_filename.startswith("<frozen ")


def _prepare(target: str, is_module: bool) -> tuple[types.CodeType, types.ModuleType]:
    """Set ``sys.path`` and ``sys.argv``; return the code and the module that it will run as."""
    safe = getattr(sys.flags, "safe_path", False)
    if not safe:
        sys.path_importer_cache.pop(sys.path.pop(0), None)  # this file's directory
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
        problem = "there is no such module" if spec is None else "it has no code to run"
        raise _NotRunnable(f"{name!r}: {problem}; allowed: what `python -m` takes")
    if sys.argv[0] == "-m" and spec.origin:
        sys.argv[0] = spec.origin
    return loader.get_code(spec.name), _main_module(spec, loader, spec.origin)


def _find(name: str) -> ModuleSpec | None:
    if name == "__main__":  # the one in the first directory or archive of the path, not this file
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
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    return main


if __name__ == "__main__":
    _keep = sys.modules["__main__"]  # keeps this file's globals after the script takes the name
    _main()
