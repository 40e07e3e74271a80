"""A custom autograd Function whose saved tensors go to disk, with double backward.

Tensor-network programs decompose many matrices. Each decomposition saves its factors for backward,
until the graph needs more memory than there is. Here a chain of matrix square roots saves
eigenvectors: ``stash(square_root)`` sends what the Function saves, and nothing else, to disk.

    python examples/custom_function.py [--tiny] [--disk DIR]
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash import Stash


class SquareRoot(torch.autograd.Function):
    """The root of a symmetric positive matrix, by its eigenvalues and eigenvectors.

    The eigenvalues and eigenvectors are outputs also: double backward needs a backward that computes
    with saved inputs and outputs, since autograd can differentiate only that.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(matrix)
        ctx.save_for_backward(values, vectors)
        return vectors @ torch.diag(values.sqrt()) @ vectors.mT, values, vectors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad_root, grad_values, grad_vectors), (values, vectors) = grads, ctx.saved_tensors
        roots = values.sqrt()
        gaps = values - values.unsqueeze(-1)
        gaps = gaps.masked_fill(torch.eye(len(values), dtype=torch.bool), torch.inf)
        inner = vectors.mT @ grad_root @ vectors / (roots + roots.unsqueeze(-1))
        inner = inner + torch.diag(grad_values) + vectors.mT @ grad_vectors / gaps
        return vectors @ inner @ vectors.mT


def square_root(matrix: Tensor) -> Tensor:
    return SquareRoot.apply(matrix)[0]


def energy(sites: list[Tensor], root: Callable[[Tensor], Tensor]) -> Tensor:
    """Multiply the sites into a product, taking its square root after each."""
    product = torch.eye(len(sites[0]), dtype=sites[0].dtype)
    for site in sites:
        product = root(site @ product @ site.mT)
    return product.diagonal().log().sum()


def derivatives(sites: list[Tensor], root: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The energy, its gradient, and the gradient of that gradient's squared length."""
    value = energy(sites, root)
    first = torch.autograd.grad(value, sites, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), sites)
    return [value, *first, *second]


def make_sites(count: int, width: int) -> list[Tensor]:
    torch.manual_seed(0)
    noise = torch.randn(count, width, width, dtype=torch.float64) / width
    return [(torch.eye(width) + each).requires_grad_() for each in noise]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a directory on a disk")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same, for tests")
    options = parser.parse_args()
    sites = make_sites(4, 256) if options.tiny else make_sites(16, 320)

    plain = derivatives(sites, square_root)
    stash = Stash(disk=options.disk)
    stashed = derivatives(sites, stash(square_root))
    stats = stash.stats()
    stash.close()

    if not all(map(torch.equal, plain, stashed)):
        raise SystemExit("custom_function.py: a derivative differs")
    print(f"{len(sites)} square roots of {len(sites[0])} x {len(sites[0])} matrices")
    print(f"energy {plain[0].item()!r}")
    print("first and second derivatives: equal to the last bit")
    print(f"{stats.written_bytes:,} bytes went to disk")


if __name__ == "__main__":
    main()
