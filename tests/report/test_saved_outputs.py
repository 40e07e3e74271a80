"""What a saved report says of waste and budgets, and how it is written: text, rich, JSON, page, pandas."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from backstash import Stash
from backstash.report import SavedReport, saved_report
from backstash.report._saved.budgets import budgets
from backstash.report._saved.save import Found, Save, SavedStorage
from backstash.report._saved.text import where_of
from backstash.report._saved.waste import CONSTANT, MASK, ZEROS, find_waste
from saved_programs import program

COUNT = 40_000


def of(values: Tensor) -> tuple[str, int]:
    found = find_waste(values)
    assert found is not None
    return found


def test_masks_indices_and_zeros_are_found() -> None:
    torch.manual_seed(0)
    coin = torch.rand(COUNT) > 0.5
    assert of(torch.cat([coin, coin])) == (MASK, COUNT // 4)
    assert of(torch.where(coin, 2.0, 0.0)) == (MASK, COUNT // 8 + 8)
    assert of(torch.where(coin, 2.0, 0.0).to(torch.float64)) == (MASK, COUNT // 8 + 16)
    assert of(torch.arange(COUNT) % 200) == ("int64: 1 of 8 bytes are enough", COUNT)
    assert of(torch.arange(COUNT) * 3 - 5) == ("int64: 4 of 8 bytes are enough", 4 * COUNT)
    assert of((torch.arange(COUNT) % 9).int() - 4) == ("int32: 1 of 4 bytes are enough", COUNT)
    assert of(torch.arange(COUNT) % 100 + 2**40) == ("int64: 1 of 8 bytes are enough", COUNT)
    assert of(torch.full((COUNT,), -0.0)) == of(torch.full((COUNT,), 7)) == (CONSTANT, 0)
    values = torch.randn(COUNT).relu()
    assert of(values) == (ZEROS, COUNT // 8 + 4 * int(values.count_nonzero()))
    images = torch.randn(4, 8, 40, 40).relu().to(memory_format=torch.channels_last)
    assert of(images)[0] == ZEROS


def test_nothing_is_found_where_nothing_is() -> None:
    torch.manual_seed(0)
    dense = torch.randn(COUNT)
    assert of(dense) == ("", dense.nbytes)
    assert of(torch.arange(COUNT) * 2**40) == ("", 8 * COUNT)
    # 0.0 and -0.0 are two values, and so are two NaNs of unlike bits: with a third it is no mask.
    signs = torch.where(torch.rand(COUNT) > 0.5, 0.0, -0.0)
    signs[COUNT // 2 + 1] = 1.0
    assert of(signs)[0] == ZEROS and of(signs)[1] > COUNT
    late = torch.ones(COUNT)
    late[7], late[-2] = 3.0, 2.0
    assert of(late) == ("", late.nbytes)
    assert of(torch.zeros(10)) == ("", 40)  # too small to be worth a word


def test_what_cannot_be_looked_at_is_not_guessed() -> None:
    holes = torch.zeros(COUNT, 2)[:, 0]
    assert find_waste(holes) is None
    assert find_waste(torch.randn(COUNT, 2)[:, 0]) == ("", 4 * COUNT)
    assert find_waste(torch.zeros(COUNT, device="meta")) is None
    assert find_waste(torch.eye(200).to_sparse()) is None


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_is_claimed_holds_the_values(data: st.DataObject) -> None:
    """The bytes that would do are no fewer than what the claimed form takes."""
    few = data.draw(st.lists(st.floats(width=32), min_size=1, max_size=4))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    values = torch.tensor(few)[torch.randint(len(few), (COUNT,))]
    what, nbytes = of(values)
    patterns = values.view(torch.int32)
    if what == CONSTANT:
        assert patterns.unique().numel() == 1 and nbytes == 0
    elif what == MASK:
        assert patterns.unique().numel() <= 2 and nbytes == COUNT // 8 + 8
    elif what == ZEROS:
        assert nbytes == COUNT // 8 + 4 * int((patterns != 0).sum())
    else:
        assert patterns.unique().numel() > 2 and nbytes == values.nbytes


class Wasteful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Dropout(0.5) for _ in range(3))
        self.pool = nn.MaxPool1d(2)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        x = self.pool(self.relu(x))
        return x + (x[:1] * 3).exp()[:, :, :40].sin().sum()


def wasteful() -> tuple[SavedReport, Tensor]:
    torch.manual_seed(0)
    model, x = Wasteful(), torch.randn(4, 8, 4096, requires_grad=True)
    with saved_report(model) as saved:
        loss = model(x).sum()
    return saved, loss


def test_waste_is_added_up_over_alike_modules() -> None:
    saved, loss = wasteful()
    found = {(waste.what, waste.name): waste for waste in saved.waste}
    masks = found[MASK, "blocks.*"]
    assert (masks.tensors, masks.nbytes) == (3, 3 * 4 * 8 * 4096 * 4)
    assert found["int64: 2 of 8 bytes are enough", "pool"].could_be_bytes == 4 * 8 * 2048 * 2
    assert (ZEROS, "relu") in found
    assert any("one bit each is enough" in line for line in str(saved).splitlines())
    with saved_report(look=False) as unseen:
        Wasteful()(torch.randn(4, 8, 4096, requires_grad=True))
    assert not any(waste.what.startswith(("two", "zeros", "int")) for waste in unseen.waste)
    loss.backward()


def test_a_small_part_that_holds_a_large_storage_is_pointed_out(disk_dir: Path) -> None:
    x = torch.randn(300, 300, requires_grad=True)

    def part() -> Tensor:
        return (x * 2)[0, :10].exp() * (x * 2)[1, :10]

    with saved_report() as saved:
        loss = part().sum()
    small = [waste for waste in saved.waste if "small part" in waste.what]
    assert [(waste.nbytes, waste.could_be_bytes) for waste in small] == [(360_000, 40)]
    with Stash(disk=disk_dir), saved_report() as saved:
        loss = loss + part().sum()
    assert not [waste for waste in saved.waste if "small part" in waste.what]  # a stash copies it
    loss.backward()


def test_advice_is_to_move_what_can_be_moved() -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(8)))
    x = torch.randn(1 << 20, requires_grad=True)
    with saved_report(model) as saved:
        y = model(x)
    everything, half = saved.advice
    assert everything.code == 'Stash(disk="/path/on/a/fast/disk")'
    assert half.code == 'Stash(keep="16MiB", disk="/path/on/a/fast/disk")'
    assert "32 MiB move down" in everything.text and "16 MiB move down" in half.text
    for advice in saved.advice:
        eval(advice.code.replace("/path/on/a/fast/disk", "/tmp"), {"Stash": Stash}).close()
    assert everything.code in str(saved)
    y.sum().backward()
    small, _ = wasteful()
    assert "gain little" in small.advice[0].text and small.advice[0].code == ""


def test_budgets_are_for_each_device_and_go_where_a_stash_would() -> None:
    """The accelerator is only a name here: what is reckoned is sizes."""
    found, places = Found(), {"cpu": 40, "cuda": 100}
    for device, mebibytes in places.items():
        for _ in range(2):
            save = Save(torch.ones(1), "", 0)
            stored = SavedStorage(0, mebibytes << 20, "activation", torch.device(device))
            save.looks_into((stored,))
            found.lives.append((save, True))
    everything, half, _, nothing = budgets(found, "/d")
    assert everything.moved_bytes == 0 and everything.keep_bytes == 280 << 20
    assert nothing.moved_bytes == 280 << 20 and nothing.code == 'Stash(host="auto", disk="/d")'
    assert half.code == 'Stash(keep="140MiB", host="auto", disk="/d")'
    assert half.moved_bytes == 100 << 20  # of the accelerator's 200; all of the CPU's 80 stay
    found.lives = [life for life in found.lives if life[0].stored[0].device.type == "cuda"]
    assert budgets(found)[-1].code == 'Stash(host="auto")'


def test_under_a_stash_the_table_says_how_much_is_where(disk_dir: Path) -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(4)))
    x = torch.randn(1 << 15, requires_grad=True)
    with Stash(keep="128KiB", disk=disk_dir, inflight=0) as stash, saved_report() as saved:
        y = nn.Sequential(model)(x)
    stash.stats()
    (row,) = saved.by_module(1)
    assert dict(row.where) == {"disk": 3 * x.nbytes, "keep": x.nbytes}
    assert "on disk 75%, kept 25%" in "".join(where_of(row) for row in saved.by_module(1))
    assert "A stash holds 128 KiB kept, 384 KiB on disk; 0 B more" in saved.advice[0].text
    y.sum().backward()


def test_what_gets_a_gradient_stays(disk_dir: Path) -> None:
    x = torch.randn(300, 300, requires_grad=True)
    with Stash(disk=disk_dir, inflight=0) as stash:
        y = x * x[:200].repeat(2, 1)[:300]
    with saved_report() as saved:
        z = x * x[:200].repeat(2, 1)[:300]
    assert saved.unique_bytes == x.nbytes + 400 * 300 * 4
    assert saved.budgets()[-1].moved_bytes == stash.stats().eligible_bytes == 400 * 300 * 4
    (y + z).sum().backward()


def test_text_has_every_module_and_fits_its_columns() -> None:
    model, forward = program()
    with saved_report(model) as saved:
        loss = forward()
    text = str(saved)
    lines = text.splitlines()
    assert all(
        any(line.startswith(row.module or "(outside") for line in lines) for row in saved.rows
    )
    rule = next(line for line in lines if line.startswith("---"))
    table = lines[lines.index(rule) - 1 : lines.index("", lines.index(rule))]
    ends = [i for i, (a, b) in enumerate(zip(rule + " ", " " + rule, strict=True)) if a + b == " -"]
    for line in table:
        for end in ends[:-1]:
            assert line.ljust(len(rule))[end : end + 2].strip() == "", line
    assert saved.text(advice=False) in text and "advice:" not in saved.text(advice=False)
    loss.backward()


def test_a_table_of_many_modules_is_folded_and_cut() -> None:
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Tanh() for _ in range(4))) for _ in range(10)),
    )
    tail = nn.Sequential(*(nn.Sequential(nn.Sigmoid()) for _ in range(40)))
    model.add_module("tail", tail)
    x = torch.randn(10, requires_grad=True)
    with saved_report(model) as saved:
        y = model(x)
    lines = str(saved).splitlines()
    assert len(saved.rows) == 80
    assert any(line.startswith("*.0 ") and line.split()[1] == "10" for line in lines)
    assert any(line.startswith("tail.*.0") for line in lines)
    with saved_report() as wide:
        for layer in nn.ModuleList(type(f"Layer{at}", (nn.Tanh,), {})() for at in range(40)):
            y = y + layer(x)
    assert "... 10 more with 400 B in all" in str(wide)
    y.sum().backward()


def test_rich_prints_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    rich = pytest.importorskip("rich.console")
    model, forward = program()
    with saved_report(model) as saved:
        forward()
    console = rich.Console(width=160, record=True, file=open("/dev/null", "w"))
    console.print(saved)
    shown = console.export_text()
    console.file.close()
    for line in saved.text().splitlines():
        words = [word for word in line.split() if set(word) != {"-"}]
        assert all(word in shown for word in words), line
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install rich"):
        saved.rich()


def test_json_has_everything(tmp_path: Path) -> None:
    saved, loss = wasteful()
    saved.to_json(tmp_path / "saved.json")
    found = json.loads((tmp_path / "saved.json").read_text())
    assert found == json.loads(json.dumps(saved.as_dict()))
    assert found["unique_bytes"] == sum(row["unique_bytes"] for row in found["rows"])
    assert found["total_bytes"] == sum(tensor["nbytes"] for tensor in found["tensors"])
    assert {row["name"] for row in found["by_kind"]} == {row.name for row in saved.by_kind()}
    assert {tensor["op"] for tensor in found["tensors"]} >= {"MulBackward0", "ReluBackward0"}
    assert found["tensors"][0]["shape"] == [4, 8, 4096]
    assert len(found["waste"]) == len(saved.waste) and len(found["budgets"]) == 4
    loss.backward()


def test_pandas_or_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, loss = wasteful()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        saved.to_pandas()
    monkeypatch.undo()
    loss.backward()
    pytest.importorskip("pandas")
    rows, tensors = saved.to_pandas(), saved.to_pandas(tensors=True)
    assert rows["unique_bytes"].sum() == saved.unique_bytes
    assert list(rows["name"]) == [row.name for row in saved.rows]
    assert tensors["nbytes"].sum() == saved.total_bytes
    assert math.isclose(rows["share"].sum(), 1)


def test_an_empty_report_says_so() -> None:
    with saved_report() as saved, torch.no_grad():
        nn.Linear(3, 3)(torch.ones(2, 3))
    assert saved.rows == () and saved.unique_bytes == 0
    assert "Nothing was saved that is not there without backward too" in str(saved)
    assert [budget.moved_bytes for budget in saved.budgets()] == [0, 0, 0, 0]
