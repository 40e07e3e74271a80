"""After a fork nothing asks for the lock that another thread of the old process may have held."""

import gc
import threading
from types import FunctionType

import torch

from backstash import Stash
from backstash._runtime.critical_section import CriticalSection
from backstash.testing import TwinDevice, stash_on


def locks_below(root):
    """Every lock that is reached from a stash, by the class of the object that has it."""
    found, seen, ahead = {}, set(), [root]
    while ahead:
        each = ahead.pop()
        if id(each) in seen or isinstance(each, type | torch.Tensor | FunctionType):
            continue
        seen.add(id(each))
        for following in gc.get_referents(each):
            if isinstance(following, type(threading.RLock())):
                found.setdefault(id(following), set()).add(type(each).__name__)
            if type(following).__module__.startswith("backstash") or type(following) in (
                *(dict, list, tuple),
            ):
                ahead.append(following)
    return found


def test_every_object_has_the_new_lock(tmp_path):
    stash = stash_on(TwinDevice(), host="1MiB", disk=tmp_path)
    session, old = stash._session, stash._session.lock
    assert id(old) in locks_below(stash)
    tier = session.device_tiers[1].tier
    stash._forked()
    assert session.lock is not old
    assert id(old) not in locks_below(stash)
    assert id(session.lock) in locks_below(stash)
    for tiers in session.device_tiers:
        assert tiers.prefetcher._section is session.section
    assert tier._section is session.section, "what the parent's blocks have holds the new one, too"
    stash.close()


def test_the_lock_is_in_one_place():
    stash = Stash()
    assert type(stash._session.section) is CriticalSection
    assert stash._session.lock is stash._session.section.lock
