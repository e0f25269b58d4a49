"""Models by their names, from a hub on this machine; each start is a process of its own, as it is for users."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import httpx
import pytest

from cairn.cli import main
from doubles.fake_hub import FakeHub, Repository, fake_hub, file_name, files_in
from tiers import more

NAME = "org/tiny"
SMALL = {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"}
SMALL |= {"tokenizer_config.json"}
OTHERS = {
    "README.md": b"words",
    "consolidated.safetensors": b"the same again",
    "model.safetensors": b"the same again",
    "modeling_tiny.py": b"raise SystemExit('run')",
    "original/model.safetensors": b"the same again",
    "original/tokenizer.json": b"another",
    "pytorch_model.bin": b"a pickle",
    "vocab.json": b"{}",
}
FIND = """
import sys
import time
from pathlib import Path
from cairn.errors import CairnError
from cairn.models.weights import hub
# between two tries the library waits, up to eight seconds
time.sleep = lambda seconds: None
{before}
find, revision, folder, *names = sys.argv[1:]
for name in names:
    try:
        print(getattr(hub, find)(hub.ModelSource(name, revision or None, Path(folder) if folder else None)))
    except CairnError as error:
        print(f"{{type(error).__name__}}: {{error}}")
"""


class Machine:
    """A user's home with its own cache, and a hub."""

    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.variables |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def run(self, *command, **variables):
        return subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            cwd=self.folder,
            env=self.variables | variables,
        )

    def find(self, *names, revision="", download_dir="", find="find_checkpoint", before="", **variables) -> str:
        """What the process has printed: a folder, or what is wrong, a line for each name. The hub has forgotten what it
        was asked before."""
        self.hub.asked.clear()
        names = names or (NAME,)
        done = self.run("-c", FIND.format(before=before), find, revision, str(download_dir), *names, **variables)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        self.log = done.stderr
        return done.stdout.strip()


@pytest.fixture
def machine(tmp_path):
    with fake_hub() as hub:
        yield Machine(hub, tmp_path)


@pytest.fixture(scope="session")
def tiny_files(tiny_model):
    return files_in(tiny_model)


@pytest.fixture
def tiny(machine, tiny_files):
    machine.hub.repositories[NAME] = Repository({"main": tiny_files | OTHERS})
    return machine.hub.repositories[NAME]


def shards(files) -> set[str]:
    return {name for name in files if name.startswith("model-")}


def test_a_name_is_downloaded_once_and_then_found(machine, tiny, tiny_files):
    folder = Path(machine.find())
    assert len(shards(tiny_files)) > 1
    assert set(machine.hub.fetched) == SMALL | shards(tiny_files) and len(machine.hub.fetched) == len(tiny_files)
    assert folder.name == tiny.commit("main") and folder.is_relative_to(machine.folder / "home" / "hub")
    assert files_in(folder) == tiny_files
    # one question, which commit `main` is: none for files
    assert machine.find() == str(folder)
    assert [one.path for one in machine.hub.asked] == [f"/api/models/{NAME}"]
    assert machine.find(HF_HUB_OFFLINE="1") == str(folder)
    assert machine.hub.asked == [] and machine.log == ""


@pytest.mark.more
def test_a_hub_that_refuses_leaves_what_is_cached(machine, tiny):
    folder = machine.find()
    machine.hub.status = 401
    assert machine.find() == folder and "check the token in HF_TOKEN" in machine.log
    assert "what is cached of it is used" in machine.log


@pytest.mark.parametrize("gone", [False, more(True)])
def test_a_hub_that_is_gone_or_in_trouble_leaves_what_is_cached(machine, tiny, gone):
    folder = machine.find()
    machine.hub.status = 503
    variables = {"HF_ENDPOINT": "http://127.0.0.1:9"} if gone else {}
    assert machine.find(**variables) == folder and "Using cached commit" in machine.log


@pytest.mark.more
def test_a_branch_that_has_moved_is_followed(machine, tiny, tiny_files):
    old = machine.find()
    tiny.revisions["main"] = tiny_files | {"generation_config.json": b'{"eos_token_id": 5}'}
    new = machine.find()
    assert new != old and machine.hub.fetched == ["generation_config.json"]


@pytest.mark.more
def test_a_connection_that_breaks_is_taken_up_where_it_broke(machine, tiny_files):
    part = 10 << 20
    weights = bytes(part) + b"the rest" * 1000
    files = {name: content for name, content in tiny_files.items() if "safetensors" not in name}
    machine.hub.repositories[NAME] = Repository({"main": files | {"model.safetensors": weights}})
    machine.hub.cut["model.safetensors"] = part + 10
    folder = Path(machine.find())
    assert (folder / "model.safetensors").read_bytes() == weights
    # what has come is written in parts of this size
    ranges = [one.range for one in machine.hub.sent if file_name(one) == "model.safetensors"]
    assert ranges == [None, f"bytes={part}-"]


