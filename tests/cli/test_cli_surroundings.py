"""A script under `backstash run` finds what plain Python shows it, and ends as it would."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from backstash.cli import main
from backstash.cli._launch import interpreter_options
from children import child
from long_tests import mostly_long, takes_long
from test_cli_run import TRAIN, start, under_stash, write

# What a process can see of itself, before and after it imports torch and trains. Addresses are left out.
LOOK = r"""
import sys, os, signal, subprocess, json, warnings, threading, gc, atexit, resource, re

def plain(value):
    value = sorted(value) if isinstance(value, frozenset) else value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))

def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = re.sub(r"\d{3,}", "N", os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            pass  # of the listing
    return found

def look():
    status = open("/proc/self/status").read()
    show = "import os, sys, json; print(json.dumps([dict(os.environ), sys.argv]))"
    child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True)
    of_sys = {name: plain(getattr(sys, name)) for name in dir(sys)}
    of_sys["modules"] = sorted(sys.modules)
    of_sys["path_importer_cache"] = sorted(sys.path_importer_cache)
    main = sys.modules["__main__"]
    return {
        "sys": of_sys,
        "main": {name: plain(value) for name, value in list(vars(main).items()) if name.startswith("__")},
        "main is": [main is sys.modules[__name__], list(vars(main))[:3]],
        "environment": dict(os.environ),
        "of a child": json.loads(child.stdout),
        "signals": {each.name: plain(signal.getsignal(each)) for each in signal.valid_signals()
                    if isinstance(each, signal.Signals)},
        "kernel's signals": dict(re.findall(r"(Sig(?:Blk|Ign|Cgt)):\s*(\w+)", status)),
        "descriptors": descriptors(),
        "warnings": [plain(warnings.filters), plain(warnings.showwarning), plain(warnings.defaultaction)],
        "threads": sorted(each.name for each in threading.enumerate()),
        "hooks": [plain(threading.excepthook), plain(threading.Thread.start), plain(threading.Thread.run)],
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource)
                   if name.startswith("RLIMIT")},
        "process": [os.getcwd(), os.getppid(), os.getpgrp(), os.getsid(0), os.umask(0o22), os.nice(0),
                    sorted(os.sched_getaffinity(0)), os.getuid(), os.getgid()],
        "streams": [plain(each) + each.encoding + each.errors + str(each.line_buffering)
                    for each in (sys.stdin, sys.stdout, sys.stderr)],
        "builtins": sorted(dir(__builtins__)),
        "callers": [plain(sys._getframe().f_back.f_code.co_name), sys._getframe().f_back.f_back is None],
    }

first = look()
import torch
x = torch.ones(1200, 1200, requires_grad=True)
x.exp().sin().exp().sum().backward()
print(json.dumps([first, look()]))
"""

# What may differ, by the path to it, and why. Before torch is imported:
BEFORE = {
    "sys.modules": "what the file that runs the script imports",
    "sys.path_importer_cache": "and where it looked for that",
    "sys.meta_path": "a finder waits for the import of torch",
    "callers.1": "the file that runs the script is below it on the stack",
}
# Once torch is there, and the stash:
AFTER = {
    "sys.modules": "backstash, and what it imports",
    "sys.path_importer_cache": "and where that was looked for",
    "callers.1": "as before",
    "kernel's signals.SigCgt": "SIGTERM, for the summary",
    "descriptors": "the unnamed file, and a pipe for SIGTERM",
    "threads": "the worker threads of the disk",
    "hooks.1": "threads that start are held, too",
}


OF_THREADS = 1 << 33 - 1  # a signal that glibc takes for itself when the first thread is started


def differences(one: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """The paths at which two looks differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        pairs = {key: (one.get(key), other.get(key)) for key in [*one, *other]}
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = {str(at): pair for at, pair in enumerate(zip(one, other, strict=True))}
    else:
        return {} if one == other else {path: (one, other)}
    found = {}
    for key, pair in pairs.items():
        found.update(differences(*pair, f"{path}.{key}".lstrip(".")))
    return found


