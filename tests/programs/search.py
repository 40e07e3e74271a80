"""Programs by hypothesis, and the smallest of those that fail."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from .acts import ACTS
from .operations import CHANGES, PURE, VIEWS
from .run import LIFE, USES, Step

OPERATIONS = (*PURE, *VIEWS, *CHANGES, *USES, *LIFE, *ACTS)
COMMON = ("sin", "exp", "tanh", "mul", "square", "matmul", "backward, kept", "land", "clone")
HANG_SECONDS = 60


def programs(most: int) -> st.SearchStrategy[list[Step]]:
    """Programs of up to ``most`` steps; short ones and long ones are equally likely."""
    named = st.one_of(st.sampled_from(COMMON), *map(st.sampled_from, _KINDS))
    step = st.tuples(named, st.sampled_from(_PICKS), st.sampled_from(_PICKS))
    sizes = [(2, 8), (6, 20), (15, most)] if most > 15 else [(2, most)]
    return st.one_of(*(st.lists(step, min_size=low, max_size=high) for low, high in sizes))


_PICKS = (0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 1, 1)  # what was just made, above all
_KINDS = (list(PURE), list(VIEWS), list(CHANGES), list(USES), list(LIFE), list(ACTS))


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    programs: int
    """How many were tried, the one that failed included."""
    error: BaseException | None
    """What the failing one raised; ``None``: none failed."""
    steps: list[Step]
    """The program, as small as it could be made."""

    def as_code(self) -> str:
        """The program, to be pasted into a test."""
        return "[\n" + "".join(f"    {step!r},\n" for step in self.steps) + "]"


def search(
    check: Callable[[list[Step]], None], most_programs: int, *, number: int, shrink: bool, most: int
) -> Found:
    """Try programs until one fails or there were enough.

    Args:
        check: raises for a program that fails.
        most_programs: the most to try.
        number: of the search; another number gives other programs.
        shrink: whether to make a failing one smaller.
        most: steps of a program.
    """
    tried = 0
    first: list[tuple[BaseException, list[Step]]] = []
    smallest: list[tuple[BaseException, list[Step]]] = []

    def body(steps: list[Step]) -> None:
        nonlocal tried
        tried += not first
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            check(steps)
        except Exception as error:
            first[:] = first or [(error, steps)]
            smallest[:] = [(error, steps)]
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()

    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    chosen = settings(
        max_examples=most_programs,
        deadline=None,
        database=None,
        phases=phases,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        seed(number)(chosen(given(programs(most))(body)))()
    except Exception as error:
        error, steps = smallest[0] if smallest else (error, [])
        return Found(tried, error, steps)
    return Found(tried, None, [])
