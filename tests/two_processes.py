"""Runs a script as processes that talk over gloo, two unless said otherwise."""

import os
import subprocess
import sys


def run_two(worker, *arguments, world=2):
    """``python worker RANK ARGUMENT ...`` for the ranks below ``world``, each on one thread: what each printed.

    All have to succeed.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [worker.communicate(timeout=100)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
    return outputs