@pytest.mark.parametrize("malloc", mostly_long(["auto", "glibc"], "auto"))
def test_a_script_s_surroundings_are_those_of_plain_python(tmp_path: Path, malloc: str) -> None:
    write(tmp_path / "look.py", LOOK)
    words = ["look.py", "--epochs", "3", "a b"]
    options = ("--disk", str(tmp_path), "--keep", "0", "--quiet", "--malloc", malloc)
    one, other = start(words, tmp_path), under_stash(words, tmp_path, *options)
    assert (one.stderr, other.stderr) == ("", "")
    looks = zip(json.loads(one.stdout), json.loads(other.stdout), (BEFORE, AFTER), strict=True)
    for plain, stashed, may in looks:
        found = differences(plain, stashed)
        listed = {
            path: name
            for path in found
            for name in may
            if path == name or path.startswith(f"{name}.")
        }
        assert {path: each for path, each in found.items() if path not in listed} == {}
        assert set(may) - set(listed.values()) == set(), "what does not differ need not be listed"
        assert set(plain["sys"]["modules"]) <= set(stashed["sys"]["modules"])
        caught = [int(each["kernel's signals"]["SigCgt"], 16) for each in (plain, stashed)]
        assert (caught[0] ^ caught[1]) & ~OF_THREADS in (0, 1 << signal.SIGTERM - 1)
        new = stashed["descriptors"].keys() - plain["descriptors"].keys()
        kinds = sorted(re.sub(r"[:/].*", "", stashed["descriptors"][each]) for each in new)
        assert kinds in ([], ["", "pipe", "pipe"]), kinds
        threads = set(stashed["threads"]) - set(plain["threads"])
        assert all(re.fullmatch(r"backstash_\d", name) for name in threads)
        assert set(plain["threads"]) <= set(stashed["threads"])


@pytest.mark.parametrize("module", [False, True])
def test_warnings_and_the_stack_above_the_script(tmp_path: Path, module: bool) -> None:
    """A warning that points beyond the script has no place; frames of ours are not its place."""
    source = """
        import warnings
        for level in (1, 2, 3, 9):
            warnings.warn(f"level {level}", stacklevel=level)
        warnings.warn("old", DeprecationWarning)
        """
    write(tmp_path / "script.py", source)
    words = ["-m", "script"] if module else ["script.py"]
    plain, stashed = start(words, tmp_path), under_stash(words, tmp_path)
    assert "_bootstrap" not in stashed.stderr
    if not module:  # plain Python names a line of runpy for `-m`
        assert stashed.stderr == plain.stderr and "sys:1: UserWarning: level 9" in plain.stderr


def test_an_error_s_last_traceback_is_the_script_s(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import atexit, sys, traceback
        atexit.register(lambda: traceback.print_exception(sys.last_type, sys.last_value, sys.last_traceback))
        atexit.register(lambda: print(sys.excepthook))
        def inner():
            raise ValueError("no")
        inner()
        """,
    )
    plain, stashed = start(["script.py"], tmp_path), under_stash(["script.py"], tmp_path)
    assert (stashed.stdout, stashed.stderr) == (plain.stdout, plain.stderr)
    assert plain.stderr.count("ValueError: no") == 2


@takes_long
def test_a_thread_s_traceback_is_that_of_plain_python(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import threading
        import torch
        def work():
            raise ValueError("no")
        class Own(threading.Thread):
            def run(self):
                work()
        for thread in (threading.Thread(target=work), Own()):
            thread.start()
            thread.join()
            try:
                thread.start()
            except RuntimeError as error:
                print(error, "run" in vars(thread))
        print(threading.excepthook)
        """,
    )
    plain, stashed = start(["script.py"], tmp_path), under_stash(["script.py"], tmp_path)
    assert (stashed.stdout, stashed.stderr) == (plain.stdout, plain.stderr)
    assert plain.stderr.count("ValueError: no") == 2


