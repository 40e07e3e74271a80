"""Another user cannot open, find or read what is on disk: tried as another user id."""

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from backstash import Disk, Stash
from backstash.errors import StashIOError

NOBODY = 65534
SECRET = b"what backward needs "
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)


@pytest.fixture
def open_dir(tmp_path):
    """A directory that everyone may enter, list and write, and so may everything above it be entered."""
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    changed = []
    for part in tmp_path.parents:
        mode = stat.S_IMODE(part.stat().st_mode)
        if not mode & stat.S_IXOTH:
            changed.append((part, mode))
            part.chmod(mode | stat.S_IXOTH)
    tmp_path.chmod(0o755)
    yield directory
    for part, mode in changed:
        part.chmod(mode)


# The interpreter may lie where only its owner can start it, so the rights are given up after the start.
BECOME_NOBODY = f"""
import os
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""


def as_nobody(program: str, *arguments: object, first: str = "") -> str:
    """What ``program`` prints when it runs as another user, with no right of ours; ``first`` runs as us."""
    whole = first + BECOME_NOBODY + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", whole, *map(str, arguments)],
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def held(disk: Disk) -> None:
    """Bytes in ``disk``, all the way on the file."""
    data = torch.frombuffer(bytearray(SECRET * 4096), dtype=torch.uint8)
    slot = disk.reserve(data.numel())
    disk.write(slot, data.data_ptr())


TRY_ALL = """
    import os, sys
    directory, owner, fd = sys.argv[1:]
    assert os.geteuid() == 65534
    opened, seen = [], []
    for name in os.listdir(directory):
        seen.append(name)
        try:
            opened.append(open(os.path.join(directory, name), "rb").read(16))
        except PermissionError:
            pass
    for path in (f"/proc/{owner}/fd/{fd}", f"/proc/{owner}/mem", f"/proc/{owner}/map_files"):
        try:
            with open(path, "rb") as file:
                opened.append(file.read(16))
        except (PermissionError, IsADirectoryError, FileNotFoundError):
            pass
        try:
            os.link(path, os.path.join(directory, "stolen"), follow_symlinks=True)
            opened.append("linked " + path)
        except OSError:
            pass
    print(seen, opened)
"""


@needs_root
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_nobody_finds_or_opens_the_file(open_dir, umask):
    before = os.umask(umask)
    try:
        disk = Disk(open_dir)
    finally:
        os.umask(before)
    held(disk)
    assert as_nobody(TRY_ALL, open_dir, os.getpid(), disk._file.fd) == "[] []\n"
    disk.close()


@needs_root
def test_the_attack_reads_a_file_that_is_open_to_all(open_dir):
    """The same attack on a file as a careless program writes it: so it can succeed."""
    (open_dir / "careless").write_bytes(SECRET)
    (open_dir / "careless").chmod(0o644)
    assert repr(SECRET[:16]) in as_nobody(TRY_ALL, open_dir, os.getpid(), 0)


@needs_root
def test_while_a_file_has_a_name_nobody_else_opens_it(open_dir, monkeypatch):
    """Where a file system has no unnamed files, at the moment at which it still has one."""
    opened, unlink, tries = os.open, os.unlink, []

    def refuse_unnamed(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "no unnamed files here")
        return opened(path, flags, *rest, **named)

    def attacked(path, **named):
        if str(path).startswith(str(open_dir)):
            tries.append(as_nobody(TRY_ALL, open_dir, os.getpid(), 0))
        unlink(path, **named)

    monkeypatch.setattr(os, "open", refuse_unnamed)
    monkeypatch.setattr(os, "unlink", attacked)
    before = os.umask(0)
    try:
        disk = Disk(open_dir)
    finally:
        os.umask(before)
    held(disk)
    disk.close()
    assert tries
    for said in tries:
        assert ".backstash-" in said and said.endswith("[]\n"), said


def test_a_name_that_was_taken_over_is_not_opened(tmp_path, monkeypatch):
    """Between its making and its losing its name, the file is exchanged for a link to someone's own."""
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"")
    opened, unlink = os.open, os.unlink

    def refuse_unnamed(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "no unnamed files here")
        number = opened(path, flags, *rest, **named)
        if ".backstash-" in str(path):
            unlink(path)
            os.symlink(theirs, path)
        return number

    monkeypatch.setattr(os, "open", refuse_unnamed)
    disk = Disk(tmp_path)
    held(disk)
    assert theirs.read_bytes() == b""
    disk.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_link_that_another_user_put_in_its_place_is_refused(open_dir, tmp_path, mode):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    open_dir.chmod(mode)
    os.symlink(elsewhere, open_dir / "scratch")
    os.chown(open_dir / "scratch", NOBODY, NOBODY, follow_symlinks=False)
    for directory in (open_dir / "scratch", open_dir / "scratch" / "deeper"):
        (elsewhere / "deeper").mkdir(exist_ok=True)
        with pytest.raises(StashIOError, match=r"'.*scratch' is a symbolic link .*uid 65534"):
            Disk(directory)
        with pytest.raises(StashIOError, match="symbolic link"):
            Stash(disk=directory)


@needs_root
def test_links_of_one_s_own_and_in_one_s_own_directory_work(open_dir, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.symlink(elsewhere, open_dir / "own")
    disk = Disk(open_dir / "own")
    assert Path(os.readlink(f"/proc/self/fd/{disk._file.fd}")).is_relative_to(elsewhere)
    disk.close()
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o755)
    os.symlink(elsewhere, closed / "a colleague's")
    os.chown(closed / "a colleague's", NOBODY, NOBODY, follow_symlinks=False)
    Disk(closed / "a colleague's").close()


@needs_root
def test_a_directory_that_one_may_not_write_to_is_named(open_dir):
    """As that user: root may write everywhere."""
    open_dir.chmod(0o555)
    program = """
        try:
            Disk(sys.argv[1])
        except OSError as error:
            print(type(error).__name__, error)
    """
    said = as_nobody(program, open_dir, first="import sys; from backstash import Disk")
    assert said.startswith("StashIOError") and f"{str(open_dir)!r} cannot hold a file" in said
