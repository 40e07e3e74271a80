"""Recover a medium's velocity from recorded waves: a gradient through thousands of time steps.

Shots are fired one after another around a medium with a hidden fast disc; receivers record the 2-D acoustic
waves. The program starts from an even velocity and descends along the gradient of the difference, which goes
through every time step, with a budget of a sixtieth of the memory that the plain loop takes (``--plain``,
with the same gradients).

    python examples/wave_inversion.py [--tiny] [--plain] [--steps N] [--iterations N] [--picture FILE]
"""

import argparse
import math
import resource
import time
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from backstash.graph import checkpoint_loop

KERNEL = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]).view(1, 1, 3, 3)
COURANT = 0.25  # the even medium's velocity times the time step over the spacing, squared


def true_medium(size: int) -> Tensor:
    """The squared Courant number at each point: a disc is faster by a fifth."""
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    disc = (rows - size * 0.5) ** 2 + (columns - size * 0.55) ** 2 < (size * 0.15) ** 2
    return COURANT * (1 + 0.2 * disc.float())


def sponge(size: int) -> Tensor:
    """A factor below 1 near the edge, where waves are to end."""
    near = torch.linspace(0, 1, size // 8).pow(2) * 0.15
    edge = torch.zeros(size)
    edge[: size // 8], edge[-(size // 8) :] = near.flip(0), near
    return torch.exp(-(edge[:, None] + edge[None, :]))


def shot_every(size: int) -> int:
    """Steps from one shot to the next: in half as many a wave has crossed the medium."""
    return 25 * size // 8


def shot_places(size: int, shots: int) -> list[tuple[int, int]]:
    """Where each shot is fired: on the four sides in turn, further along from round to round."""
    near, far, rounds = size // 8, size - 1 - size // 8, -(-shots // 4)
    found = []
    for shot in range(shots):
        along = near + (far - near) * (shot // 4 * 2 + 1) // (2 * rounds)
        found.append([(near, along), (along, far), (far, along), (along, near)][shot % 4])
    return found


def step(
    state: tuple[Tensor, Tensor],
    number: int,
    medium: Tensor,
    damping: Tensor,
    places: list[tuple[int, int]],
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One step of the wave equation; its output is what the receivers along the four sides hear."""
    now, before = state
    size, shot_steps = len(medium), shot_every(len(medium))
    bent = F.conv2d(now[None, None], KERNEL, padding=1)[0, 0]
    source = torch.zeros(size, size)
    since = 0.15 * (number % shot_steps - 20)
    source[places[number // shot_steps]] = (1 - 2 * since**2) * math.exp(-(since**2))
    after = (2 * now - before * damping + medium * bent + source) * damping
    near, far = size // 8, size - 1 - size // 8
    return (after, now), torch.cat([after[near], after[far], after[:, near], after[:, far]])


def misfit(
    state: tuple[Tensor, Tensor], number: int, recorded: Tensor, *args: Any
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One step; its output is how far what the receivers hear is from what was recorded."""
    state, heard = step(state, number, *args)
    return state, (heard - recorded).pow(2).sum()


def shoot(medium: Tensor, steps: int, recorded: Tensor | None = None, **budget: object) -> Tensor:
    """What the receivers hear while one shot is fired after the other: steps x receivers.

    With what was recorded: each step's misfit.
    """
    size = len(medium)
    args = (medium, sponge(size), shot_places(size, -(-steps // shot_every(size))))
    state = (torch.zeros(size, size), torch.zeros(size, size))
    run = step if recorded is None else misfit
    if budget:
        _, ys = checkpoint_loop(
            run, state, steps, *args, index=True, xs=recorded, ys=True, **budget
        )
        return ys
    ys = []
    for number in range(steps):
        state, y = run(state, number, *(() if recorded is None else (recorded[number],)), *args)
        ys.append(y)
    return torch.stack(ys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small medium and few steps")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--iterations", type=int, default=None)
    parser.add_argument("--plain", action="store_true", help="the plain loop, to compare with")
    parser.add_argument("--picture", help="write the media as a picture (needs matplotlib)")
    given = parser.parse_args()
    size = 24 if given.tiny else 96
    steps = given.steps or (300 if given.tiny else 10_000)
    iterations = given.iterations or (3 if given.tiny else 12)

    even = torch.full((size, size), COURANT)
    first = even.clone().requires_grad_()
    shoot(first, 20, memory="1MiB").sum().backward()  # loads libraries, as does the next line
    torch.optim.Adam([first]).step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    truth = true_medium(size)
    budget = steps * size * size * 4 // 10  # the plain loop takes six fields for each step
    held = {} if given.plain else {"memory": budget}
    with torch.no_grad():
        recorded = shoot(truth, steps, **held)
    medium = even.requires_grad_()
    descent = torch.optim.Adam([medium], lr=0.02 * COURANT)
    for iteration in range(iterations):
        begun = time.perf_counter()
        loss = shoot(medium, steps, recorded, **held).sum()
        descent.zero_grad()
        loss.backward()
        bits = zlib.crc32(bytes(medium.grad.view(torch.uint8).flatten().tolist()))
        descent.step()
        with torch.no_grad():
            medium.clamp_(0.8 * COURANT, 1.4 * COURANT)
            error = (medium - truth).norm() / (truth - COURANT).norm()
        del loss
        risen = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(
            f"iteration {iteration} medium's error {error:.3f} gradient {bits:08x} "
            f"peak {risen:.0f} MiB over the start {time.perf_counter() - begun:.1f} s",
            flush=True,
        )
        if given.picture:
            draw(truth, medium.detach(), given.picture)
    if not given.plain:
        print(f"{steps} steps, memory={budget / 2**20:.3g} MiB")


def draw(truth: Tensor, found: Tensor, path: str) -> None:
    """The true medium beside the one that was found."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 4), layout="constrained")
    for panel, medium, title in zip(panels, (truth, found), ("true", "found"), strict=True):
        velocity = (medium / COURANT).sqrt().tolist()
        image = panel.imshow(velocity, vmin=0.95, vmax=1.1)
        panel.set_title(f"velocity, {title}")
    figure.colorbar(image, ax=panels)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
