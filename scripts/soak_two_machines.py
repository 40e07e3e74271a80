#!/usr/bin/env python
"""One job on two machines, as far as one machine can play them: Linux, as root, iproute2.

    scripts/soak_two_machines.py               # says why, and ends with 0, where it cannot be run

Each machine is a network namespace of its own, in which nothing is but its loopback and one end of a virtual
cable to the other; a directory for the disk tier of its own; and a `torchrun` with two processes. The job is
one: four ranks, DDP, FSDP2 over all four, and a pipeline of four stages across the cable
(`under_load/two_machines_job.py`, which knows nothing of backstash). It runs plain and under `backstash run`:

- the gradients of all ranks are those of the plain job, to the bit;
- each machine prints a summary of its own ranks, and each of them has a file and wrote;
- afterwards the directories are empty.

Then every process of the second machine is killed while the job runs: those of the first end with an error, and
both directories are empty.

What this cannot show: two kernels, two clocks, a shared file system; a network that is slow, loses packets or
is cut (then a collective waits for its timeout).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

JOB = Path(__file__).resolve().parent / "under_load" / "two_machines_job.py"
PROCESSES, PORT, WAIT_SECONDS = 2, 29511, 300
FORWARD_BYTES = 4 << 20  # more than is there before the ranks are connected


def reason_against() -> str:
    """Why this cannot be run here; ``""``: it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no command `ip` (Debian: apt install iproute2)"
    tried = subprocess.run(
        ["ip", "netns", "add", "backstash-tried"], capture_output=True, text=True
    )
    if tried.returncode:
        return tried.stderr.strip()
    ip("netns", "del", "backstash-tried")
    return ""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Machine:
    """A network namespace at one end of the cable, with a directory."""

    def __init__(self, number: int, directory: Path) -> None:
        self.number, self.name = number, f"backstash-{os.getpid()}-{number}"
        self.cable, self.address = f"bs{os.getpid() % 100000}-{number}", f"10.211.0.{number + 1}"
        self.disk = directory / f"disk-{number}"
        self.disk.mkdir()
        ip("netns", "add", self.name)

    def plug_in(self) -> None:
        ip("link", "set", self.cable, "netns", self.name)
        inside = ("-n", self.name)
        ip(*inside, "addr", "add", f"{self.address}/24", "dev", self.cable)
        ip(*inside, "link", "set", self.cable, "up")
        ip(*inside, "link", "set", "lo", "up")

    def start(self, first: Machine, before: list[str]) -> subprocess.Popen[str]:
        """Its `torchrun`, with ``before`` in front of the job."""
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--node-rank", str(self.number), "--nproc-per-node"]
        command += [str(PROCESSES), "--master-addr", first.address, "--master-port", str(PORT)]
        return subprocess.Popen(
            [*command, *before, str(JOB)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": self.cable, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def left(self) -> list[str]:
        return sorted(path.name for path in self.disk.rglob("*"))

    def kill(self) -> None:
        """As if its power failed; but its kernel notifies what it has connected to."""
        command = ["ip", "netns", "pids", self.name]
        for pid in subprocess.run(command, capture_output=True, text=True).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        self.kill()
        subprocess.run(["ip", "netns", "del", self.name], check=False)


def under_backstash(machine: Machine, figures: Path) -> list[str]:
    options = ["--disk", str(machine.disk), "--keep", "0", "--malloc", "none"]
    return ["-m", "backstash", "run", *options, "--json", str(figures / f"{machine.number}.json")]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    found = []
    for process in processes:
        out, errors = process.communicate(timeout=600)
        found.append((process.returncode, out, errors))
    return found


def gradients(machines: list[Machine], figures: Path | None) -> tuple[str, list[str]]:
    """The line that rank 0 prints, of the plain job or of that under `backstash run`; what machines say."""
    first = machines[0]
    starts = [
        each.start(first, under_backstash(each, figures) if figures is not None else [])
        for each in machines
    ]
    results = ended(starts)
    if any(code for code, _, _ in results):
        raise SystemExit("\n".join(errors[-2000:] for _, _, errors in results))
    line = next(line for line in results[0][1].splitlines() if line.startswith("machines"))
    return line, [errors for _, _, errors in results]


def written(figures: Path) -> dict[str, int]:
    """Bytes that each rank wrote, by the name of its file, which begins with its machine's number."""
    files = sorted(figures.glob("*.rank*.json"))
    found = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files}
    return {name: each["stats"]["written_bytes"] for name, each in found.items()}


def main() -> int:
    why = reason_against()
    if why:
        print(f"skipped: {why}")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        figures = Path(directory, "figures")
        figures.mkdir()
        machines = [Machine(number, Path(directory)) for number in range(2)]
        try:
            cables = [each.cable for each in machines]
            ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
            for each in machines:
                each.plug_in()
            return attack(machines, figures)
        finally:
            for each in machines:
                each.remove()


def attack(machines: list[Machine], figures: Path) -> int:
    problems = []
    (plain, _), (held, said) = gradients(machines, None), gradients(machines, figures)
    print(f"plain:         {plain}\nbackstash run: {held}")
    if plain != held or not plain.startswith(f"machines 2 ranks {2 * PROCESSES} "):
        problems.append("the gradients differ, or it was not one job of two machines")
    files = written(figures)
    for name, nbytes in files.items():
        print(f"{name}: {nbytes / 2**20:.0f} MiB written")
    if list(files) != ["0.rank0.json", "0.rank1.json", "1.rank2.json", "1.rank3.json"]:
        problems.append("not each rank has a file")
    for ranks, text in zip(("0-1", "2-3"), said, strict=True):
        if f"backstash: ranks {ranks} of 4: " not in text:
            problems.append(f"there is no summary of ranks {ranks}")
    if not all(files.values()):
        problems.append("a rank wrote nothing")
    problems += left_on(machines, "after the job")
    problems += loss(machines, figures)
    for problem in problems:
        print(f"FAILED: {problem}")
    return int(bool(problems))


def left_on(machines: list[Machine], when: str) -> list[str]:
    found = [
        f"left {when} on machine {each.number}: {each.left()}" for each in machines if each.left()
    ]
    if not found:
        print(f"{when}: both directories are empty")
    return found


def loss(machines: list[Machine], figures: Path) -> list[str]:
    """Every process of the second machine is killed when both machines have bytes on disk."""
    first, second = machines
    starts = [each.start(first, under_backstash(each, figures)) for each in machines]
    deadline = time.monotonic() + WAIT_SECONDS
    while not all(map(has_bytes, machines)):
        if time.monotonic() > deadline or any(each.poll() is not None for each in starts):
            return ["the job ended before it wrote anything"]
        time.sleep(0.01)
    second.kill()
    codes = [code for code, _, _ in ended(starts)]
    print(f"the second machine was killed: torchrun ended with {codes[0]} on the first")
    problems = left_on(machines, "after that")
    return problems + ([] if codes[0] else ["the first machine ended with 0"])


def has_bytes(machine: Machine) -> bool:
    """Whether a process has an unnamed file in the machine's directory, in which a forward's bytes are."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(f"{machine.disk}/"):
                if link.stat().st_blocks * 512 > FORWARD_BYTES:
                    return True
        except OSError:
            continue
    return False


if __name__ == "__main__":
    sys.exit(main())