def test_a_thread_that_has_ended_is_gone(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import gc, threading, weakref
        import torch
        gc.disable()
        thread = threading.Thread(target=print, args=("ran",))
        gone = weakref.ref(thread)
        thread.start()
        thread.join()
        del thread
        print(gone())
        """,
    )
    assert under_stash(["script.py"], tmp_path).stdout == "ran\nNone\n"


def test_children_started_before_torch_is_imported_find_the_script_s_environment(
    tmp_path: Path,
) -> None:
    show = "import os; print(sorted(os.environ.items()))"
    write(
        tmp_path / "script.py",
        f"""
        import subprocess, sys
        print(subprocess.run([sys.executable, "-c", {show!r}], capture_output=True, text=True).stdout)
        """,
    )
    for malloc in ("auto", "glibc"):
        options = ("--disk", ".", "--quiet", "--malloc", malloc)
        stashed = under_stash(["script.py"], tmp_path, *options)
        assert stashed.stdout == start(["script.py"], tmp_path).stdout


def test_torch_and_the_stash_still_read_what_was_set_for_them(tmp_path: Path) -> None:
    """For the moment in which they do: huge pages for large tensors, and no trimming but glibc's own."""
    write(
        tmp_path / "script.py",
        """
        from backstash import Stash  # loads torch, and makes torch's first tensor
        import ctypes, os
        import torch
        print(os.environ.get("THP_MEM_ALLOC_ENABLE"), torch.empty(64 << 20).data_ptr() % 4096)
        """,
    )
    options = ("--disk", ".", "--quiet", "--malloc", "glibc")
    assert under_stash(["script.py"], tmp_path, *options).stdout == "None 0\n"


@takes_long
def test_many_arguments(tmp_path: Path) -> None:
    """200 KB of them: more than one variable of the environment can hold."""
    write(
        tmp_path / "script.py", "import sys, torch\nprint(len(sys.argv), sum(map(len, sys.argv)))"
    )
    words = ["script.py", *("x" * 100 for _ in range(2000))]
    figures = tmp_path / "run.json"
    stashed = under_stash(words, tmp_path, "--disk", ".", "--keep", "0", "--json", str(figures))
    assert stashed.stdout == start(words, tmp_path).stdout
    assert json.loads(figures.read_text())["script"] == words
    assert json.loads(figures.read_text())["command"].endswith(" ".join(words))


@pytest.mark.parametrize(
    ("started_with", "options"),
    [
        (["-m", "backstash", "run", "s.py"], []),
        (["-Wignore", "-I", "/venv/bin/backstash", "run", "-u"], ["-Wignore", "-I"]),
        (["-um", "backstash", "run", "s.py"], ["-u"]),
        (["-Im", "backstash", "run", "-v", "s.py"], ["-I"]),
        (["-Immodule"], ["-I"]),
        (["-uBWignore", "-Xdev", "-m", "backstash"], ["-uB", "-Wignore", "-Xdev"]),
        (
            ["-uW", "ignore", "-EX", "dev", "/bin/backstash"],
            ["-u", "-W", "ignore", "-E", "-X", "dev"],
        ),
        (["-x", "-ux", "/bin/backstash"], ["-u"]),
        (["-bbc", "code"], ["-bb"]),
        (["--check-hash-based-pycs", "never", "-m", "x"], ["--check-hash-based-pycs", "never"]),
    ],
)
def test_the_interpreter_s_own_options_are_passed_on(
    started_with: list[str], options: list[str]
) -> None:
    assert interpreter_options(started_with) == options


def test_python_um_and_im(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "import sys\nprint(sys.flags, sys.orig_argv[1:], sys.path[0])")
    for cluster in ("-um", "-Bum"):
        run = ["backstash", "run", "--disk", ".", "--quiet", "script.py", "x"]
        stashed = start([cluster, *run], tmp_path)
        assert stashed.returncode == 0, stashed.stderr
        assert stashed.stdout == start([cluster[:-1], "script.py", "x"], tmp_path).stdout


def shell(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=directory, capture_output=True, text=True, timeout=100
    )


RUN = f"{sys.executable} -m backstash run --disk . --keep 0"


@pytest.mark.parametrize(
    "closed",
    [
        "<&- >&- 2>&-",
        *(pytest.param(each, marks=takes_long) for each in ("2>&-", ">&-", ">&- 2>&-", "<&-")),
    ],
)
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    """The script runs and ends as under plain Python, and what it saves is in no standard descriptor."""
    look = """
import os
found = {}
for number in os.listdir("/proc/self/fd"):
    if int(number) < 3 and os.path.exists(f"/proc/self/fd/{number}"):
        found[number] = os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
with open("found.txt", "w") as file:
    file.write(repr([x.grad.double().sum().item().hex(), found]))
"""
    write(tmp_path / "script.py", TRAIN.partition("print(")[0] + look)
    ended = shell(f"{RUN} --json run.json script.py {closed}", tmp_path)
    figures = json.loads((tmp_path / "run.json").read_text())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "" and figures["stats"]["written_bytes"] > 0
    found = (tmp_path / "found.txt").read_text()
    ended = shell(f"{sys.executable} script.py {closed}", tmp_path)
    assert ended.returncode == 0
    assert (tmp_path / "found.txt").read_text() == found
    assert "deleted" not in found


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("import sys, torch\nsys.stderr.close()", marks=takes_long),
        "import sys, torch\nclass Gone:\n    def write(self, text):\n        1 / 0\nsys.stderr = Gone()",
        *(
            pytest.param(each, marks=takes_long)
            for each in (
                "import os, torch\nos.close(2)",
                "import sys, torch\nsys.stderr = None",
                "import sys\nsys.stderr.close()\nimport torch",
            )
        ),
    ],
)
def test_a_script_that_closes_stderr(tmp_path: Path, script: str) -> None:
    write(tmp_path / "script.py", script)
    ended = under_stash(["script.py"], tmp_path, "--disk", ".", "--keep", "0", "--json", "run.json")
    plain = start(["script.py"], tmp_path)
    assert (ended.returncode, ended.stdout) == (plain.returncode, plain.stdout)
    assert ended.stderr == plain.stderr == ""
    assert (tmp_path / "run.json").exists()


