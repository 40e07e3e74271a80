"""The timeline: what it says adds up to what the stash counted, and its files are what they claim to be."""

import json
import threading
from dataclasses import astuple
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backstash import Action, Stash
from backstash.errors import UsageError
from backstash.report import StepMarks, timeline
from backstash.report._levels import TIERS
from backstash.testing import Gated, MemoryStore

HOSTILE = '</script><img src=x onerror="alert(1)">\u2028\\"\n'


class Model(nn.Module):
    def __init__(self, width=400, depth=4):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        )

    def forward(self, x):
        return self.blocks(x).square().mean()


def trained(stash, steps=3, marks=None):
    """A timeline of ``steps`` steps under ``stash``."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(400, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with timeline(stash, steps=marks) as line:
        for _ in range(steps):
            optimizer.zero_grad()
            with stash:
                loss = model(x)
            loss.backward()
            stash.stats()
            optimizer.step()
    return line


def test_it_adds_up_to_what_the_stash_counted():
    with Stash(disk=MemoryStore(), inflight=0) as stash:  # nothing ends while it is on its way
        line = trained(stash)
        stats = stash.stats()
    assert [step.label for step in line.steps] == ["1", "2", "3"]
    assert sum(step.down_bytes for step in line.steps) == stats.written_bytes
    assert sum(step.read_bytes for step in line.steps) == stats.read_bytes
    assert sum(use.saved_bytes for use in line.modules) == stats.eligible_bytes
    assert sum(use.down_bytes for use in line.modules) == stats.written_bytes
    assert sum(step.stall_seconds for step in line.steps) == pytest.approx(
        stats.stall_seconds, abs=0.01
    )
    assert line.reads_on_demand == stats.prefetch_misses
    assert line.memory_peak_bytes == max(step.peak_bytes for step in line.steps)
    assert max(level.ahead_bytes for level in line.levels) <= stats.ahead_peak_bytes
    held = [astuple(level)[1:] for level in line.levels]
    assert all(a != b for a, b in pairwise(held)), "a level that changes nothing"
    assert all(
        a.end_seconds == b.begin_seconds for a, b in zip(line.steps, line.steps[1:], strict=False)
    )


def test_modules_and_phases_are_recorded():
    with Stash(disk=MemoryStore(), inflight=0) as stash:
        line = trained(stash, steps=2)
    paths = {use.path for use in line.modules}
    assert {f"blocks.{i}.1" for i in range(4)} <= paths
    assert [phase.name for phase in line.phases] == ["forward", "backward"] * 2
    assert all(phase.begin_seconds <= phase.end_seconds for phase in line.phases)
    one = next(use for use in line.modules if use.path == "blocks.0.1")
    assert (one.blocks, one.saved_bytes, one.down_bytes) == (2, 1_280_000, 1_280_000)
    assert one.uses >= 2


def test_what_is_saved_at_once_does_not_depend_on_where_it_is():
    peaks = set()
    for keep in ("0", "1MiB", None):
        with Stash(disk=MemoryStore(), keep=keep) as stash:
            line = trained(stash, steps=1)
        peaks.add(line.saved_peak_bytes)
        assert sum(move.memory_bytes + move.down_bytes for move in line.lives.moves) == 0
        if keep is None:
            assert line.memory_peak_bytes == line.saved_peak_bytes
    assert len(peaks) == 1


def test_steps_end_where_the_user_says_or_where_the_first_optimizer_steps():
    with Stash(disk=MemoryStore()) as stash:
        line = trained(stash, marks=StepMarks(optimizers=False))
        assert line.steps == ()
        assert any("Where a step ends is not known" in note for note in line.notes)
        x = torch.randn(300, 300, requires_grad=True)
        y = torch.randn(3, requires_grad=True)
        first, second = torch.optim.SGD([x], lr=1), torch.optim.SGD([y], lr=1)
        with timeline(stash) as line:
            for _ in range(2):
                x.exp().sum().backward()
                first.step()
                second.step()
            line.mark("evaluation")
    assert [step.label for step in line.steps] == ["1", "2", "evaluation"]


def test_nothing_stays_registered():
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_post_hooks)
    with Stash(disk=MemoryStore()) as stash:
        line = timeline(stash)
        assert len(optimizer._global_optimizer_post_hooks) == before + 1 and stash._event_log.on
        line.remove()
        line.remove()
        assert len(optimizer._global_optimizer_post_hooks) == before and not stash._event_log.on


def test_marks_may_be_shared_and_a_recording_may_end_at_one():
    def ended():
        if len(marks.moments) == 2:
            line.remove()

    marks = StepMarks(then=ended)
    with Stash(disk=MemoryStore()) as stash:
        line = timeline(stash, steps=marks)
        trained(stash, steps=4)
    assert len(marks.moments) == 4
    assert [step.label for step in line.steps] == ["1", "2"]
    assert len(line.phases) == 4
    marks.remove()


def test_a_recording_will_do_and_anything_else_is_refused():
    with Stash(disk=MemoryStore()) as stash, stash.record() as recording:
        torch.randn(300, 300, requires_grad=True).exp().sum().backward()
    line = timeline(recording)
    line.remove()
    assert line.saved_peak_bytes == 360_000
    assert line.began_seconds == min(event.seconds for event in recording.events)
    with pytest.raises(UsageError, match="allowed is a stash"):
        timeline([1, 2])


def test_it_can_be_read_while_it_records_and_says_when_it_is_full(tmp_path):
    x = torch.randn(300, 300, requires_grad=True)
    with Stash(disk=MemoryStore()) as stash, timeline(stash) as line:
        assert "Nothing was recorded" in str(line)
        assert chrome_trace(line, tmp_path / "empty.json")["traceEvents"]
        loss = x.exp().sum()
        assert len(line.modules) == 1
        loss.backward()
    with Stash(disk=MemoryStore()) as stash:
        line = timeline(stash.record(limit=20))
        for _ in range(9):
            x.exp().exp().sum().backward()
            line.mark()
        line.remove()
    assert "at its limit of 20 events" in " ".join(line.notes)
    assert 0 < len(line.steps) < 9, "a step that was not recorded to its end"


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_listed_separately(reentrant):
    model = Model()
    x = torch.randn(400, 400, requires_grad=True)
    with Stash(disk=MemoryStore()) as stash, timeline(stash) as line:
        checkpoint(model.blocks, torch.tanh(x), use_reentrant=reentrant).sum().backward()
    recomputed = [use for use in line.modules if use.path.startswith("(in backward) ")]
    text = " ".join(line.notes)
    if reentrant:
        assert (
            sum(use.saved_bytes for use in recomputed) == line.lives.recomputed_bytes == 4 * 640_000
        )
        assert "their path begins at the recomputed part" in text
    else:  # what it saves then is its own to hold, and never reaches the stash
        assert not recomputed
    assert "belong to no known module" in text  # tanh(x), outside any module


def test_saves_of_a_thread_without_modules_say_so():
    def work():
        with stash:
            torch.randn(300, 300, requires_grad=True).exp().sum().backward()

    with Stash(disk=MemoryStore()) as stash, timeline(stash) as line:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [use.path for use in line.modules] == ["(no module known)"]


def test_stalls_are_the_longest_first_and_of_their_module():
    gated = Gated(MemoryStore())
    model = Model(depth=1)
    with Stash(disk=gated, prefetch=0) as stash, timeline(stash) as line:
        loss = model(torch.randn(400, 400))
        stash._workers.close()
        gated.reads.clear()
        threading.Timer(0.05, gated.reads.set).start()
        loss.backward()
    assert line.stalls[0].duration_seconds >= line.stalls[-1].duration_seconds
    assert line.lives.paths[line.stalls[0].block] in {use.path for use in line.modules}
    assert line.stalls[0].duration_seconds > 0.04


# Its files.


def chrome_trace(line, path):
    line.to_chrome_trace(path)
    text = path.read_text(encoding="utf-8")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_chrome_trace_has_every_step_move_and_level(tmp_path):
    with Stash(disk=MemoryStore(), keep="500KiB") as stash:
        line = trained(stash)
    events = chrome_trace(line, tmp_path / "trace.json")["traceEvents"]
    assert all(event["ph"] in "MXCi" for event in events)
    timed = [event for event in events if event["ph"] != "M"]
    assert all(event["ts"] >= 0 for event in timed)
    assert timed == sorted(timed, key=lambda event: event["ts"])
    kinds = [event["cat"] for event in timed if event["ph"] == "X"]
    assert kinds.count("step") == 3 and kinds.count("phase") == 6
    reads = [event for event in line.events if event.kind == "read"]
    assert kinds.count("read") == len(reads)
    one = next(event for event in timed if event.get("cat") == "read")
    assert one["args"]["cause"] in ("ahead", "demand")
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in timed if event["ph"] == "X"} <= named

    spans = [event for event in events if event["ph"] == "X"]
    steps = [event for event in spans if event["cat"] == "step"]
    assert [step["dur"] for step in steps] == pytest.approx(
        [step.seconds * 1e6 for step in line.steps], abs=0.01
    )
    for track in {span["tid"] for span in spans}:
        open_ends = []
        for span in (each for each in spans if each["tid"] == track):
            while open_ends and open_ends[-1] <= span["ts"] + 1e-3:
                open_ends.pop()
            end = span["ts"] + span["dur"]
            assert not open_ends or end <= open_ends[-1] + 2e-3
            open_ends.append(end)

    for field, name in (("keep_bytes", "bytes kept"), ("disk_bytes", "bytes on disk")):
        counted = [event["args"]["bytes"] for event in events if event["name"] == name]
        assert max(counted) == max(getattr(level, field) for level in line.levels) > 0
        assert all(a != b for a, b in pairwise(counted))


def event(kind, seconds, duration=0.0, nbytes=0, block=-1, module="", cause="", **levels):
    tiers = dict.fromkeys(("keep", "inflight", "host", "disk", "ahead"), 0) | levels
    return SimpleNamespace(
        kind=kind,
        seconds=seconds,
        duration_seconds=duration,
        nbytes=nbytes,
        block=block,
        module=module,
        cause=cause,
        thread=1,
        **{f"{tier}_bytes": held for tier, held in tiers.items()},
    )


def test_events_of_any_make_are_read_and_their_names_are_harmless(tmp_path):
    events = [
        event("save", 1.0, nbytes=100, block=0, module=HOSTILE, keep=100),
        event("write", 1.1, 0.2, 100, 0, HOSTILE, inflight=100),
        event("land", 1.4, nbytes=100, block=0, module=HOSTILE, disk=100),
        event("kind of tomorrow", 1.5, nbytes=1, block=0, disk=100),
        event("stall", 1.6, 0.5, block=0, module=HOSTILE, cause="unpack", disk=100),
        event("free", 2.5, nbytes=100, block=0, module=HOSTILE),
    ]
    line = timeline(SimpleNamespace(events=tuple(events)))
    line.mark(HOSTILE)
    line.remove()
    trace = chrome_trace(line, tmp_path / "trace.json")["traceEvents"]
    stall = next(each for each in trace if each.get("cat") == "stall")
    assert stall["name"].endswith(HOSTILE.rstrip())
    assert (stall["ts"], stall["dur"]) == (600_000, 500_000)
    (use,) = line.modules
    assert (use.path, use.down_bytes, use.stall_seconds) == (HOSTILE, 100, 0.5)
    moves = [(move.memory_bytes, move.down_bytes) for move in line.lives.moves]
    assert moves == [(100, 0), (-100, 100), (0, -100)]
    assert (line.saved_peak_bytes, line.memory_peak_bytes) == (100, 100)


def test_a_write_that_failed_and_a_change_on_the_way_leave_the_sums_right():
    events = [
        event("save", 1.0, nbytes=100, block=0, keep=100),
        event("return", 1.1, nbytes=100, block=0, keep=100),
        event("save", 1.2, nbytes=10, block=1, keep=110),
        event("lose", 1.3, nbytes=10, block=1, keep=100),
        event("free", 1.4, nbytes=10, block=1, keep=100),
        event("free", 1.5, nbytes=100, block=0),
        event("free", 1.6, nbytes=7, block=99),  # saved before the recording
    ]
    line = timeline(SimpleNamespace(events=tuple(events)))
    line.remove()
    assert [move.memory_bytes for move in line.lives.moves] == [100, 10, -10, -100]
    assert line.saved_peak_bytes == 110


def test_its_page_has_what_it_knows(tmp_path):
    with Stash(disk=MemoryStore()) as stash:
        line = trained(stash)
    line.to_html(tmp_path / "line.html", title="a & b", graph="<svg/>")
    page = (tmp_path / "line.html").read_text(encoding="utf-8")
    report = json.loads(page.split('id="report">')[1].split("</script>")[0])
    assert report["title"] == "a & b" and report["graph"].startswith("data:image/svg+xml;base64,")
    assert report["facts"][0]["value"] == line.saved_peak_bytes
    assert {row[0]: row[1] for row in report["modules"]["rows"]} == {
        use.path: use.saved_bytes for use in line.modules
    }
    tiers = {tier["key"]: tier["bytes"] for tier in report["curve"]["tiers"]}
    assert max(tiers["disk"]) == max(level.disk_bytes for level in line.levels)
    lives = report["modules"]["lives"]
    assert sum(lives["memory"]) + sum(lives["down"]) == 0


def test_a_profiler_of_all_threads_sees_moves_on_the_workers():
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    model, x = Model(), torch.randn(400, 400)
    with torch.profiler.profile(experimental_config=everything) as profile:
        with Stash(disk=MemoryStore()) as stash:
            loss = model(x)
            stash._workers.close()
        loss.backward()
    spans = [event for event in profile.events() if event.name.startswith("backstash: ")]
    writers = {event.thread for event in spans if event.name == "backstash: write"}
    waiters = {event.thread for event in spans if "stall on the way up" in event.name}
    assert writers and waiters and not writers & waiters


class Foldable(nn.Module):
    """Each block saves what can be packed (the mask), and what can be recomputed from that and the rest (the
    input of the next Linear)."""

    def __init__(self, width=400, depth=3):
        super().__init__()
        parts = [nn.Linear(width, width), nn.GELU(), nn.Dropout(0.5)]
        self.blocks = nn.Sequential(*(nn.Sequential(*parts) for _ in range(depth)))

    def forward(self, x):
        return self.blocks(x).square().mean()


def choose(saved):
    """Recompute what a Linear saves, pack what a dropout saves."""
    if saved.module.endswith(".0"):
        return Action("recompute")
    return Action("pack") if saved.module.endswith(".2") else None


@pytest.fixture(scope="module", params=["disk", "in place"])
def folded(request):
    """A timeline of two steps, and the stash's record at its end."""
    torch.manual_seed(0)
    model, x = Foldable(), torch.randn(400, 400)
    keep = 0 if request.param == "disk" else None
    with Stash(disk=MemoryStore(), policy=choose, keep=keep, inflight=0) as stash:
        with timeline(stash) as line:
            for at in range(2):
                model(x).backward()
                stash.stats()
                line.mark(str(at))
        return line, stash.stats()


