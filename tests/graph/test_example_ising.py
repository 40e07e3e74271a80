"""``examples/ising_trg.py``: exact physics, true derivatives, the same numbers with and without a stash."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import Stash
from backstash.graph import iter_graph, saved
from long_tests import takes_long

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ising_trg.py"
CRITICAL = math.log(1 + math.sqrt(2)) / 2


@pytest.fixture
def ising(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    import ising_trg

    yield ising_trg
    del sys.modules["ising_trg"]


def run(*options: str, cwd: Path) -> str:
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), *options],
        cwd=cwd, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_exact_values_are_those_in_the_literature(ising: Any) -> None:
    """At the critical point u = -sqrt(2); far from it the high-temperature series; C as a difference of u."""
    near = ising.onsager(CRITICAL + 1e-7)
    assert near.energy == pytest.approx(-math.sqrt(2), abs=1e-5)
    assert near.log_z == pytest.approx(0.929695398, abs=1e-6)
    beta = 0.02
    series = math.log(2 * math.cosh(beta) ** 2) + math.tanh(beta) ** 4 + 2 * math.tanh(beta) ** 6
    assert ising.onsager(beta).log_z == pytest.approx(series, abs=1e-12)
    for beta in (0.3, 0.55):
        low, high = ising.onsager(beta - 1e-4), ising.onsager(beta + 1e-4)
        assert ising.onsager(beta).energy == pytest.approx(
            -(high.log_z - low.log_z) / 2e-4, abs=1e-6
        )
        heat = -(beta**2) * (high.energy - low.energy) / 2e-4
        assert ising.onsager(beta).specific_heat == pytest.approx(heat, abs=1e-5)


def test_the_network_gives_the_exact_values_on_both_sides(ising: Any) -> None:
    for beta, errors in ((0.3, (2e-5, 4e-4, 5e-4)), (0.6, (2e-5, 4e-4, 2e-3))):
        point, exact = ising.solve(beta, 6, 16, None), ising.onsager(beta)
        for name, error in zip(("log_z", "energy", "specific_heat"), errors, strict=True):
            assert getattr(point, name) == pytest.approx(getattr(exact, name), abs=error), name


def test_the_error_falls_with_the_bond_dimension(ising: Any) -> None:
    exact = ising.onsager(0.42)
    found = [ising.solve(0.42, chi, 16, None) for chi in (3, 6, 12)]
    for name in ("log_z", "energy"):
        errors = [abs(getattr(point, name) - getattr(exact, name)) for point in found]
        assert errors == sorted(errors, reverse=True), name


def test_a_small_lattice_is_summed_exactly(ising: Any) -> None:
    """Four sites with periodic bounds, by all their sixteen states."""
    beta = torch.tensor(0.4, dtype=torch.float64)
    total = 0.0
    for state in range(16):
        spins = [1 if state >> i & 1 else -1 for i in range(4)]
        bonds = sum(2 * spins[i] * spins[j] for i, j in ((0, 1), (2, 3), (0, 2), (1, 3)))
        total += math.exp(0.4 * bonds)
    # Two steps give one tensor for the four sites, traced over its two pairs of bonds.
    assert ising.log_z_per_site(beta, 16, 2).item() == pytest.approx(math.log(total) / 4, abs=1e-10)


def test_derivatives_are_those_of_the_value(ising: Any) -> None:
    def value(beta: float) -> float:
        return float(ising.log_z_per_site(torch.tensor(beta, dtype=torch.float64), 4, 8))

    point, step = ising.solve(0.5, 4, 8, None), 1e-4
    low, middle, high = value(0.5 - step), value(0.5), value(0.5 + step)
    assert -point.energy == pytest.approx((high - low) / (2 * step), abs=1e-6)
    assert point.specific_heat / 0.25 == pytest.approx(
        (high - 2 * middle + low) / step**2, abs=1e-4
    )


def test_the_svd_has_true_derivatives(ising: Any) -> None:
    def reassembled(matrix: Tensor) -> Tensor:
        u, s, vh = ising.StableSVD.apply(matrix)
        return (u[:, :2] * s[:2].sqrt()) @ vh[:2] + s[2:].sum()

    matrix = torch.diag(torch.tensor([1.0, 2.0, 4.0, 7.0], dtype=torch.float64))
    matrix = (
        matrix + 0.1 * torch.arange(16.0, dtype=torch.float64).view(4, 4).sin()
    ).requires_grad_()
    assert torch.autograd.gradcheck(reassembled, matrix)
    assert torch.autograd.gradgradcheck(reassembled, matrix)


def test_with_and_without_a_stash_to_the_last_bit(ising: Any, disk_dir: Path) -> None:
    stash = Stash(disk=disk_dir, min_bytes=0)
    for beta in (0.35, 0.55):
        assert ising.solve(beta, 6, 10, stash) == ising.solve(beta, 6, 10, None)
    assert stash.stats().written_bytes > 1_000_000
    stash.close()


def test_the_decompositions_are_on_disk(ising: Any, disk_dir: Path) -> None:
    stash = Stash(disk=disk_dir, min_bytes=0)
    beta = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    with stash:
        log_z = ising.log_z_per_site(beta, 4, 6)
    places = [s.where for n in iter_graph(log_z) if "SVD" in n.name() for s in saved(n)]
    assert len(places) == 3 * 2 * 6 and set(places) == {"disk"}
    del log_z
    stash.close()


@takes_long
def test_the_program(tmp_path: Path, disk_dir: Path) -> None:
    output = run("--tiny", "--disk", str(disk_dir), "--json", "out.json", cwd=tmp_path)
    assert len(re.findall(r"^ 0\.\d{4}", output, re.M)) == 2
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["beta"] for row in found["points"]] == [0.3, 0.55] and found["chi"] == 4
    assert list(disk_dir.iterdir()) == []


@takes_long
def test_the_program_compares(tmp_path: Path) -> None:
    output = run("--tiny", "--compare", "--json", "out.json", cwd=tmp_path)
    assert "equal to the last bit" in output
    assert set(json.loads((tmp_path / "out.json").read_text())["runs"]) == {"plain", "stash"}


def test_the_page_has_the_numbers_that_are_committed(
    ising: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "ising-trg.md").read_text(encoding="utf-8")
    results = ROOT / "examples" / "results"
    ising.print_table(json.loads((results / "ising_trg.json").read_text())["points"])
    assert capsys.readouterr().out in page
    runs = json.loads((results / "ising_trg_compare.json").read_text())["runs"]
    assert runs["plain"]["points"] == runs["stash"]["points"]
    for how, run in (("in memory", runs["plain"]), ("on disk", runs["stash"])):
        written = f"{run['written_bytes'] / 1e9:.2f} GB |" if run["written_bytes"] else "|"
        cells = f"{run['peak_bytes'] / 1e9:.2f} GB | {run['seconds']:.1f} s"
        assert f"| {how} | {cells} | {run['cpu_seconds']:.1f} s | {written}" in page


@takes_long
def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run("--tiny", "--betas", "0.3", "--plot", "out.svg", cwd=tmp_path)
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")