@pytest.mark.more
def test_a_start_that_failed_leaves_what_it_has_fetched(machine, tiny, tiny_files):
    file = max(shards(tiny_files))
    machine.hub.cut[file], machine.hub.cut_always = 0, True
    assert machine.find().startswith("DownloadError: MODEL org/tiny: there is no such folder, and it could not be")
    # once, and five times more
    assert machine.hub.fetched.count(file) == 6
    assert machine.find(HF_HUB_OFFLINE="1").startswith("ConfigError: MODEL org/tiny: there is no such folder, no compl")
    machine.hub.cut_always = False
    machine.hub.cut.clear()
    folder = Path(machine.find())
    assert machine.hub.fetched == [file] and files_in(folder) == tiny_files


@pytest.mark.parametrize("number", [signal.SIGINT, more(signal.SIGTERM)])
def test_a_signal_ends_a_download_at_once(machine, tiny, tiny_files, number):
    file = max(shards(tiny_files))
    machine.hub.slow.add(file)
    command = [sys.executable, "-c", FIND.format(before=""), "find_checkpoint", "", "", NAME]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=machine.variables)
    try:
        deadline = time.monotonic() + 60
        # all others are there: one that is being moved to its place is no open file
        while file not in machine.hub.fetched or len(list(machine.folder.rglob("snapshots/*/*"))) < len(tiny_files) - 1:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    finally:
        process.kill()
        process.wait()
    assert list(machine.folder.rglob("*.incomplete")) == []
    machine.hub.slow.clear()
    assert files_in(Path(machine.find())) == tiny_files and file in machine.hub.fetched


@pytest.mark.more
def test_a_revision(machine, tiny, tiny_files):
    other = tiny_files | {"generation_config.json": b'{"eos_token_id": 7}'}
    tiny.revisions["v2"] = other
    for revision in ("v2", tiny.commit("v2")):
        assert files_in(Path(machine.find(revision=revision))) == other
    assert machine.hub.asked == []  # a commit that is cached needs no question
    assert files_in(Path(machine.find())) == tiny_files


@pytest.mark.parametrize("unknown", ["v3", more("0" * 40)])
def test_a_revision_that_there_is_none_of(machine, tiny, unknown):
    said = f"ConfigError: --revision {unknown}: org/tiny has no such branch, tag or commit"
    assert machine.find(revision=unknown) == said


def test_a_revision_that_cannot_be_one(machine, tiny):
    assert machine.find(revision="../../x").startswith("ConfigError: --revision '../../x': must be a branch")
    assert machine.hub.asked == []


@pytest.mark.more
def test_a_download_dir(machine, tiny, tiny_files):
    folder = Path(machine.find(download_dir=machine.folder / "disk"))
    assert folder.is_relative_to(machine.folder / "disk") and files_in(folder) == tiny_files
    said = machine.find(download_dir=machine.folder / "other", HF_HUB_OFFLINE="1")
    assert said.startswith("ConfigError: MODEL org/tiny") and f"no complete copy in {machine.folder}/other" in said
    assert "HF_HUB_OFFLINE" in said and "--download-dir" in said
    (machine.folder / "file").touch()
    assert "name another --download-dir" in machine.find(download_dir=machine.folder / "file")


@pytest.mark.more
def test_a_token_goes_to_the_hub_and_nowhere_else(machine, tiny):
    tiny.token = "hf_secret"
    said = machine.find()
    assert said.startswith(
        "ConfigError: MODEL org/tiny: there is no such folder, and no such repository at http://127."
    )
    assert said.endswith("needs a token in HF_TOKEN (there is none)")
    assert machine.find(HF_TOKEN="hf_wrong").endswith("needs a token in HF_TOKEN (there is one)")
    assert Path(machine.find(HF_TOKEN="hf_secret")).is_dir()
    by_host = {(one.host.partition(":")[0], one.token) for one in machine.hub.asked}
    assert by_host == {("127.0.0.1", "Bearer hf_secret"), ("localhost", None)}


@pytest.mark.more
@pytest.mark.parametrize("variables", [{"HF_TOKEN": "hf_mine"}, {}])
def test_a_gated_repository(machine, tiny, variables):
    tiny.gated = True
    said = machine.find(**variables)
    assert said.startswith(
        f"ConfigError: MODEL org/tiny: access is restricted: ask for it at {machine.hub.url}/org/tiny"
    )
    assert said.endswith("HF_TOKEN (there is one)" if variables else "HF_TOKEN (there is none)")


