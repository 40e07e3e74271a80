"""The two-dimensional Ising model by tensor networks: specific heat by differentiating twice.

The partition function of the square lattice is a network of one small tensor at every site. The tensor
renormalization group (Levin and Nave, Phys. Rev. Lett. 99, 120601) contracts it: each step splits every
tensor by a singular value decomposition and joins four halves, so that half as many tensors are left.
Differentiating ln Z once gives the energy and twice the specific heat, through every decomposition
(Liao, Liu, Wang and Xiang, "Differentiable Programming Tensor Networks", arXiv 1903.09650). The tensors that
the decompositions and their derivatives save for backward fill the memory; here they are on disk.

    python examples/ising_trg.py [--tiny] [--disk DIR] [--json OUT.json] [--plot OUT.svg]
    python examples/ising_trg.py --compare --chi 30        # memory and time with and without the stash
"""

import argparse
import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backstash import Stash

BROADENING = 1e-12
SMALLEST = 1e-9  # a singular value smaller than this times the largest is left out


class Point(NamedTuple):
    """The results at one inverse temperature, for each site of the lattice."""

    beta: float
    log_z: float
    energy: float
    specific_heat: float


class StableSVD(torch.autograd.Function):
    """The singular value decomposition of a square matrix, with a derivative that is finite for equal values.

    The derivative has 1 / (s_j - s_i) in it, which is broadened to x / (x^2 + 1e-12): nothing that
    depends on the physics changes, since rotations among equal singular values cancel in the network.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(matrix)
        ctx.save_for_backward(u, s, vh)
        return u, s, vh

    @staticmethod
    def backward(ctx: Any, grad_u: Tensor, grad_s: Tensor, grad_vh: Tensor) -> Tensor:
        u, s, vh = ctx.saved_tensors
        inverse_gaps = inverse(s - s[:, None]) * inverse(s + s[:, None])
        inverse_gaps = inverse_gaps - torch.diag(inverse_gaps.diagonal())
        from_u = antisymmetric(u.mT @ grad_u) * inverse_gaps
        from_v = antisymmetric(vh @ grad_vh.mT) * inverse_gaps
        return u @ (from_u * s + s[:, None] * from_v + torch.diag(grad_s)) @ vh


def inverse(x: Tensor) -> Tensor:
    return x / (x * x + BROADENING)


def antisymmetric(matrix: Tensor) -> Tensor:
    return matrix - matrix.mT


def site_tensor(beta: Tensor) -> Tensor:
    """The weight of a site whose bonds up, right, down and left are in states 0 or 1."""
    both = torch.stack([beta.cosh(), beta.sinh()]).sqrt()
    bond = both * torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=beta.dtype)  # spin by bond state
    return torch.einsum("su,sr,sd,sl->urdl", bond, bond, bond, bond)


def halves(matrix: Tensor, chi: int) -> tuple[Tensor, Tensor]:
    """``matrix`` as a product of two, over its ``chi`` largest singular values."""
    u, s, vh = StableSVD.apply(matrix)
    kept = min(chi, int((s > SMALLEST * s[0]).sum()))
    roots = s[:kept].sqrt()
    return u[:, :kept] * roots, (roots[:, None] * vh[:kept]).mT


def coarser(tensor: Tensor, chi: int) -> Tensor:
    """One step: the sites of one colour are cut along one diagonal, the others along the other.

    Around every second plaquette four halves meet; joined over the plaquette's bonds they are one tensor
    of the new lattice, which is turned by 45 degrees.
    """
    up, right, down, left = tensor.shape
    north_west, south_east = halves(
        tensor.permute(3, 0, 1, 2).reshape(left * up, right * down), chi
    )
    south_west, north_east = halves(
        tensor.permute(3, 2, 0, 1).reshape(left * down, up * right), chi
    )
    return torch.einsum(
        "aew,abn,cbz,ecs->nzsw",
        south_east.view(right, down, -1),  # of the site at the plaquette's north-west corner
        south_west.view(left, down, -1),
        north_west.view(left, up, -1),
        north_east.view(up, right, -1),
    )


def log_z_per_site(beta: Tensor, chi: int, steps: int) -> Tensor:
    """ln Z per site of a lattice of 2^steps sites with periodic bounds."""
    tensor, log_z = site_tensor(beta), torch.zeros((), dtype=beta.dtype)
    for step in range(steps):
        scale = tensor.abs().max()
        log_z = log_z + scale.log() / 2**step
        tensor = coarser(tensor / scale, chi)
    return log_z + torch.einsum("urur->", tensor).log() / 2**steps


def solve(beta: float, chi: int, steps: int, stash: Stash | None) -> Point:
    """ln Z, the energy by one backward, and the specific heat by a second one through the first."""
    variable = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
    with stash if stash is not None else contextlib.nullcontext():
        log_z = log_z_per_site(variable, chi, steps)
        (slope,) = torch.autograd.grad(log_z, variable, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, variable)
    return Point(beta, log_z.item(), -slope.item(), beta**2 * curvature.item())


def onsager(beta: float, intervals: int = 1 << 16) -> Point:
    """The exact values for an infinite lattice (Onsager, Phys. Rev. 65, 117), away from the critical point."""
    tangent = math.tanh(2 * beta)
    small = 2 * tangent**2 - 1
    k_squared = 1 - small**2
    # The integrand is even and periodic, so the trapezoidal rule converges exponentially.
    angles = (math.pi * (i + 0.5) / intervals for i in range(intervals))
    mean = sum(math.log((1 + math.sqrt(1 - k_squared * math.sin(a) ** 2)) / 2) for a in angles)
    first, second = elliptic(abs(small))
    energy = -(1 + 2 / math.pi * small * first) / tangent
    inner = first - second - (1 - tangent**2) * (math.pi / 2 + small * first)
    heat = 4 / math.pi * (beta / tangent) ** 2 * inner
    return Point(beta, math.log(2 * math.cosh(2 * beta)) + mean / intervals / 2, energy, heat)


def elliptic(complement: float) -> tuple[float, float]:
    """The complete elliptic integrals K and E, by the arithmetic-geometric mean, for k' = ``complement``."""
    a, b, power = 1.0, complement, 0.5
    total = power * (1 - complement**2)
    while abs(a - b) > 1e-15 * a:
        a, b, c = (a + b) / 2, math.sqrt(a * b), (a - b) / 2
        power *= 2
        total += power * c * c
    first = math.pi / (2 * a)
    return first, first * (1 - total)


