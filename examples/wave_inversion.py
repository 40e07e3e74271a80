"""Recover a medium's velocity from recorded waves: a gradient through thousands of time steps.

A 2-D acoustic wave runs through a medium with a hidden fast disc; receivers record it. The program starts from
an even velocity and descends along the gradient of the difference, which goes through every time step, within
a tenth of the bytes that the plain loop saves.

    python examples/wave_inversion.py [--tiny] [--steps N] [--iterations N] [--picture FILE]
"""

import argparse
import functools
import time

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
    near = torch.linspace(0, 1, size // 8).pow(2) * 0.03
    edge = torch.zeros(size)
    edge[: size // 8], edge[-(size // 8) :] = near.flip(0), near
    return torch.exp(-(edge[:, None] + edge[None, :]))


def step(
    state: tuple[Tensor, Tensor], number: int, medium: Tensor, damping: Tensor, sources: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One step of the wave equation; its output is what the receivers hear."""
    now, before = state
    bent = F.conv2d(now[:, None], KERNEL, padding=1)[:, 0]
    pulse = (1 - 2 * (0.15 * (number - 20)) ** 2) * 2.718 ** (-((0.15 * (number - 20)) ** 2))
    after = (2 * now - before * damping + medium * bent + sources * pulse) * damping
    return (after, now), after[:, 3, :]


def shoot(medium: Tensor, steps: int, **budget: object) -> Tensor:
    """What the receivers along one side hear of each source: steps x sources x receivers."""
    size = len(medium)
    sources = torch.zeros(3, size, size)
    for shot, place in enumerate((size // 4, size // 2, 3 * size // 4)):
        sources[shot, size - 4, place] = 1.0
    start = (torch.zeros_like(sources), torch.zeros_like(sources))
    _, heard = checkpoint_loop(
        step, start, steps, medium, sponge(size), sources, index=True, ys=True, **budget
    )
    return heard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small medium and few steps")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--iterations", type=int, default=None)
    parser.add_argument("--picture", help="write the media as a picture (needs matplotlib)")
    given = parser.parse_args()
    size = 32 if given.tiny else 64
    steps = given.steps or (120 if given.tiny else 10_000)
    iterations = given.iterations or (3 if given.tiny else 10)

    truth = true_medium(size)
    with torch.no_grad():
        recorded = shoot(truth, steps)
    state_bytes = 2 * 3 * size * size * 4
    budget = steps * state_bytes // 20  # the plain loop holds half of every state for its backward
    medium = torch.full_like(truth, COURANT).requires_grad_()
    run = functools.partial(shoot, steps=steps, memory=budget)
    rate = 0.0
    for iteration in range(iterations):
        begun = time.perf_counter()
        loss = (run(medium) - recorded).pow(2).sum()
        (slope,) = torch.autograd.grad(loss, medium)
        with torch.no_grad():
            rate = rate or 0.02 * COURANT / slope.abs().max().item()
            medium -= rate * slope
            medium.clamp_(0.8 * COURANT, 1.4 * COURANT)
        error = (medium - truth).norm() / (truth - COURANT).norm()
        print(
            f"iteration {iteration} loss {loss.item():.6g} medium's error {error:.3f} "
            f"{time.perf_counter() - begun:.1f} s"
        )
    print(f"{steps} steps within {budget / 2**20:.3g} MiB")
    if given.picture:
        draw(truth, medium.detach(), given.picture)


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