@pytest.mark.parametrize(
    ("without", "added", "said"),
    [
        more(r"config\.json", {}, "the repository has no config.json"),
        more(r"tokenizer\.json", {}, "the repository has no tokenizer.json"),
        more(
            r"config\.json", {"config.json": b'{"model_type": "gpt2"}'}, "config.json: model_type 'gpt2' is not served"
        ),
        more(r"config\.json", {"config.json": b"{"}, "config.json: not valid JSON"),
        (
            r".*safetensors.*",
            {"pytorch_model.bin": b"a pickle"},
            "the repository has neither model.safetensors nor model.safetensors.index.json: choose one with "
            "safetensors; pytorch_model.bin is a pickle",
        ),
        more(r"model-00002.*", {}, "names model-00002-of-00006.safetensors, which the repository has not"),
        more(
            r"model.*index\.json",
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../b.safetensors"}}'},
            "must be",
        ),
    ],
)
def test_what_cannot_be_served_costs_no_weights(machine, tiny_files, without, added, said):
    files = {name: content for name, content in tiny_files.items() if not re.fullmatch(without, name)} | added
    machine.hub.repositories[NAME] = Repository({"main": files})
    found = machine.find()
    assert found.startswith("ModelError: ") and said in found and "\n" not in found
    assert not any(name.endswith((".safetensors", ".bin")) for name in machine.hub.fetched)


@pytest.mark.more
def test_a_single_file_needs_no_index(machine, tiny_files):
    files = {name: content for name, content in tiny_files.items() if "safetensors" not in name}
    machine.hub.repositories[NAME] = Repository({"main": files | {"model.safetensors": b"weights", "x.bin": b"x"}})
    folder = Path(machine.find())
    assert files_in(folder) == files | {"model.safetensors": b"weights"}


@pytest.mark.more
def test_a_folder_of_the_same_name_wins(machine, tiny):
    (machine.folder / NAME).mkdir(parents=True)
    assert machine.find() == NAME
    assert machine.find(revision="v2") == NAME and "--revision has no effect" in machine.log
    assert machine.hub.asked == []


def test_no_network(machine):
    said = machine.find(HF_ENDPOINT="http://name:password@127.0.0.1:9")
    assert said.startswith("DownloadError: MODEL org/tiny: there is no such folder, and it could not be fetched from ")
    assert "check the network, HTTPS_PROXY and HF_ENDPOINT" in said and "password" not in said


@pytest.mark.more
def test_a_hub_that_does_not_answer(machine):
    machine.hub.silent = True
    said = machine.find(HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert said.startswith("DownloadError: MODEL org/tiny") and "timed out" in said


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, "ConfigError: MODEL org/tiny: {} answers 403: check the token in HF_TOKEN (there is none)"),
        more(429, "DownloadError: MODEL org/tiny: {} answers 429, too many requests: try later, or with HF_TOKEN set"),
        more(500, "DownloadError: MODEL org/tiny: {} answers 500: try later, or check HF_ENDPOINT"),
    ],
)
def test_a_hub_in_trouble(machine, status, said):
    machine.hub.status = status
    assert machine.find() == said.format(machine.hub.url)


@pytest.mark.more
def test_a_commit_that_is_none_names_no_folder(machine, tiny):
    machine.hub.commit = "../../../../other"
    assert machine.find() == f"DownloadError: MODEL org/tiny: {machine.hub.url} gave no commit: check HF_ENDPOINT"
    assert machine.hub.fetched == [] and not (machine.folder / "other").exists()


@pytest.mark.more
def test_a_disk_without_room(machine, tiny, tiny_files):
    small = "hub.shutil.disk_usage = lambda path: type('Usage', (), {'free': 1000})"
    said = machine.find(before=small)
    assert said.startswith("DownloadError: MODEL org/tiny: 0.0 GiB are to be fetched into ")
    assert said.endswith("make room, or name another place with --download-dir or HF_HUB_CACHE")
    assert not shards(machine.hub.fetched)
    full = "import errno\ndef fetch(*a, **k): raise OSError(errno.ENOSPC, 'No space')\nhub.snapshot_download = fetch"
    said = machine.find(before=full)
    assert said.startswith("DownloadError: MODEL org/tiny: the disk is full: make room") and "--download-dir" in said


@pytest.mark.more
def test_check_reads_headers_only(machine, tiny, tiny_files, tiny_model, capsys):
    shown = machine.run("-m", "cairn", "check", NAME)
    assert shown.returncode == 0, shown.stderr
    assert set(machine.hub.fetched) == SMALL | shards(tiny_files)
    ranges = [one.range for one in machine.hub.sent if file_name(one) in shards(tiny_files)]
    assert ranges == ["bytes=0-100000"] * len(shards(tiny_files))
    assert main(["check", str(tiny_model)]) == 0
    # what is available changes from one moment to the next
    table, again = (
        [line for line in text.splitlines() if "│" in line and "this machine" not in line]
        for text in (shown.stdout, capsys.readouterr().out)
    )
    assert table == again and len(table) > 8


