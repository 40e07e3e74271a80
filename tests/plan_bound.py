"""The least that any choice of a plan can take, by another's solver: SciPy's."""

import math
from dataclasses import replace
from typing import Any

from scipy import optimize, sparse

MIB = 1 << 20


def linear_program(
    trace: Any,
    budget: int,
    window: int,
    reserved: tuple[int, int] = (0, 0),
    *,
    whole_regions: bool = False,
) -> float:
    """The least seconds of any choice, fractions of a block allowed; to keep one takes nothing, as if it was
    left alone.

    Args:
        trace: of the step.
        budget: in bytes.
        window: bytes that may be on their way down when forward ends.
        reserved: bytes of the budget that what is on its way takes, in forward and in backward.
        whole_regions: each runs again whole or not at all; else fractions of one are allowed, too.

    Infinite where nothing fits.
    """
    saves, frees = trace.span("save"), trace.span("free")
    first_use = next(at for at, moment in enumerate(trace.moments) if moment.kind == "use")
    variables = [
        (b, option if name != "keep" else replace(option, save_seconds=0.0, use_seconds=0.0))
        for b, block in enumerate(trace.blocks)
        for name, option in block.options.items()
    ]
    count, last, regions = len(variables), len(trace.moments), trace.regions
    cost = [option.save_seconds + option.use_seconds for _, option in variables] + [1, 1]
    cost += [each.save_seconds + each.use_seconds for each in regions]
    rows = sparse.lil_matrix((last + 2, len(cost)))
    blocks = sparse.lil_matrix((len(trace.blocks), len(cost)))
    for at, (block, option) in enumerate(variables):
        blocks[block, at] = 1
        if option.resident_bytes:
            for moment in range(saves[block] + 1, frees[block] + 1):
                rows[moment, at] = option.resident_bytes / MIB
        rows[last, at] = option.moved_bytes / trace.links.down_rate
        rows[last + 1, at] = option.moved_bytes / trace.links.up_rate
    for at, region in enumerate(regions, count + 2):
        # A share of a region lets go of the same share of each member, which is back from the first use on.
        uses = trace.span("use")
        first = min(uses[each] for each in region.members)
        for block in region.members:
            blocks[block, at] = 1
            for moment in range(first + 1, frees[block] + 1):
                rows[moment, at] += trace.blocks[block].nbytes / MIB
        until = min(first, *(frees[each] for each in region.members))
        for moment in range(max(saves[each] for each in region.members) + 1, until + 1):
            rows[moment, at] -= region.small_bytes / MIB
    rows[last, count] = rows[last + 1, count + 1] = -1
    most = [
        (budget - reserved[at > first_use] - moment.other_bytes) / MIB
        for at, moment in enumerate(trace.moments)
    ]
    forward = sum(moment.seconds for moment in trace.moments[:first_use])
    most += [forward + window / trace.links.down_rate, trace.compute_seconds - forward]
    constraints = [
        optimize.LinearConstraint(rows.tocsr(), -math.inf, most),
        optimize.LinearConstraint(blocks.tocsr(), 1, 1),
    ]
    are_whole = [0] * (count + 2) + [int(whole_regions)] * len(regions)
    found = optimize.milp(cost, constraints=constraints, integrality=are_whole)
    if found.status == 2:
        return math.inf
    assert found.status == 0
    return trace.compute_seconds + trace.beside_seconds(all_stay=False) + found.fun