def rows(points: list[Point]) -> list[dict[str, float]]:
    """Each point with its differences from the exact values."""
    found = []
    for point in points:
        exact = onsager(point.beta)
        row = point._asdict()
        for name in ("log_z", "energy", "specific_heat"):
            row[f"{name}_error"] = abs(getattr(point, name) - getattr(exact, name))
        found.append(row)
    return found


def print_table(found: list[dict[str, float]]) -> None:
    print("   beta  temperature      ln Z   error    energy   error  specific heat   error")
    for row in found:
        print(
            f"{row['beta']:7.4f} {1 / row['beta']:12.4f} {row['log_z']:9.6f} {row['log_z_error']:.1e} "
            f"{row['energy']:9.6f} {row['energy_error']:.1e} {row['specific_heat']:14.6f} "
            f"{row['specific_heat_error']:.1e}"
        )


def plot(found: list[dict[str, float]], path: str) -> None:
    """The three quantities against temperature, over the exact curves."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'backstash[plot]'") from None

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = [1 / row["beta"] for row in found]
    low, high = min(temperatures), max(temperatures)
    grid = [low + (high - low) * (i + 0.5) / 200 for i in range(200)]
    exact = [onsager(1 / temperature, 1 << 11) for temperature in grid]
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axis, name in zip(axes, ("log_z", "energy", "specific_heat"), strict=True):
        axis.plot(grid, [getattr(point, name) for point in exact], label="exact")
        axis.plot(temperatures, [row[name] for row in found], "o", ms=4, label="network")
        axis.set(xlabel="temperature", title=name.replace("_", " ") + " per site")
    axes[0].legend()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chi", type=int, help="states of a bond (16)")
    parser.add_argument("--steps", type=int, help="the lattice has 2^STEPS sites (24)")
    parser.add_argument("--betas", help="inverse temperatures, with commas")
    parser.add_argument("--disk", metavar="DIR", help="where saved tensors go")
    parser.add_argument("--plain", action="store_true", help="keep saved tensors in memory")
    parser.add_argument("--compare", action="store_true", help="one temperature, plain and on disk")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the numbers (needs matplotlib)")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same, for tests")
    options = parser.parse_args()
    options.chi = options.chi or (4 if options.tiny else 16)
    options.steps = options.steps or (12 if options.tiny else 24)
    several = "0.3,0.35,0.4,0.42,0.46,0.48,0.52,0.6"
    chosen = options.betas or (
        "0.3,0.55" if options.tiny else "0.42" if options.compare else several
    )
    options.betas = [float(beta) for beta in chosen.split(",")]
    return options


def measure(options: argparse.Namespace, directory: str, plain: bool) -> dict[str, Any]:
    """Run this program in a process of its own; its numbers, seconds, and peak of resident memory."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [
            sys.executable,
            __file__,
            "--chi",
            str(options.chi),
            "--steps",
            str(options.steps),
        ]
        command += ["--betas", ",".join(map(str, options.betas)), "--disk", directory]
        command += ["--json", file.name, *(["--plain"] if plain else [])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.load(file)
    return found


def compare(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    runs = {name: measure(options, directory, name == "plain") for name in ("plain", "stash")}
    for name, run in runs.items():
        moved = f", {run['written_bytes'] / 1e9:.2f} GB written" if name == "stash" else ""
        times = f"{run['seconds']:.1f} s ({run['cpu_seconds']:.1f} s of processor)"
        print(f"{name}: {times}, {run['peak_bytes'] / 1e9:.2f} GB at its peak{moved}")
    same = runs["plain"]["points"] == runs["stash"]["points"]
    print("the numbers are equal to the last bit" if same else "the numbers DIFFER")
    if not same:
        raise SystemExit(1)
    return {"chi": options.chi, "steps": options.steps, "runs": runs}


def run(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    stash = None if options.plain else Stash(disk=directory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu_started = time.perf_counter(), time.process_time()
    points = [solve(beta, options.chi, options.steps, stash) for beta in options.betas]
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found = rows(points)
    print_table(found)
    written = stash.stats().written_bytes if stash is not None else 0
    if stash is not None:
        stash.close()
    return {
        "chi": options.chi, "steps": options.steps, "points": found, "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu_started, "peak_bytes": peak * 1024,
        "written_bytes": written,
    }  # fmt: skip


def main() -> None:
    options = parse_arguments()
    with contextlib.ExitStack() as stack:
        directory = options.disk or stack.enter_context(tempfile.TemporaryDirectory())
        result = (compare if options.compare else run)(options, directory)
    result["machine"] = (
        f"{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    if options.plot:
        plot(result["points"], options.plot)


if __name__ == "__main__":
    main()