@pytest.mark.more
def test_check_of_what_is_no_safetensors_file(machine, tiny_files):
    files = {name: content for name, content in tiny_files.items() if "safetensors" not in name}
    header = b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'
    for weights, said in (
        (b"no", "model.safetensors is no safetensors file"),
        (b"\x02" + bytes(7) + b"[]", "model.safetensors is no safetensors file"),
        (len(header).to_bytes(8, "little") + header, "model.safetensors has a shape of a that is none"),
    ):
        machine.hub.repositories[NAME] = Repository({"main": files | {"model.safetensors": weights}})
        assert said in machine.find(find="find_headers")


@pytest.mark.more
def test_bench_fetches_a_tokenizer_alone(machine, tiny):
    command = ["-m", "cairn", "bench", "serve", "--model", "m", "--base-url", "http://127.0.0.1:9"]
    done = machine.run(*command, "--num-prompts", "1", "--tokenizer", NAME)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert set(machine.hub.fetched) == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.more
def test_bench_says_which_tokenizer_there_is_none_of(machine, tiny):
    command = ["-m", "cairn", "bench", "serve", "--model", "m", "--base-url", "http://127.0.0.1:9"]
    done = machine.run(*command, "--tokenizer", "org/none")
    assert done.returncode == 2 and done.stderr.startswith("cairn: --tokenizer org/none: there is no such folder")


@pytest.mark.parametrize(
    "name", ["./tiny", "/no/such/folder", "a/b/c", "org/na--me", "org/x.git", "two words", "x" * 300]
)
def test_what_is_neither_a_folder_nor_a_name(name, capsys):
    for command in (["serve", name, "--port", "0"], ["check", name]):
        assert main(command) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(
            f"cairn: MODEL {name[:256]}: there is no such folder, and names on the Hugging Face Hub look"
        )


def test_a_file_is_no_model(tmp_path, capsys):
    (tmp_path / "model.safetensors").touch()
    assert main(["check", str(tmp_path / "model.safetensors")]) == 2
    assert "is a file: name the folder that it is in" in capsys.readouterr().err


def test_what_can_be_known_of_a_model_is_known_without_the_hub(machine, tiny_model, tmp_path):
    names = "org/none", str(tiny_model), str(tmp_path), f"{tmp_path}/none"
    unknown, folder, empty, missing = machine.find(*names, find="check_source").splitlines()
    assert unknown == folder == "None"
    assert f"{tmp_path}: config.json is missing" in empty
    assert f"MODEL {tmp_path}/none: there is no such folder" in missing
    assert machine.hub.asked == []


def test_wrong_settings_are_said_before_anything_is_fetched(machine, tiny):
    done = machine.run("-m", "cairn", "serve", NAME, "--limit-mm-per-prompt", "{")
    assert done.returncode == 2 and machine.hub.asked == []


@pytest.mark.more
def test_a_model_that_the_hub_has_not_ends_the_start(machine, tiny):
    done = machine.run("-m", "cairn", "serve", "org/none", "--port", "0")
    assert done.returncode == 2 and "cairn: MODEL org/none: there is no such folder" in done.stderr


@pytest.mark.more
def test_progress_is_shown_on_a_terminal_alone(machine, tiny):
    machine.find(download_dir=machine.folder / "first")
    assert machine.log == ""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    command = [sys.executable, "-c", FIND.format(before=""), "find_checkpoint", "", "", NAME]
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, env=machine.variables)
        os.close(theirs)
        shown = b""
        try:
            while part := screen.read(4096):
                shown += part
        except OSError:  # how a terminal ends whose other side is closed
            pass
        assert process.wait(60) == 0
    assert b"Fetching" in shown and b"100%" in shown


@pytest.mark.more
def test_a_model_is_served_by_its_name(machine, tiny):
    command = [sys.executable, "-m", "cairn", "serve", NAME, "--port", "0", "--kv-cache-memory-bytes", "64MiB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=machine.variables, cwd=machine.folder)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving org/tiny on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            pytest.fail("".join(lines))
        with httpx.Client(base_url=found.group(1), timeout=60) as http:
            assert [one["id"] for one in http.get("/v1/models").json()["data"]] == [NAME]
            body = {"model": NAME, "prompt": "def main(arguments):", "max_tokens": 4, "temperature": 0}
            answers = [http.post("/v1/completions", json=body).json() for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"] and answers[0]["usage"]["completion_tokens"] == 4
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
