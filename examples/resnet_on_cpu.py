"""Train a ResNet-152 in less memory than it needs.

The program trains twice under a memory limit, each time in a process of its own. Without a stash
the process ends when the saved tensors of the forward pass do not fit; with the saved tensors on
disk it finishes.

    python examples/resnet_on_cpu.py [--tiny] [--disk DIR]
"""

import argparse
import sys
import tempfile
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backstash import Stash
from memory_limit import run_limited

MIB = 1 << 20
CLASSES = 10


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1: three convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs or stride != 1:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


def make_resnet(depths: tuple[int, ...]) -> nn.Sequential:
    """The four stages of Bottlenecks between a stem and a classifier; (3, 8, 36, 3) is 152 deep."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers, inputs = [*stem, nn.MaxPool2d(3, 2, 1)], 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(Bottleneck(inputs, 64 << stage, stride))
            inputs = 4 * (64 << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def train(options: argparse.Namespace) -> None:
    """A few steps on one batch of noise, whose labels the network learns by heart."""
    torch.manual_seed(0)
    torch.set_num_threads(min(4, torch.get_num_threads()))  # each thread takes memory of its own
    model = make_resnet((6, 4, 1, 1) if options.tiny else (3, 8, 36, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    images = torch.randn(options.batch, 3, options.size, options.size)
    labels = torch.randint(CLASSES, (options.batch,))
    stash = Stash(disk=options.disk, inflight="32MiB", prefetch="32MiB")
    for _ in range(options.steps):
        with stash if options.child == "stash" else nullcontext():
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item()!r}", flush=True)
    print(f"{stash.stats().written_bytes / MIB:,.0f} MiB went to disk")
    stash.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=1280, help="the limit in MiB")
    parser.add_argument("--batch", type=int, default=96, help="images a step")
    parser.add_argument("--size", type=int, default=64, help="an image's height and width")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a directory on a disk")
    parser.add_argument("--tiny", action="store_true", help="a shallower one, for tests")
    parser.add_argument("--child", choices=("plain", "stash"), help=argparse.SUPPRESS)
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(limit=600, batch=48)
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    if options.child:
        train(options)
        return 0
    outcomes = {}
    for child in ("plain", "stash"):
        command = [sys.executable, *sys.argv, "--child", child]
        outcome = outcomes[child] = run_limited(command, options.limit * MIB)
        print(f"{child}, {options.limit} MiB by {outcome.limited_by}: {outcome.how}")
        print(outcome.output, end="", flush=True)
    return 0 if outcomes["stash"].finished and not outcomes["plain"].finished else 1


if __name__ == "__main__":
    raise SystemExit(main())