@takes_long
def test_a_reader_of_stderr_that_went_away(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        "import torch, time, os\nwhile not os.path.exists('gone'): time.sleep(0.01)",
    )
    read, writing = os.pipe()
    command = [*RUN.split(), "--json", "run.json", "script.py"]
    with child(command, cwd=tmp_path, stderr=writing) as process:
        os.close(writing)
        os.close(read)
        (tmp_path / "gone").touch()
        assert process.wait(60) == 0
    assert (tmp_path / "run.json").exists()


def test_a_stream_of_the_script_s_own_gets_the_summary(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import sys, torch
        class Log:
            def write(self, text):
                print("log:", text, end="")
        sys.stderr = Log()
        """,
    )
    ended = under_stash(["script.py"], tmp_path, "--disk", ".", "--keep", "0")
    assert ended.stdout.startswith("log: backstash: ") and ended.stderr == ""


@takes_long
def test_a_main_that_ends_while_a_thread_trains(tmp_path: Path) -> None:
    """The interpreter waits for a thread that is no daemon; the summary and the JSON are of all of it."""
    write(
        tmp_path / "script.py",
        """
        import atexit, threading, torch

        def train():
            threading.main_thread().join()  # until the interpreter ends
            x = torch.ones(400, 400, requires_grad=True)
            x.exp().sin().sum().backward()
            print("thread", flush=True)

        threading.Thread(target=train).start()
        atexit.register(print, "at exit", flush=True)
        raise ValueError("main")
        """,
    )
    ended = shell(f"{RUN} --json run.json script.py 2>&1", tmp_path)
    assert ended.returncode == 1
    order = [
        ended.stdout.index(words) for words in ("ValueError", "thread", "at exit", "backstash: ")
    ]
    assert order == sorted(order), ended.stdout
    figures = json.loads((tmp_path / "run.json").read_text())
    assert figures["stats"]["saves"] == 2 and figures["outcome"] == "ValueError"


@takes_long
def test_a_package_backstash_of_the_script_s_own(tmp_path: Path) -> None:
    write(tmp_path / "backstash/__init__.py", "NAME = 'mine'")
    train = TRAIN.replace(", backstash", "")
    write(tmp_path / "script.py", f"import backstash\nprint(backstash.NAME){train}")
    files = [f"--json={tmp_path}/run.json", f"--report={tmp_path}/x.html"]
    options = ["--disk", str(tmp_path), "--keep", "0", *files]
    run = ["-m", "backstash", "run", *options, str(tmp_path / "script.py")]
    ended = start(run, tmp_path.parent)
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "mine"), ended.stderr
    assert ended.stdout == start([str(tmp_path / "script.py")], tmp_path.parent).stdout
    assert json.loads((tmp_path / "run.json").read_text())["stats"]["written_bytes"] > 0
    assert "no summary" not in ended.stderr and (tmp_path / "x.html").exists()


def terminated(directory: Path, script: str) -> tuple[int, str, dict[str, Any]]:
    """How a script under `backstash run` ends by SIGTERM, sent when it has printed a line."""
    write(directory / "script.py", script)
    command = [*RUN.split(), "--json", "run.json", "script.py"]
    pipe = subprocess.PIPE
    with child(command, cwd=directory, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    return process.returncode, errors, json.loads((directory / "run.json").read_text())


FOR_EVER = """
import os, signal, sys, threading, time
import torch
x = torch.ones(400, 400, requires_grad=True)
for _ in range(5):  # of which the first start threads: one that starts may lose the signal, see _sigterm
    x.exp().sin().sum().backward()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


@pytest.mark.parametrize(
    "waits",
    mostly_long(
        [
            "time.sleep(60)",
            "threading.Event().wait()",
            "while True: x.exp().sin().sum().backward()",
        ],
        "while True: x.exp().sin().sum().backward()",
    ),
)
def test_sigterm_is_answered_by_a_summary_and_then_the_script_s_own_end(
    tmp_path: Path, waits: str
) -> None:
    status, errors, figures = terminated(
        tmp_path, f"{FOR_EVER}print('ready', flush=True)\n{waits}\n"
    )
    assert status == -signal.SIGTERM
    assert figures["outcome"] == "SIGTERM" and figures["stats"]["written_bytes"] > 0
    assert "backstash: " in errors and "SIGTERM" in errors and "Stack (most recent" not in errors


def test_sigterm_while_the_summary_is_made_waits_for_it(tmp_path: Path) -> None:
    """As a launcher sends it to the ranks that are ending because another one has died."""
    script = f"""{FOR_EVER}
from backstash.cli import _session
write_results = _session.write_results
def terminated(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    write_results(*arguments)
_session.write_results = terminated
"""
    write(tmp_path / "script.py", script)
    ended = subprocess.run(
        [*RUN.split(), "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode in (0, -signal.SIGTERM), ended.stderr
    assert ended.stderr.startswith("backstash: peak ") and "ended by" not in ended.stderr


def test_a_script_with_an_answer_to_sigterm_of_its_own_gives_it(tmp_path: Path) -> None:
    script = f"""{FOR_EVER}
assert signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)) is signal.SIG_DFL
print("ready", flush=True)
time.sleep(60)
"""
    status, _, figures = terminated(tmp_path, script)
    assert (status, figures["outcome"]) == (5, "exit 5")


def test_a_forked_process_that_is_terminated_is_not_this_one(tmp_path: Path) -> None:
    """Not even when the signal comes before it has run a line."""
    script = f"""{FOR_EVER}
for _ in range(50):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
child = os.fork()
if child == 0:
    assert not any(os.path.basename(f).startswith("run.json") for f in os.listdir("."))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
os.wait()
print("ready", flush=True)
time.sleep(60)
"""
    status, errors, figures = terminated(tmp_path, script)
    assert (status, figures["outcome"]) == (-signal.SIGTERM, "SIGTERM")
    assert errors.count("SIGTERM") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["."], "'.' is a directory without a __main__.py; allowed: a Python file, or -m MODULE"),
        (
            ["python", "x.py"],
            "leave out 'python': the script runs in the Python that runs backstash",
        ),
        (["torchrun", "x.py"], "(`torchrun ... -m backstash run ... SCRIPT`)"),
    ],
)
def test_what_is_no_script_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["run", "--disk", "."], ["profile"]):
        assert main([*command, *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words.replace("backstash run", f"backstash {command[0]}") in error


@pytest.mark.parametrize("keep", ["1GiB", "auto", "0"])
def test_a_budget_with_nothing_below_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keep: str
) -> None:
    write(tmp_path / "x.py", "import torch\nprint('ran')")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--keep", keep, "x.py"]) == 2
    error = capsys.readouterr().err
    assert "give --disk DIR" in error and "--host SIZE" in error and "disk=" not in error
    ended = under_stash(["x.py"], tmp_path, "--keep", keep, "--host", "1GiB")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "backstash run: --host is for the tensors of an accelerator, and this PyTorch was built "
        "without one; give --disk DIR, for example `--disk /scratch`\n"
    )


