"""A short trial of an installed backstash, by the interpreter that it is installed for: ``python -I FILE``.

It trains a small network plainly and under a stash on disk, and compares each gradient to the last bit, then
does the same by ``backstash run``. With ``--without-torch`` it tries what needs no torch. The first thing that
is wrong ends it with status 1.
"""

import compileall
import json
import subprocess
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

__all__: list[str] = []

SCRIPT = """
import torch
torch.manual_seed(0)
x, w = torch.randn(256, 256), torch.randn(256, 256, requires_grad=True)
for _ in range(3):
    (x @ w).tanh().exp().sum().backward()
torch.save(w.grad, __import__("sys").argv[1])
"""


def command(*arguments: str) -> str:
    """What ``backstash ARGUMENTS`` prints, by the command that was installed next to the interpreter."""
    path = Path(sys.executable).parent / "backstash"
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}: status {done.returncode}\n{done.stderr}"
    return done.stdout


def installed() -> None:
    """The package is the installed one, whole, of the version that its metadata has."""
    import backstash

    package = Path(backstash.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not in {sys.prefix}"
    assert backstash.__version__ == metadata.version("backstash")
    assert command("--version").startswith(f"backstash {backstash.__version__}, ")
    assert (package / "py.typed").is_file()
    assert compileall.compile_dir(package, quiet=1)
    for name in ("run", "summary", "profile", "plan", "doctor"):
        assert "examples:" in command(name, "--help")


def trained() -> None:
    """Gradients under a stash on disk are the plain ones, in this process and by ``backstash run``."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch

    from backstash import Stash

    with tempfile.TemporaryDirectory() as directory:
        x, w = torch.randn(256, 256), torch.randn(256, 256, requires_grad=True)
        (plain,) = torch.autograd.grad((x @ w).tanh().exp().sum(), w)
        with Stash(disk=directory) as stash:
            loss = (x @ w).tanh().exp().sum()
        (held,) = torch.autograd.grad(loss, w)
        assert torch.equal(plain, held)
        assert stash.stats().written_bytes > 0
        stash.close()
        here = Path(directory)
        (here / "script.py").write_text(SCRIPT)
        subprocess.run([sys.executable, here / "script.py", here / "plain.pt"], check=True)
        out = [str(here / name) for name in ("run.json", "page.html", "script.py", "run.pt")]
        command(
            *["run", "--quiet", "--disk", directory, "--keep", "0", "--json", out[0]],
            "--report",
            *out[1:],
        )
        assert torch.equal(torch.load(here / "plain.pt"), torch.load(here / "run.pt"))
        assert json.loads(Path(out[0]).read_text())["stats"]["written_bytes"] > 0
        assert "</html>" in Path(out[1]).read_text()


if __name__ == "__main__":
    installed()
    if "--without-torch" not in sys.argv:
        trained()
    print("passed")
