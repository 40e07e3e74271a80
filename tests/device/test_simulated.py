"""The stash's real streams and events, on an accelerator that is simulated: see ``simulated/device.cpp``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import simulated
from gpu_checks import CHECKS
from long_tests import IS_ASKED_FOR, mostly_long, takes_long

HERE = Path(__file__).parent.parent
RUNS = {"late": "0.03,1", "soon": "0.4,3"}


@pytest.fixture(scope="session", autouse=True)
def library() -> None:
    """Built once."""
    try:
        simulated.build()
    except simulated.CannotBuild as reason:
        pytest.skip(str(reason))


SEEDS = """
import sys
sys.path.insert(0, HERE)
import torch, simulated
device = simulated.register()
main = torch.accelerator.current_stream()
for seed in range(4):
    torch.accelerator.set_stream(main)
    simulated.begin(CHANCE, seed)
    exec(PROGRAM)
    print(*simulated.faults())
"""


def run(program: str, chance: float) -> list[str]:
    """What is found out in four runs of a program. In a process that has the device for good."""
    script = SEEDS.replace("HERE", repr(str(HERE))).replace("CHANCE", str(chance))
    done = subprocess.run(
        [sys.executable, "-c", script.replace("PROGRAM", repr(program))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


RACES = {
    "another stream reads at once": """
x = torch.ones(100, device=device) * 2
torch.accelerator.set_stream(torch.Stream(device))
y = x + 1
""",
    "the host reads at once": """
x = torch.ones(100, device=device)
torch.accelerator.set_stream(torch.Stream(device))
y = x.cpu()
""",
    "memory is used again by the stream that asked": """
main, side = torch.accelerator.current_stream(), torch.Stream(device)
x = torch.ones(100, device=device)
side.wait_stream(main)
torch.accelerator.set_stream(side)
y = x + 1
torch.accelerator.set_stream(main)
del x
z = torch.zeros(100, device=device)
""",
    "a copy up reads what the host has changed": """
x, y = torch.ones(100), torch.empty(100, device=device)
y.copy_(x, non_blocking=True)
x.zero_()
""",
    "a copy down is read before it has run": """
x, y = torch.ones(100, device=device), torch.ones(100)
y.copy_(x, non_blocking=True)
print("garbage " * (not torch.equal(y, torch.ones(100))), end="")
""",
    "what a copy fills is freed": """
y = torch.empty(100)
y.copy_(torch.ones(100, device=device), non_blocking=True)
del y
""",
}


@pytest.mark.parametrize("race", mostly_long(RACES, *[*RACES][2:4]))
def test_a_race_is_seen(race: str) -> None:
    seen = run(RACES[race], chance=0)
    assert any(line.strip() for line in seen), "no fault in any order"


def test_what_is_ordered_is_no_race() -> None:
    program = """
side = torch.Stream(device)
x = torch.ones(100, device=device)
side.wait_stream(main)
torch.accelerator.set_stream(side)
x.record_stream(side)
y = x + 1
torch.accelerator.set_stream(main)
del x
z = torch.zeros(100, device=device)
main.wait_stream(side)
y.record_stream(main)
host = torch.empty(100)
host.copy_(y * z + y, non_blocking=True)
main.synchronize()
print(host.sum().item(), simulated.reads() > 4, end="")
"""
    assert run(program, chance=0.1) == ["200.0 True"] * 4


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """What each check came to, for each way the device runs."""
    runs = RUNS if IS_ASKED_FOR else {"late": RUNS["late"]}
    outs = {name: tmp_path_factory.mktemp("simulated") / "found.json" for name in runs}
    runner = [sys.executable, HERE / "gpu_runner.py", "--seconds", "400", "--simulated"]
    running = [
        subprocess.Popen([*runner, how, "--out", outs[name]], stdout=subprocess.DEVNULL)
        for name, how in runs.items()
    ]
    for process in running:
        process.wait(timeout=500)
    return {name: json.loads(out.read_text()) for name, out in outs.items()}


@takes_long
@pytest.mark.timeout(300)
def test_random_programs_on_several_streams() -> None:
    """``scripts/soak_programs.py --simulated`` is the long form."""
    soak = [sys.executable, HERE.parent / "scripts" / "soak_programs.py", "--simulated", "0.1"]
    done = subprocess.run(
        [*soak, "--programs", "25", "--seed", "7"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "25 programs  equal" in done.stdout


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="backwards lend no context there")
def test_a_process_waits_for_the_engine_before_it_ends() -> None:
    """Else the thread that frees the context, slowly here, would be stopped amid C++, where it is last."""
    program = """
import contextvars, time

class Slow:
    def __del__(self):
        time.sleep(0.3)

def backward():
    contextvars.ContextVar("held").set(Slow())
    torch.ones(100, device=device, requires_grad=True).exp().sum().backward()

contextvars.copy_context().run(backward)
print("done", end="")
"""
    for _ in range(3 if IS_ASKED_FOR else 1):
        assert run(program, chance=0.1) == ["done"] * 4


@takes_long
def test_the_benchmark_of_copies_under_way_runs() -> None:
    program = f"""
import sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent / "benchmarks")!r}]
import simulated
simulated.register()
simulated.begin(0.1, 0)
import blocks_under_way
blocks_under_way.main(["--blocks", "8", "--repeats", "1"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[-5] for row in rows] == ["8"] * 3 and len(rows) == 3


@pytest.mark.timeout(900)  # the first asks for all of them
@pytest.mark.parametrize("how", mostly_long(RUNS, "late"))
@pytest.mark.parametrize("check", CHECKS)
def test_a_check(check: str, how: str, results: dict[str, dict[str, dict[str, str]]]) -> None:
    found = results[how][check]
    if found["result"] == "skipped":
        pytest.skip(found["words"])
    assert found["result"] == "passed", found["words"]