TRANSFORMS = """
import torch, backstash
x = torch.linspace(0, 1, 40_000).reshape(200, 200)
print(torch.func.grad(lambda t: (t.sin() * t.exp()).sum())(x).double().sum().item().hex())
y = x.clone().requires_grad_()
y.exp().sin().sum().backward()
print(y.grad.double().sum().item().hex())
"""


@takes_long
def test_a_script_with_torch_func_runs_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "script.py", TRANSFORMS)
    options = ("--disk", ".", "--keep", "0", "--json", "run.json", "--verbose")
    ended = under_stash(["script.py"], tmp_path, *options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == start(["script.py"], tmp_path).stdout
    figures = json.loads((tmp_path / "run.json").read_text())
    assert figures["stats"]["written_bytes"] == 160_000
    assert [
        each["count"] for reason, each in figures["stats"]["left"].items() if "torch.func" in reason
    ] == [1]
    assert "torch.func" in ended.stderr
    profiled = start(["-m", "backstash", "profile", "script.py"], tmp_path)
    assert "torch.func (grad, vjp, jacrev, hessian) ran 1 times" in profiled.stdout, profiled.stderr
    write(tmp_path / "script.py", TRANSFORMS.partition("y = ")[0])
    profiled = start(["-m", "backstash", "profile", "script.py"], tmp_path)
    assert profiled.returncode == 0
    assert "torch.func (grad, vjp, jacrev, hessian) ran 1 times" in profiled.stderr
