"""After each test, nothing is left behind: descriptors, threads and hooks are what they were."""

import builtins
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PATIENCE_SECONDS = 5.0

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

# Read when Hugging Face's libraries are imported, which many tests do: nothing is asked of a network, and no
# thread is started for it.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that began the tests in the background had them ignore it, and every process they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def open_descriptors() -> dict[int, str]:
    """Each descriptor of this process, and what it is of."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # The descriptor of the listing itself.
    return found


def running_threads() -> set[threading.Thread]:
    """All but the one that tqdm, where some library brings it, starts for its progress bars."""
    alive = (thread for thread in threading.enumerate() if thread.is_alive())
    return {thread for thread in alive if thread.name != "tqdm_monitor"}


def leftovers(descriptors: dict[int, str], threads: set[threading.Thread]) -> list[str]:
    """What is there now and was not there before, in words."""
    opened = [
        f"descriptor {fd} of {what}"
        for fd, what in open_descriptors().items()
        if descriptors.get(fd) != what
    ]
    started = [f"thread {thread.name}" for thread in running_threads() - threads]
    return opened + started


def process_state() -> dict[str, object]:
    """What a test may change for a while, and another test of the same process would see."""
    config = sys.modules.get("torch._functorch.config")
    return {
        "the value shown last, in builtins": "_" in vars(builtins),
        "sys.displayhook": sys.displayhook,
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "the working directory": os.getcwd(),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "the handler of SIGTERM": signal.getsignal(signal.SIGTERM),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "torch's threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradient mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly mode": torch.is_anomaly_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "torch.compile's memory budget": config.activation_memory_budget if config else 1.0,
    }


def remove_hooks() -> list[object]:
    """Removes the pairs of saved-tensor hooks that are active, so that the next test has none."""
    found = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        found.append(hooks)
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the test that leaves a descriptor, a thread, a pair of hooks, or a setting of the process."""
    # What is alive already is no test's own, and walking all of torch takes 0.1 s a collection.
    gc.freeze()
    descriptors, threads, state = open_descriptors(), running_threads(), process_state()
    yield
    now = process_state()
    hooks = remove_hooks()
    # A store's threads end soon after it is closed, not at once.
    deadline = time.monotonic() + PATIENCE_SECONDS
    gc.collect()
    while (left := leftovers(descriptors, threads)) and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()
    assert not hooks, f"the test left saved-tensor hooks: {hooks}"
    assert not left, f"the test left behind: {', '.join(left)}"
    changed = [f"{name}: {was} -> {now[name]}" for name, was in state.items() if now[name] != was]
    assert not changed, f"the test left changed: {'; '.join(changed)}"


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    """An empty directory for a disk tier."""
    directory = tmp_path / "disk"
    directory.mkdir()
    return directory
