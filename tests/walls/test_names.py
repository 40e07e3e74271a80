"""Names are other people's: whatever they hold, they are shown as text and obeyed by nothing."""

import io
import json
import logging
import shutil
import unicodedata
import warnings

import pytest
import torch
from torch import nn

from backstash import Stash, hooks
from backstash.errors import InplaceError, StashError
from backstash.graph import label_modules, log_backward
from backstash.report import draw, render_page, saved_report, timeline

# A terminal's title and colours, a line of its own that lies, text turned round, markup of three kinds.
HOSTILE = "x\x1b]0;owned\x07\x1b[31m\nbackstash: forged\r\x9b2J\u202e\u2028<script>alert(1)</script>&[red]|`y`"
OBEYED_HERE = set("\x1b\x07\x9b\u202e\u2028\r")
OBEYED = {"Cc", "Cf", "Zl", "Zp"}


class Net(nn.Module):
    """Two modules with hostile names; ``spoil`` changes in place what the first saved."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(64, 64))
        self.add_module("2" + HOSTILE, nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self._modules.values()
        return second(first(x))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.randn(64, 64)


def assert_harmless(text: str) -> None:
    """Nothing in it that a terminal obeys, and no line that a name began; the name is there, escaped."""
    assert "forged" in text, f"no name is in this text at all: {text!r}"
    lines = text.split("\n")
    assert [c for line in lines for c in line if unicodedata.category(c) in OBEYED] == []
    assert not any(line.lstrip().startswith("backstash: forged") for line in lines)


def test_the_check_notices_a_bare_name():
    for bad in (HOSTILE, "forged\x1b[31m", "x\nbackstash: forged", "forged\u202e"):
        with pytest.raises(AssertionError):
            assert_harmless(bad)
    with pytest.raises(AssertionError):
        assert_harmless("no name")


def test_what_is_saved(net, x):
    with saved_report(net) as saved:
        net(x).sum().backward()
    assert_harmless(str(saved))
    assert_harmless(saved.text())
    assert {HOSTILE, "2" + HOSTILE} <= {row.name for row in saved.rows}, "as data it is unchanged"


def test_what_is_saved_with_rich(net, x):
    console = pytest.importorskip("rich.console")
    with saved_report(net) as saved:
        net(x)
    shown = console.Console(file=io.StringIO(), width=300)
    shown.print(saved.rich())
    assert_harmless(shown.file.getvalue())
    assert "[red]" in shown.file.getvalue()


def test_figures_and_timeline(net, x, tmp_path):
    stash = Stash(disk=tmp_path, min_bytes=0, name=HOSTILE)
    with stash.record() as recording, stash:
        loss = net(x).sum()
    loss.backward()
    line = timeline(recording)
    assert_harmless(str(stash.stats()))
    assert_harmless(str(line))
    assert_harmless(repr(stash))
    line.to_chrome_trace(tmp_path / "trace.json")
    trace = (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert HOSTILE in {event["args"].get("module") for event in json.loads(trace)["traceEvents"]}
    assert trace.isascii() and trace.isprintable()
    stash.close()


def test_pages(net, x, tmp_path):
    with saved_report(net) as saved:
        net(x)
    stash = Stash(disk=tmp_path, min_bytes=0)
    with stash.record() as recording, stash:
        net(x).sum().backward()
    saved.to_html(tmp_path / "saved.html")
    pages = [
        (tmp_path / "saved.html").read_text(encoding="utf-8"),
        render_page({"title": HOSTILE, "command": HOSTILE, **timeline(recording).sections()}),
    ]
    for page in pages:
        assert "forged" in page and "<script>alert" not in page
        assert not set(page) & OBEYED_HERE
    stash.close()


def test_pictures(net, x):
    picture = draw(net(x), dict(net.named_parameters()))
    pages = (picture.to_svg(), picture.to_html()) if shutil.which("dot") else ()
    for text in pages:
        assert "forged" in text and "<script>alert" not in text
        assert not set(text) & OBEYED_HERE
    for text in (picture.to_dot(), str(picture)):
        assert "owned" in text and not set(text) & OBEYED_HERE


def test_errors(net, x, tmp_path):
    with Stash(disk=tmp_path, min_bytes=0) as stash:
        loss = net(x.requires_grad_() * 1).sum()
        with torch.no_grad():
            net._modules[HOSTILE].weight.mul_(2)
    with pytest.raises(InplaceError) as raised:
        loss.backward()
    assert_harmless(str(raised.value))
    stash.close()


def test_hooks(net, x, capsys):
    said = []
    with hooks.trace(net, to=lambda call: said.append(str(call))):
        net(x)
    assert_harmless("\n".join(said))
    with hooks.watch_gradients(net, every=1):
        net(x).sum().backward()
    assert_harmless(capsys.readouterr().out)
    with hooks.capture(net, HOSTILE) as captured:
        net(x).sum().backward()
        assert_harmless(str(hooks.hooks_on(net)))
        assert_harmless(repr(captured[HOSTILE]))
    assert_harmless(str(hooks.summary(net, x)))


def test_complaints_of_hooks(net, x):
    with pytest.raises(hooks.NoMatchError) as raised:
        hooks.capture(net, "no such")
    assert_harmless(str(raised.value))
    with torch.no_grad():
        net._modules[HOSTILE].bias.fill_(torch.nan)
    with pytest.raises(hooks.NonFiniteError) as raised, hooks.find_nonfinite(net):
        net(x)
    assert_harmless(str(raised.value))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hooks.capture(net, HOSTILE):
            pass
    assert_harmless(str(caught[0].message))


def test_log_of_backward(net, x, caplog):
    with label_modules(net):
        loss = net(x).sum()
    with caplog.at_level(logging.DEBUG, "backstash.graph"), log_backward(loss, model=net):
        loss.backward()
    assert_harmless("\n".join(record.getMessage() for record in caplog.records))


@pytest.mark.parametrize(
    "name", ["policy", "codec", "on_full", "name", "keep", "budget", "min_bytes", "plan"]
)
def test_a_message_about_a_wrong_argument_shows_no_values_of_a_tensor(name):
    with pytest.raises((StashError, TypeError)) as caught:
        Stash(**{name: torch.full((3,), 1234.5)})
    assert "1234" not in str(caught.value) and "1.2345" not in str(caught.value)


def test_a_message_about_a_wrapped_or_attached_object_shows_no_values_of_it():
    secret = torch.full((3,), 1234.5)
    with Stash() as stash:
        for wrong in (stash, stash.attach):
            with pytest.raises((StashError, TypeError)) as caught:
                wrong(secret)
            assert "1234" not in str(caught.value)
