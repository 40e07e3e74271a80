"""PyTorch's pipeline schedules on two processes: gradients are plain's, and what is kept is needed next."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

from backstash import Stash

WIDTH, ROWS, MICROBATCHES, STEPS = 32, 64, 4, 2
KEEP_BYTES = 64 << 10
# The schedule, how many stages a process has, and whether the second half of them runs in reverse (a V).
SCHEDULES = {
    schedules.ScheduleGPipe: (1, False),
    schedules.Schedule1F1B: (1, False),
    schedules.ScheduleInterleaved1F1B: (2, False),
    schedules.ScheduleInterleavedZeroBubble: (2, False),
    schedules.ScheduleZBVZeroBubble: (2, True),
}


class Part(nn.Module):
    """The layers of one stage."""

    def __init__(self, number, checkpointed):
        super().__init__()
        torch.manual_seed(number)
        self.checkpointed = checkpointed
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)


def gradients(kind, rank, hold, checkpointed=False):
    """Those of this process's stages after two steps of a schedule."""
    count, is_v = SCHEDULES[kind]
    numbers = [rank, 3 - rank] if is_v else [rank + 2 * index for index in range(count)]
    parts = [Part(number, checkpointed) for number in numbers]
    total = 2 * count
    stages = [
        PipelineStage(part, number, total, torch.device("cpu"))
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = kind(
        stages[0] if count == 1 else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, target = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
        given = (x,) if 0 in numbers else ()
        wanted = {"target": target} if total - 1 in numbers else {}
        with hold:
            schedule.step(*given, **wanted)
    return [parameter.grad.clone() for part in parts for parameter in part.parameters()]


def same(true, mine):
    return len(true) == len(mine) and all(map(torch.equal, true, mine))


def check(rank, directory):
    read = {}
    for kind in SCHEDULES:
        for checkpointed in (False, True):
            true = gradients(kind, rank, nullcontext(), checkpointed)
            for keep_bytes in (0, KEEP_BYTES):
                stash = Stash(keep=keep_bytes, disk=directory, min_bytes=0, inflight=0)
                mine = gradients(kind, rank, stash, checkpointed)
                assert same(true, mine), (kind, checkpointed, keep_bytes)
                stats = stash.stats()
                assert stats.written_bytes > 0 or checkpointed or keep_bytes, (kind, stats)
                least = max(0, stats.eligible_bytes - STEPS * keep_bytes)
                assert stats.written_bytes <= 1.2 * least, (kind, checkpointed, keep_bytes, stats)
                read[kind, checkpointed, keep_bytes] = stats.read_bytes
                stash.close()
    # The same stages, with backward in two parts or in one: what both parts need is read once.
    for checkpointed in (False, True):
        whole = read[schedules.ScheduleInterleaved1F1B, checkpointed, 0]
        parts = read[schedules.ScheduleInterleavedZeroBubble, checkpointed, 0]
        assert parts <= 1.05 * whole, read