def test_what_is_freed_has_places_of_its_own(folded):
    line, stats = folded
    assert stats.recomputed_bytes and stats.packed_bytes > stats.payload_bytes > 0
    freed = stats.packed_bytes - stats.payload_bytes
    most = {name: max(getattr(level, name) for level in line.levels) for name in TIERS}
    assert most["recomputed_bytes"] == stats.recomputed_bytes // 2  # a step's
    assert most["packed_bytes"] == freed // 2
    last = line.levels[-1]
    assert (last.recomputed_bytes, last.packed_bytes) == (0, 0)
    # Of the modules.
    by_path = {use.path: use for use in line.modules}
    assert sum(use.recomputed_bytes for use in line.modules) == stats.recomputed_bytes
    assert sum(use.packed_bytes for use in line.modules) == stats.packed_bytes
    assert sum(use.payload_bytes for use in line.modules) == stats.payload_bytes
    assert sum(use.saved_bytes for use in line.modules) == stats.eligible_bytes
    assert by_path["blocks.1.0"].recomputed_bytes and not by_path["blocks.1.0"].packed_bytes
    # Every byte that comes into a place leaves it.
    assert all(
        sum(getattr(move, name) for move in line.lives.moves) == 0
        for name in ("packed_bytes", "recomputed_bytes")
    )
    assert sum(move.memory_bytes + move.down_bytes for move in line.lives.moves) == 0


