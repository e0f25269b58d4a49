"""The folder of `--disk-cache`: bad ones are refused with the fix, and others' are left alone."""

import errno
from pathlib import Path

import pytest
from faulty_files import FaultyFiles
from tier_entries import IDENTITY

from cairn.errors import ConfigError
from cairn.tiers.files import LOCK_SECONDS, Files
from cairn.tiers.folder import check_folder, open_folder

FACTS = {"model_type": "qwen3_5", "dtype": "float32"}


def open_at(path, identity=IDENTITY, read_only=False, files=None, least=1000):
    return open_folder(str(path), identity, FACTS, least, read_only=read_only, files=files or Files())


@pytest.fixture
def opened(request):
    """Opens folders and gives their locks back."""
    folders = []

    def run(*args, **kwargs):
        folders.append(open_at(*args, **kwargs))
        return folders[-1]

    yield run
    for folder in folders:
        if folder.lock is not None:
            Files().close(folder.lock)


def test_a_new_folder_is_made_for_its_owner_alone(tmp_path, opened):
    folder = opened(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "cairn-cache").exists()
    assert folder.path.startswith(str(tmp_path)) and len(folder.secret) == 32
    for file in (tmp_path / "a").rglob("*"):
        assert file.stat().st_mode & 0o077 == 0, file
    assert b"qwen3_5" in (tmp_path / "a" / "b" / IDENTITY.hex()[:16] / "model").read_bytes()


def test_the_secret_stays(tmp_path, opened):
    first = opened(tmp_path)
    Files().close(first.lock)
    object.__setattr__(first, "lock", None)
    assert opened(tmp_path).secret == first.secret
    assert opened(tmp_path, read_only=True).secret == first.secret


class Waits(Files):
    """Sleeps no time, and releases `lock` at the third sleep."""

    def __init__(self, lock: int | None = None) -> None:
        self.slept, self.lock_to_release = 0.0, lock

    def sleep(self, seconds):
        self.slept += seconds
        if self.lock_to_release is not None and self.slept > 2 * seconds:
            self.close(self.lock_to_release)
            self.lock_to_release = None


def test_a_server_waits_for_the_one_that_ends(tmp_path, opened, caplog):
    caplog.set_level("INFO")
    files = Waits(open_at(tmp_path).lock)
    assert opened(tmp_path, files=files).lock is not None
    assert files.lock_to_release is None and caplog.text.count("another process holds it; waiting for 30 s") == 1


def test_there_is_one_writer(tmp_path, opened):
    opened(tmp_path)
    files = Waits()
    with pytest.raises(ConfigError, match=r"another server writes there.*--disk-cache-read-only"):
        open_at(tmp_path, files=files)
    assert files.slept == pytest.approx(LOCK_SECONDS)
    assert opened(tmp_path, read_only=True).lock is None
    assert opened(tmp_path, identity=bytes(32)).lock is not None, "of another model"


def test_others_are_named_and_left_alone(tmp_path, opened, caplog):
    other = opened(tmp_path, identity=bytes(32))
    Path(other.path, "0000000000000001.seg").write_bytes(b"theirs")
    caplog.clear()
    opened(tmp_path)
    assert other.path in caplog.text and "6 bytes" in caplog.text and "is ignored" in caplog.text
    assert Path(other.path, "0000000000000001.seg").read_bytes() == b"theirs"


def test_a_folder_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / "letters.txt").write_text("dear")
    for read_only in (False, True):
        with pytest.raises(ConfigError, match="not empty: name an empty or a new one"):
            open_at(tmp_path, read_only=read_only)
    assert [file.name for file in tmp_path.iterdir()] == ["letters.txt"]


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is no folder: name an empty or a new one"):
        open_at(tmp_path / "file")
    with pytest.raises(ConfigError, match="without --disk-cache-read-only makes it"):
        open_at(tmp_path / "none", read_only=True)


def test_the_same_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "letters.txt").write_text("dear")
    (tmp_path / "file").write_text("")
    for name, fix in (("strange", "not empty: name an empty"), ("file", "it is no folder")):
        with pytest.raises(ConfigError, match=fix):
            check_folder(str(tmp_path / name), read_only=False)
    with pytest.raises(ConfigError, match="without --disk-cache-read-only makes it"):
        check_folder(str(tmp_path / "none"), read_only=True)
    check_folder(str(tmp_path / "a" / "b" / "c"), read_only=False)
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for name in ("none", "."):
        with pytest.raises(ConfigError, match=r"not empty|Permission denied: name a folder"):
            check_folder(str(tmp_path / name), read_only=False)


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "Permission denied: name a folder that this user may write to"),
        (errno.EROFS, "Read-only file system: name a folder that this user may write to"),
        (errno.ENOSPC, "its disk is full: free some space"),
    ],
)
def test_what_cannot_be_written_to_is_refused(tmp_path, number, fix):
    files = FaultyFiles()
    files.fail["create"] = number
    with pytest.raises(ConfigError, match=fix):
        open_at(tmp_path, files=files)


def test_a_full_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Files, "free_bytes", lambda self, path: 999)
    with pytest.raises(ConfigError, match="999 bytes left, and one entry takes 1000"):
        open_at(tmp_path)
    monkeypatch.undo()
    lock = open_at(tmp_path).lock
    assert lock is not None, "the failed one has given its lock back"
    Files().close(lock)
