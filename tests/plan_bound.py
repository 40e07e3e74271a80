"""The least that any choice of a plan can take, by another's solver: SciPy's."""

import math
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
    """The least seconds of any choice, fractions of a block allowed.

    To keep a block takes nothing if every one that is saved after it is kept, too: these are left alone, and
    the program says from where on. Those before are looked at, as `Problem.taken` has it.

    Args:
        trace: of the step.
        budget: in bytes.
        window: bytes that may be on their way down after the last save.
        reserved: bytes of the budget that what is on its way takes, in forward and in backward: windows that
            are full. A block that is larger than its window is waited for. Without them what moves is in
            memory only from its use to its free.
        whole_regions: each runs again whole or not at all; else fractions of one are allowed, too.

    Infinite where nothing fits.
    """
    saves, uses, frees = (trace.span(kind) for kind in ("save", "use", "free"))
    first_use = next(at for at, moment in enumerate(trace.moments) if moment.kind == "use")
    variables = [
        (b, option) for b, block in enumerate(trace.blocks) for option in block.options.values()
    ]
    kept = [block.options["keep"] for block in trace.blocks]
    looked = [each.save_seconds + each.use_seconds for each in kept]  # at each that is kept
    count, last, regions = len(variables), len(trace.moments), trace.regions
    cost = [option.save_seconds + option.use_seconds for _, option in variables] + [1, 1]
    if any(reserved):
        for at, (_, option) in enumerate(variables):
            for fits, rate in zip(
                reserved, (trace.links.down_rate, trace.links.up_rate), strict=True
            ):
                cost[at] += option.moved_bytes / rate if option.moved_bytes > fits else 0.0
    cost += [each.save_seconds + each.use_seconds for each in regions]
    shares = len(cost)  # from here on: of each block, how far it is looked at
    cost += looked
    rows = sparse.lil_matrix((last + 2, len(cost)))
    blocks = sparse.lil_matrix((len(trace.blocks), len(cost)))
    # One that goes is looked at, and so is each that is saved before it is saved for the last time.
    order = sparse.lil_matrix((2 * len(trace.blocks), len(cost)))
    for block, each in enumerate(trace.blocks):
        until = max(block + 1, each.saved_until + 1 if each.saved_until else 0) - 1
        order[2 * block, shares + min(until, len(kept) - 1)] = 1
        if block:
            order[2 * block + 1, shares + block - 1] = 1
            order[2 * block + 1, shares + block] = -1
    for at, (block, option) in enumerate(variables):
        blocks[block, at] = 1
        if option is kept[block]:
            order[2 * block, at] = 1
        if option.resident_bytes:
            for moment in range(saves[block] + 1, frees[block] + 1):
                rows[moment, at] = option.resident_bytes / MIB
        back = option.made_bytes + (0 if any(reserved) else option.moved_bytes)
        if back and block in uses:
            for moment in range(uses[block] + 1, frees[block] + 1):
                rows[moment, at] += back / MIB
        rows[last, at] = option.moved_bytes / trace.links.down_rate
        rows[last + 1, at] = option.moved_bytes / trace.links.up_rate
    for at, region in enumerate(regions, count + 2):
        # A share of a region frees the same share of each member, which is back from the first use on.
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
    to_last_save = sum(moment.seconds for moment in trace.moments[: max(saves.values()) + 1])
    to_first_use = sum(moment.seconds for moment in trace.moments[:first_use])
    most += [
        to_last_save + window / trace.links.down_rate,
        trace.compute_seconds - to_first_use,
    ]
    constraints = [
        optimize.LinearConstraint(rows.tocsr(), -math.inf, most),
        optimize.LinearConstraint(blocks.tocsr(), 1, 1),
    ]
    gone = [1, 0] * len(kept)  # the share that goes, and the one that is kept, are one block
    constraints.append(optimize.LinearConstraint(order.tocsr(), gone, math.inf))
    are_whole = [0] * (count + 2) + [int(whole_regions)] * len(regions) + [1] * len(kept)
    found = optimize.milp(cost, constraints=constraints, integrality=are_whole)
    if found.status == 2:
        return math.inf
    assert found.status == 0
    return trace.compute_seconds + trace.extra_seconds(all_stay=False) + found.fun - sum(looked)
