"""What the wheel and the sdist hold, that the wheel works where it is installed, and the project's files."""

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import torch

import backstash

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"


def git(*arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode != 0:
        pytest.skip("no checkout of git here")
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from it."""
    pytest.importorskip("build", reason="no build here: pip install -e '.[dev]'")
    pytest.importorskip("hatchling", reason="no hatchling here: pip install -e '.[dev]'")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"backstash-{backstash.__version__}.dist-info/"
    ours = {name for name in names if not name.startswith(info)}
    assert ours == {name.removeprefix("src/") for name in git("ls-files", "src")}
    assert {f"{info}licenses/LICENSE", f"{info}entry_points.txt"} <= names


def test_the_wheel_asks_for_torch_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"backstash-{backstash.__version__}.dist-info/METADATA").decode()
    parsed = message_from_string(text)
    needs = [need for need in parsed.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert needs == ["torch>=2.11"]
    assert parsed["Version"] == backstash.__version__
    assert parsed["Requires-Python"] == ">=3.10"
    assert parsed["License-Expression"] == "BSD-3-Clause"
    assert {url.split(", ")[0] for url in parsed.get_all("Project-URL", [])} == {
        "Changelog",
        "Issues",
        "Repository",
    }


def test_the_readme_of_the_wheel_leads_to_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"backstash-{backstash.__version__}.dist-info/METADATA").decode()
    parsed = message_from_string(text)
    assert parsed["Description-Content-Type"] == "text/markdown"
    home = dict(url.split(", ") for url in parsed.get_all("Project-URL", []))["Repository"]
    links = re.findall(r"(!?)\[[^\[\]]*\]\(([^)\s]+)\)", parsed.get_payload())
    assert len(links) > 10
    for mark, link in links:
        if link.startswith(home):
            path = link.removeprefix(f"{home}/{'raw' if mark else 'blob'}/main/").partition("#")[0]
            assert (ROOT / path).exists(), link
        else:
            assert link.startswith(("http", "#")), link


def test_the_sdist_holds_what_a_checkout_needs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    parts = ("src", "tests", "docs", "examples", "benchmarks", "scripts")
    expected = {name for name in git("ls-files", *parts) if (ROOT / name).exists()}
    assert expected - names == set()
    assert {"README.md", "LICENSE", "mkdocs.yml", "constraints.txt", "pyproject.toml"} <= names


def test_the_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, with the torch of the tests; ``scripts/package`` installs torch, too."""
    place = tmp_path / "venv"
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--disable-pip-version-check", wheel], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    # Names are added to the path and nothing else: this checkout, installed there, is not.
    (packages / "torch-of-the-tests.pth").write_text(str(Path(torch.__file__).parent.parent))
    trial = [python, "-I", ROOT / "scripts" / "package_trial.py"]
    ran = subprocess.run(trial, cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "passed\n"), ran.stderr


def test_the_project_has_one_address() -> None:
    home = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert home
    address = re.compile(r"https://[\w.]+/[\w-]*/backstash\b")
    named = {
        found
        for path in git("ls-files")
        if Path(path).suffix in (".md", ".toml", ".yml", ".cff", ".py", ".html")
        for found in address.findall((ROOT / path).read_text(encoding="utf-8"))
    }
    assert named == {home[1]}


WORKFLOWS = sorted((ROOT / ".github").rglob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_files_for_the_host_are_yaml(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="no PyYAML here: pip install -e '.[docs]'")
    parsed = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.parent.name == "workflows":
        assert parsed["permissions"] == {"contents": "read"}
        assert parsed["jobs"]
        for job in parsed["jobs"].values():
            assert "uses" in job or job["timeout-minutes"] <= 60
    elif path.name != "config.yml":
        assert {"name", "description", "body"} <= parsed.keys()


def test_the_workflow_runs_every_python_and_torch_that_the_docs_name() -> None:
    yaml = pytest.importorskip("yaml", reason="no PyYAML here: pip install -e '.[docs]'")
    check = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text(encoding="utf-8"))
    matrix = check["jobs"]["check"]["strategy"]["matrix"]
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', declared)
    docs = (ROOT / "docs/reference/versions.md").read_text(encoding="utf-8")
    torches = [version.rpartition(".")[0] for version in matrix["torch"]]
    assert f"torch {', '.join(torches[:-1])} and {torches[-1]}" in docs
    assert f"Python {matrix['python'][0]} to {matrix['python'][-1]}" in docs
    (pinned,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned in matrix["torch"]
