"""What a notebook shows of a stash, its figures, plans, reports and handles."""

import html.parser

import torch
from torch import nn

from backstash import Stash
from backstash._text import html_table, html_text
from backstash.graph import register_multi_grad_hook
from backstash.hooks import capture
from backstash.plan import Plan, PlannedClass, StepFigures
from backstash.report import gradient_errors, saved_report, timeline


class Seen(html.parser.HTMLParser):
    """Reads HTML: its text, and that each element is closed in turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.styles = [], "", []
        self.feed(text)
        self.close()
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.styles.append(dict(attrs).get("style", ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_stats_as_flat_floats(tmp_path):
    stash = Stash(keep=None, disk=tmp_path)
    with stash:
        loss = torch.zeros(100, 1000, requires_grad=True).exp().sum()
    figures = stash.stats().as_dict(prefix="stash/")
    assert figures["stash/keep_bytes"] == 400_000.0
    assert {"stash/saves", "stash/stall_seconds", "stash/prefetch_hits"} <= figures.keys()
    assert all(type(value) is float for value in figures.values())
    assert all(name.startswith("stash/") for name in figures)
    assert stash.stats().as_dict().keys() == {name.removeprefix("stash/") for name in figures}
    loss.backward()


def things(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    stash = Stash(disk=tmp_path, name="<b>trial</b>")
    x = torch.ones(512, 64)
    with saved_report(model) as saved:
        model(x).sum().backward()
    with timeline(stash) as lines, stash:
        loss = model(x).exp().sum()
    errors = gradient_errors(lambda: model(x).sum(), model, stash)
    plan = Plan(
        1 << 30,
        "planned",
        (PlannedClass("0 <x>", 1, 4096, (("disk", 1),), 0.1, "cheapest"),),
        predicted=StepFigures(1 << 29, 0.5),
    )
    handle = capture(model, "1")
    attached = stash.attach(model)
    parameters = register_multi_grad_hook(list(model.parameters()), lambda _: None)
    yield from (
        (stash, ["&lt;b&gt;trial", "on disk"]),
        (stash.stats(), ["saves", "on disk", "moved"]),
        (plan, ["plan within 1.00 GiB", "predicted", "512 MiB", "0 &lt;x&gt;: disk 1"]),
        (saved, [str(saved).splitlines()[0][:20]]),
        (lines, []),
        (errors, ["2 gradients, each equal"]),
        (handle, ["capture: ", "&lt;"]),
        (attached, ["stash on a Sequential"]),
        (parameters, ["Handle"]),
    )
    loss.backward()
    model(x).sum().backward()
    for each in (attached, handle, parameters):
        each.remove()
    assert "removed" in attached._repr_html_()
    stash.close()


def test_each_thing_shows_itself_in_a_notebook(tmp_path):
    for thing, words in things(tmp_path):
        shown = thing._repr_html_()
        seen = Seen(shown)
        assert "<b>trial" not in shown
        for word in words:
            assert word in shown, (type(thing), word, shown)
        # The page's theme has all the colours: none of ours.
        assert seen.text and not any("#" in style or "rgb" in style for style in seen.styles)
        assert len(shown) < 20_000


def test_long_texts_are_folded():
    shown = Seen(html_text("\n".join(map(str, range(100)))))
    assert "60 more lines" in shown.text and "99" in shown.text
    assert "more lines" not in html_text("\n".join(map(str, range(40))))


def test_a_table_is_of_text_alone():
    seen = Seen(html_table("a<b", ("", "x"), [("<i>", "1")], ["<u>"]))
    assert [word in seen.text for word in ("a<b", "<i>", "<u>", "1")] == [True] * 4
