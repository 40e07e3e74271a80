"""Make the planners of a stash from its budget or plan."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from .._device.base import Device
from .._runtime.trace import EventLog
from .._text import shown
from ..errors import UsageError
from ..plan import Plan
from ..units import parse_bytes
from .device_meter import DeviceMeter
from .planner import Planner, auto_budget, held_and_spare

__all__ = ["planners_of"]


def planners_of(
    event_log: EventLog,
    budget: int | str | None,
    plan: str | os.PathLike[str] | Plan | None,
    windows: tuple[int | None, int | None],
    *,
    trim: Callable[[], None],
    has_disk: bool,
    has_host: bool,
    strict: bool,
) -> Callable[[Device | None], Planner | None]:
    """Return a function that makes the planner of a device (``None``: the CPU).

    Args:
        event_log: of the stash.
        budget: in bytes, as a size, or ``"auto"``.
        plan: the plan to follow, or its file.
        windows: see :class:`Planner`.
        trim: return free memory of the process to the system. Called with the stash's lock held.
        has_disk: whether CPU tensors can move.
        has_host: whether an accelerator's tensors can move.
        strict: whether exceeding the budget is an error.

    Raises:
        UsageError: ``plan`` is not a plan or the file of one.
        SizeError: ``budget`` is not a size.
    """
    if plan is not None and not isinstance(plan, (Plan, str, os.PathLike)):
        raise UsageError(
            f"plan={shown(plan)}; allowed: a Plan, or the path of a file that plan.save(path) wrote"
        )
    loaded = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
    is_auto = budget == "auto"
    nbytes = (
        None
        if budget is None or is_auto
        else parse_bytes(budget, name="budget", also=', or "auto"')
    )

    def planner(device: Device | None) -> Planner | None:
        if loaded is not None and (loaded.device == "cpu") != (device is None):
            return None  # the plan is for another device
        common: dict[str, Any] = {"loaded": loaded, "windows": windows, "strict": strict}
        if device is None:
            return Planner(
                event_log,
                budget=auto_budget() if is_auto else nbytes,
                tier="disk" if has_disk else None,
                trim=trim,
                **common,
            )
        held_bytes = device.memory().held_bytes
        return Planner(
            event_log,
            functools.partial(DeviceMeter, device),
            budget=held_and_spare(held_bytes, device.free_bytes()) if is_auto else nbytes,
            tier="host" if has_host else None,
            device=device,
            **common,
        )

    return planner
