"""The process's memory as far as stashes have a part in it, over a fixed sum: no noise, no allocator."""

import weakref
from collections import Counter

import torch
from torch import nn

import backstash.stash
from backstash import Stash
from backstash._budget.meter import ProcessMeter
from backstash._core.admission import Admission

MIB = 1 << 20
OTHER = 100 * MIB


class CountedMemory:
    """Makes stashes, with ``defaults``; the process has what they hold, and ``other()``.

    ``trim`` is called when a stash with a budget returns free memory to the system.
    """

    def __init__(self, monkeypatch, **defaults):
        self.peaks, self.other, self.trim = [0], lambda: OTHER, lambda: None
        self._most = 0  # that was ever held
        self._defaults = {"min_bytes": 0, **defaults}
        self._stashes = []
        self._left = Counter()  # by address and size: what is left in place without being a block
        monkeypatch.setattr(ProcessMeter, "now", lambda meter: self.now())
        monkeypatch.setattr("backstash._budget.meter._peak_bytes", lambda: self._most)
        # What backward uses is no longer the stash's, and not counted here.
        monkeypatch.setattr("backstash._budget.record._Events._note_in_use", lambda *_: None)
        trim = backstash.stash._trim
        monkeypatch.setattr(backstash.stash, "_trim", lambda of: (self.trim(), trim(of)))
        for name in ("hook", "hook_leaving"):
            counting = _method(self._counting, getattr(Admission, name))
            monkeypatch.setattr(Admission, name, counting)

    def __call__(self, **arguments):
        stash = Stash(**{**self._defaults, **arguments})
        self._stashes.append(weakref.ref(stash))
        return stash

    def close(self):
        """Each stash that is still there."""
        for each in self._stashes:
            if (stash := each()) is not None:
                stash.close()

    def left_bytes(self):
        """Of what is left in place without being a block."""
        left = list(self._left)  # at once: a thread may sample while others save
        return sum({where: nbytes for where, nbytes in left}.values())

    def saved_bytes(self):
        """What the stashes hold, and what is left in place."""
        for _ in range(8):  # a thread may sample while others save
            held = left = self.left_bytes()
            for stash in self._stashes:
                levels = backstash.stash._levels_of(stash)
                held += levels[0] + levels[1] + levels[4]
            if self.left_bytes() == left:
                break
        return held

    def now(self):
        held = self.other() + self.saved_bytes()
        self.hold(held)
        return held

    def hold(self, nbytes):
        """The process has so much, for a moment in which nobody looks."""
        self.peaks[0] = max(self.peaks[0], nbytes)
        self._most = max(self._most, nbytes)

    def _counting(self, hook, admission, thread_state, *given):
        """The hook, which also counts what it leaves in place as long as autograd holds it."""
        pack = hook(admission, thread_state, *given)

        def packed(tensor):
            before = thread_state.fitting_saves
            given = pack(tensor)
            if thread_state.fitting_saves > before and not admission.identities.has_in_place(
                tensor
            ):
                held = given[0] if type(given) is tuple else given
                key = held.untyped_storage().data_ptr(), held.untyped_storage().nbytes()
                self._left[key] += 1
                weakref.finalize(held, self._gone, key)
            return given

        return packed

    def _gone(self, key):
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]


def _method(function, *given):
    return lambda *arguments: function(*given, *arguments)


class Saving(torch.autograd.Function):
    """Saves what it is given, which cannot be recomputed or packed."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + 0.5

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad + x


class Saves(nn.Module):
    def forward(self, x):
        return Saving.apply(x)
