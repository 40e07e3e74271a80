"""A program to which Ctrl-C comes at any moment, from another thread; ``run_python`` runs it."""

PRESSES = """
import random, signal, sys, threading, time
from faulty import *
mix, where, seed, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
stash = MIXES[mix](where)
main, stop, rng = threading.get_ident(), threading.Event(), random.Random(seed)

def press():
    longest = 0.05  # seconds; more while no step ends, since on a busy machine a step may take longer than this
    before = 0
    while not stop.wait(rng.random() * longest):
        signal.pthread_kill(main, signal.SIGINT)
        longest = longest * 1.1 if steps == before else 0.05
        before = steps

caught = steps = 0
ended = time.monotonic() + seconds

def train():
    global steps
    while time.monotonic() < ended or not caught or not steps:
        assert are_right(gradients(stash)), "a wrong gradient in the middle"
        steps += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)

def train_on():
    global caught
    while True:
        try:
            return train()
        except KeyboardInterrupt:
            caught += 1

previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
thread = threading.Thread(target=press)
thread.start()
while True:
    try:
        if not steps:
            signal.signal(signal.SIGINT, previous)
        train_on()
        break
    except KeyboardInterrupt:  # between two lines of train_on's own
        caught += 1
stop.set()
thread.join()
problems = wrong_after(stash)
print(caught, "caught", steps, "steps", problems)
# Where __exit__'s own first instruction is interrupted, a pair stays, as with any context of Python.
problems = [each for each in problems if "hook pairs" not in each]
sys.exit(bool(problems))
"""