def test_at_every_moment_the_places_add_up_to_what_is_saved(folded):
    line, _ = folded
    held, most = 0, 0
    for move in line.lives.moves:
        held += move.memory_bytes + move.down_bytes + move.packed_bytes + move.recomputed_bytes
        most = max(most, held)
    assert most == line.saved_peak_bytes


def test_what_backward_had_rebuilt_is_reported(folded, tmp_path):
    line, _ = folded
    blocks = sum(event.kind == "drop" for event in line.events)
    assert line.recomputed_blocks == blocks > 0 and line.unpacked_blocks > 0
    assert sum(step.made_again_seconds for step in line.steps) == pytest.approx(
        line.made_again_seconds
    )
    text = str(line)
    assert f"rebuilt: {blocks} blocks recomputed, {line.unpacked_blocks} unpacked" in text
    assert "blocks.1.0 (1.22 MiB recomputed)" in text
    line.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {"bytes to be recomputed", "bytes freed by packing"} <= counters
    spans = [event for event in events if event.get("cat") == "decode"]
    assert {event["ph"] for event in spans} == {"X"}
    assert {event["args"]["cause"] for event in spans} == {"packed", "recomputed"}
    sections = line.sections()
    assert {tier["key"] for tier in sections["curve"]["tiers"]} >= {"packed", "recomputed"}
    labels = [column["label"] for column in sections["modules"]["columns"]]
    assert labels[3:6] == ["packed", "packed to", "recomputed"]
