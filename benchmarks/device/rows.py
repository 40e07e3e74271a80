"""One model in every way, in turn: seconds, peak memory, bytes that moved, gradients."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from backstash import Stash
from backstash.memory import spare_bytes
from backstash.units import format_bytes
from bench._workloads import Workload

from .models import DEVICE_WORKLOADS
from .step import Report, allocated, digest, make_stash, peak, reset_peak, step, synchronize
from .ways import WAYS, DeviceWay

__all__ = ["rows"]

_BROKEN = 3  # the exit status when the device may be broken
_DID_NOT_END = "it did not end"


def rows(task: dict[str, Any], device: torch.device, report: Report) -> int:
    """Measure every way ``repeats`` times, in turn; report each row again after each measurement.

    Returns:
        0, or 3 where an error may have left the device in a state that fails what follows.
    """
    bench = _Rows(task, device, report)
    try:
        return bench.run()
    finally:
        bench.close()


class _Rows:
    def __init__(self, task: dict[str, Any], device: torch.device, report: Report) -> None:
        self.task, self.device, self._report = task, device, report
        self._until = time.monotonic() + task["seconds"]
        torch.manual_seed(0)
        self.workload: Workload = DEVICE_WORKLOADS[task["workload"]](device)
        report(["description"], self.workload.description)
        self._settle_determinism()
        self.saved = self._saved_bytes()
        report(["saved_bytes"], self.saved)
        self._start = allocated(device)
        # One stash for every share, so that host memory is pinned once; one more with a disk.
        self._stashes: dict[bool, Stash] = {}
        self._holds: dict[str, Any] = {}
        self._found: dict[str, dict[str, Any]] = {}

    def run(self) -> int:
        """Run all repeats that there is time for; return the exit status."""
        ways = [name for name in self.task["ways"] if name not in self.task["known"]]
        self._pin([WAYS[name] for name in ways if WAYS[name].stash is not None])
        for repeat in range(self.task["repeats"]):
            turn = repeat % len(ways) if ways else 0
            for name in ways[turn:] + ways[:turn]:
                if not self._sample(name, WAYS[name]):
                    return _BROKEN
        return 0

    def _pin(self, ways: list[DeviceWay]) -> None:
        """One step with nothing kept in place, so that no row's first step pays for pinning host memory."""
        began = time.monotonic()
        for way in {bool((each.stash or {}).get("disk")): each for each in ways}.values():
            hold, _ = self._hold(way, "")
            try:
                step(self.workload, hold, WAYS["plain"].around)
            except torch.OutOfMemoryError:
                pass  # its own row says so
            self._clean()
        self._report(["pin_seconds"], time.monotonic() - began)

    def close(self) -> None:
        """Free the host memory."""
        self._holds.clear()
        for stash in self._stashes.values():
            stash.close()

    def _settle_determinism(self) -> None:
        """Allow kernels that have no deterministic form, and report which was the first."""
        words = ""
        try:
            step(self.workload, torch.enable_grad(), WAYS["plain"].around)
        except torch.OutOfMemoryError:
            pass  # plain's own row says so
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            words = str(error).partition(".")[0]
            torch.use_deterministic_algorithms(True, warn_only=True)
        self._report(["not_deterministic"], words)
        self._clean()

    def _saved_bytes(self) -> int:
        """Bytes that one step saves, each storage counted once."""
        stash = make_stash(self.device, keep=None, host=1 << 30)
        try:
            with stash:
                loss = self.workload.model(*self.workload.inputs)
            del loss
        except torch.OutOfMemoryError:
            pass  # what was saved until then
        saved = stash.stats().eligible_bytes
        stash.close()
        self._clean()
        return saved

    def _sample(self, name: str, way: DeviceWay) -> bool:
        """Measure a way once; return whether the process may go on."""
        row = self._found.setdefault(name, {"step_seconds": [], "peaks": [], "gradients": []})
        left = self._until - time.monotonic()
        if "failed" in row or row.get("slow") or left < 2 * row.get("turn_seconds", 0):
            return True
        needs, spare = way.host_times * self.saved, spare_bytes()
        if left <= 0:
            row["failed"] = "no time was left"
        elif not row["step_seconds"] and needs > spare:
            row["failed"] = (
                f"may take {format_bytes(needs)} of host memory: {format_bytes(spare)} is to spare"
            )
        else:
            if not row["step_seconds"]:  # stands in the result if this process does not end
                self._report(["rows", name], row | {"failed": _DID_NOT_END})
            began = time.monotonic()
            try:
                self._measure(way, name, row)
            except (ImportError, torch.OutOfMemoryError) as error:
                row["failed"] = _short(error)
            except Exception as error:
                row["failed"] = _short(error)
                self._report(["rows", name], row)
                if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
                    return False
            row["turn_seconds"] = time.monotonic() - began
        self._clean()
        self._report(["rows", name], row)
        return True

    def _measure(self, way: DeviceWay, name: str, row: dict[str, Any]) -> None:
        hold, around = self._hold(way, name)
        stash = hold if isinstance(hold, Stash) else None
        if stash is not None:
            options = way.stash or {}
            stash.set_keep(None if options["keep"] is None else int(options["keep"] * self.saved))
        cold = step(self.workload, hold, around)
        row.setdefault("cold_seconds", cold)
        before = stash.stats() if stash is not None else None
        reset_peak(self.device)
        # A way that takes its time is measured once: by its first step, if even that is long.
        row["slow"] = cold > self.task["seconds"] / 8
        count = 0 if row["slow"] else self.task["steps"]
        seconds = [step(self.workload, hold, around) for _ in range(count)] or [cold]
        row["step_seconds"] += seconds
        row["peaks"].append(peak(self.device) - self._start)
        row["gradients"].append(digest(self.workload.model))
        if stash is not None and before is not None:
            stats, many = stash.stats(), max(1, count)
            row["down_bytes"] = (stats.written_bytes - before.written_bytes) // many
            row["up_bytes"] = (stats.read_bytes - before.read_bytes) // many
            row["stall_seconds"] = (stats.stall_seconds - before.stall_seconds) / many
            row["stats"] = stats.as_json()

    def _hold(self, way: DeviceWay, name: str) -> tuple[Any, Any]:
        if way.stash is not None:
            on_disk = bool(way.stash.get("disk"))
            if on_disk not in self._stashes:
                host = self.saved // 4 if on_disk else self.task["host_bytes"]
                disk = self.task["directory"] if on_disk else None
                host = max(host, 1 << 20)
                self._stashes[on_disk] = make_stash(self.device, keep=0, host=host, disk=disk)
            return self._stashes[on_disk], way.around
        if name not in self._holds:
            self._holds[name] = way.make(self.workload)
        hold, around = self._holds[name]
        return hold, around or way.around

    def _clean(self) -> None:
        self.workload.model.zero_grad()
        gc.collect()
        synchronize(self.device)
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()


def _short(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of device memory"
    return f"{type(error).__name__}: {error}".strip()[:400]
