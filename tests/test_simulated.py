"""The stash's real streams and events, on an accelerator that is simulated: see ``simulated/device.cpp``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import simulated
from gpu_checks import CHECKS

HERE = Path(__file__).parent
RUNS = {"late": "0.03,1", "soon": "0.4,3"}


@pytest.fixture(scope="session", autouse=True)
def library() -> None:
    """Built once."""
    try:
        simulated.build()
    except simulated.CannotBuild as reason:
        pytest.skip(str(reason))


def run(program: str) -> str:
    """What a program prints that has the device, which is a process's for good."""
    prelude = f"import sys; sys.path.insert(0, {str(HERE)!r})\nimport torch, simulated\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + "device = simulated.register()\n" + program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
print("garbage" if not torch.equal(y, torch.ones(100)) else "")
""",
    "what a copy fills is let go": """
y = torch.empty(100)
y.copy_(torch.ones(100, device=device), non_blocking=True)
del y
""",
}


@pytest.mark.parametrize("race", RACES)
def test_a_race_is_seen(race: str) -> None:
    told = "simulated.begin(0, SEED)" + RACES[race] + "print(*simulated.faults())"
    seen = [run(told.replace("SEED", str(seed))).strip() for seed in range(4)]
    assert any(seen), "no fault in any order"


def test_what_is_ordered_is_no_race() -> None:
    program = """
main, side = torch.accelerator.current_stream(), torch.Stream(device)
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
print(host.sum().item(), simulated.faults(), simulated.reads() > 4)
"""
    for seed in range(4):
        assert run(f"simulated.begin(0.1, {seed})\n{program}") == "200.0 [] True\n"


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """What each check came to, for each way the device runs."""
    found = {}
    for name, how in RUNS.items():
        out = tmp_path_factory.mktemp("simulated") / "found.json"
        runner = [sys.executable, HERE / "gpu_runner.py", "--simulated", how, "--out", out]
        subprocess.run(runner, capture_output=True, timeout=280)
        found[name] = json.loads(out.read_text())
    return found


@pytest.mark.timeout(900)  # the first asks for all of them
@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_check(check: str, how: str, results: dict[str, dict[str, dict[str, str]]]) -> None:
    found = results[how][check]
    if found["result"] == "skipped":
        pytest.skip(found["words"])
    assert found["result"] == "passed", found["words"]
