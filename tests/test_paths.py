"""What paths among the settings may be, and whether a file can be written before it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.errors import ConfigError
from cairn.paths import check_encoding, check_output_file, check_working_folder

NO_UTF_8 = os.fsdecode(b"m\xff")


@pytest.mark.parametrize(
    "value", ["m", "mod\u00e8le", Path("\u6a21\u578b"), ["a", None, 3], {"a": {"\u00e9": 1.5}}, None, b"\xff"]
)
def test_text_that_is_the_same_everywhere(value):
    check_encoding(value)


@pytest.mark.parametrize(
    "value",
    [NO_UTF_8, Path("/models") / NO_UTF_8, ["a", NO_UTF_8], {NO_UTF_8: 1}, {"a": [{"b": (NO_UTF_8,)}]}, "\ud800"],
)
def test_bytes_that_are_no_text(value):
    with pytest.raises(ValueError, match="must be valid UTF-8"):
        check_encoding(value)


def test_a_nul_is_in_no_path():
    with pytest.raises(ValueError, match="NUL"):
        check_encoding("/models/m\0")


def test_where_the_system_has_another_encoding():
    """Text beyond ASCII would be other bytes for Python than for the libraries that open files."""
    script = (
        "import sys; from cairn.paths import check_encoding; check_encoding('model')\n"
        "for text in (sys.argv[1], 'mod\\u00e8le'):\n"
        "    try: check_encoding(text)\n"
        "    except ValueError as error: print(error)"
    )
    environ = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", script, "mod\u00e8le"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20, check=True)
    assert (
        done.stdout.splitlines()
        == ["must be ASCII where the system's encoding is ascii (set LC_ALL=C.UTF-8 and leave PYTHONUTF8 unset)"] * 2
    )


def test_a_file_that_can_be_written_stays_as_it_is(tmp_path):
    there, new, link = (tmp_path / name for name in ("there", "new", "link"))
    there.write_text("kept")
    link.symlink_to(tmp_path / "target")
    for path in (there, new, link, Path("/dev/null")):
        check_output_file("--json", path)
    assert there.read_text() == "kept" and {path.name for path in tmp_path.iterdir()} == {"there", "link"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none/x", "there is no folder"),
        ("file/x", "there is no folder"),
        ("folder", "Is a directory"),
        ("x" * 256, "File name too long"),
        ("/proc/cairn", ""),
    ],
)
def test_a_file_that_cannot_be_written(name, reason, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=f"^--json {tmp_path / name} cannot be written: .*{reason}"):
        check_output_file("--json", tmp_path / name)


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    check_working_folder()
    gone.rmdir()
    with pytest.raises(ConfigError, match="the working directory cannot be used: No such file"):
        check_working_folder()
