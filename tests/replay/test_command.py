"""`cairn replay` from its flags to its files."""

import argparse
import io
import json
import random
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from cairn.cli import main
from cairn.errors import ConfigError
from cairn.replay.command import POLICIES, add_replay_flags, run_replay
from cairn.replay.layouts import sizes_for
from models.published import NANO
from tiers import more


@pytest.fixture
def trace(tmp_path):
    """Chats of a few turns over two system prompts."""
    draw, lines, number = random.Random(3), [{"name": "chats", "unit": 16}], 10**6
    for session in range(30):
        runs = [[1000 * draw.randint(0, 1), 40]]
        for _ in range(draw.randint(1, 5)):
            runs = [*runs, [number, 20]]
            units = sum(count for _, count in runs)
            line = {"t": len(lines), "s": session, "in": 16 * units + 5, "out": 160, "v": 1, "h": runs}
            lines.append(line)
            number += 20
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_replay_flags(parser)
    return run_replay(parser.parse_args([str(word) for word in words]))


def test_table_and_json(trace, tmp_path, capsys):
    file = tmp_path / "out.json"
    assert run(trace, "--policy", ",".join(POLICIES), "--sweep", "5%,0.2", "--json", file) == 0
    results = json.loads(file.read_text())
    assert [result["policy"] for result in results] == [*POLICIES, "unlimited"] * 2
    assert [round(result["budget_fraction"], 3) for result in results] == [0.05] * 6 + [0.2] * 6
    shown = capsys.readouterr().out
    for result in results:
        assert result["policy"] in shown and f"{result['token_hit_rate']:.4f}" in shown
        assert result["token_hit_rate"] == result["hit_tokens"] / result["prompt_tokens"]
        assert result["prefill_tokens"] == result["prompt_tokens"] - result["hit_tokens"]
        if result["policy"] in POLICIES:
            assert sum(result["lost_tokens"].values()) == result["prefill_tokens"]
            assert result["forward_passes"] >= result["requests"] > 0
            assert 0 < result["peak_bytes"] <= result["budget_bytes"] and result["microseconds_per_request"] > 0
            assert sum(result["checkpoints_taken"].values()) >= sum(result["checkpoints_evicted"].values())
    by_name = {result["policy"]: result["token_hit_rate"] for result in results[6:]}
    assert 0 < by_name["auto"] <= by_name["unlimited"]
    assert by_name["align"] < by_name["auto"]


def test_a_budget_in_bytes_and_no_reference_lines(trace, tmp_path):
    file = tmp_path / "out.json"
    run(trace, "--budget", "2.5GiB", "--no-bounds", "--json", file, "--layout", "qwen3.5-35b-a3b")
    (result,) = json.loads(file.read_text())
    assert result["policy"] == "auto" and result["budget_bytes"] == 5 << 29
    assert result["layout"] == "qwen3.5-35b-a3b"


def test_a_tenth_of_the_footprint_is_the_default(trace, tmp_path):
    file = tmp_path / "out.json"
    run(trace, "--no-bounds", "--json", file)
    (result,) = json.loads(file.read_text())
    assert result["budget_bytes"] == int(result["footprint_bytes"] * 0.1)


def test_flops_are_those_of_the_hits(trace, tmp_path):
    file, sizes = tmp_path / "out.json", sizes_for("qwen3-next-80b-a3b")
    run(trace, "--layout", "qwen3-next-80b-a3b", "--per-request", "--json", file, "--policy", "auto,align")
    results = json.loads(file.read_text())
    assert [result["policy"] for result in results] == ["auto", "align", "unlimited"]
    for result in results:
        rows = result["per_request"]
        assert [row["request"] for row in rows] == list(range(result["requests"]))
        assert sum(row["prompt_tokens"] for row in rows) == result["prompt_tokens"]
        assert sum(row["cached_tokens"] for row in rows) == result["hit_tokens"] > 0
        assert result["flops_saved"] == sum(sizes.forward_flops(0, row["cached_tokens"]) for row in rows)
        whole = sum(sizes.forward_flops(0, row["prompt_tokens"]) for row in rows)
        assert result["flops_saved"] + result["prefill_flops"] == whole
        assert result["active_weights"] == sizes.active_weights
    auto = results[0]
    assert auto["tree_bytes"] > 0 and 0 < auto["tree_nodes"] <= auto["tree_page_runs"]
    assert auto["tree_ghosts"] <= auto["tree_nodes"]


def test_requests_are_told_apart_only_when_asked_for(trace, tmp_path):
    file = tmp_path / "out.json"
    run(trace, "--no-bounds", "--json", file)
    assert "per_request" not in json.loads(file.read_text())[0]


@pytest.mark.parametrize("suffix", ["svg", more("png")])
def test_a_plot(trace, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"out.{suffix}"
    run(trace, "--policy", "auto,lru", "--sweep", "2%,10%", "--plot", file)
    if suffix == "png":
        assert file.read_bytes().startswith(b"\x89PNG\r\n")
        return
    lines = [each for each in ElementTree.parse(file).iter() if each.get("id", "").startswith("line2d")]
    alone = tmp_path / "alone.svg"
    run(trace, "--policy", "auto", "--no-bounds", "--sweep", "2%,10%", "--plot", alone)
    fewer = [each for each in ElementTree.parse(alone).iter() if each.get("id", "").startswith("line2d")]
    # lru and unlimited have a line and a sign in the legend each
    assert len(lines) >= len(fewer) + 4


def test_a_plot_without_matplotlib_names_the_fix(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--plot: plots need matplotlib: pip install 'cairn-serve\[bench\]'"):
        run(trace, "--plot", tmp_path / "out.svg")
    assert not (tmp_path / "out.svg").exists()


def test_a_plot_that_cannot_be_written_is_said(trace):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"--plot /nowhere/at/all\.svg cannot be written"):
        run(trace, "--no-bounds", "--plot", "/nowhere/at/all.svg")


@pytest.mark.parametrize(
    "words",
    [
        ("--policy", "best"),
        ("--policy", ""),
        ("--budget", "much"),
        ("--budget", "0"),
        ("--budget", "1e30"),
        ("--budget", "inf"),
        ("--budget", "5XB"),
        ("--budget-fraction", "0"),
        ("--budget-fraction", "nan"),
        ("--sweep", "5%,,10%"),
        ("--plot", "out.pdf"),
        ("--sweep", ",".join(["1%"] * 65)),
    ],
)
def test_flags_are_checked(trace, words):
    with pytest.raises(argparse.ArgumentError, match=words[0]):
        run(trace, *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--budget", "100"), "--budget"),
        (("--max-num-batched-tokens", "63"), "--max-num-batched-tokens"),
        (("--block-size", "0"), "--block-size"),
        (("--state-dtype", "int8"), "--state-dtype"),
        (("--checkpoint-dtype", "bfloat16"), "--checkpoint-dtype"),
        (("--layout", "gpt"), "--layout"),
        (("--per-request",), "--json FILE"),
        (("--no-bounds", "--json", "/nowhere/at/all.json"), "--json"),
    ],
)
def test_what_cannot_be_is_refused(trace, words, says):
    with pytest.raises(ConfigError, match=says):
        run(trace, *words)


@pytest.mark.parametrize("name", ["[/red]", "m[x]y", "a \\ud800 b"])
def test_a_name_is_no_markup(name, tmp_path, capsys):
    """Neither is one with what no terminal can show the end of the replay."""
    path = tmp_path / "chats.jsonl"
    header = f'"unit": 16, "name": "{name}"'
    path.write_text(f'{{{header}}}\n{{"t": 0, "s": 0, "in": 64, "out": 16, "v": 1, "h": [[0, 4]]}}\n')
    assert main(["replay", str(path), "--no-bounds"]) == 0
    assert name.split("\\")[0] in capsys.readouterr().out


def test_no_figure_is_cut_in_a_narrow_terminal(trace, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", "40")
    run(trace, "--sweep", "0.5%,2.5%,10%", "--no-bounds", "--json", tmp_path / "out.json")
    for result in json.loads((tmp_path / "out.json").read_text()):
        assert (
            f"{result['token_hit_rate']:.4f}" in shown.getvalue()
            and f"{result['prefill_tokens']:,}" in shown.getvalue()
        )
    assert "(0.5%)" in shown.getvalue() and "(2.5%)" in shown.getvalue() and "\u2026" not in shown.getvalue()


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_folder_that_is_not_there_is_told_before_the_replay(flag, tmp_path):
    """No trace is there either, and it would have been read first."""
    with pytest.raises(ConfigError, match=f"{flag} .*out.svg cannot be written: there is no folder"):
        run(tmp_path / "no trace", flag, tmp_path / "none" / "out.svg")


def test_a_file_that_cannot_be_written_is_told_before_the_replay(tmp_path):
    folder = tmp_path / "out.svg"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"--json .*out\.svg cannot be written: Is a directory"):
        run(tmp_path / "no trace", "--json", folder)


@pytest.mark.parametrize("layout", ["", "/dev/zero"])
def test_layouts_that_are_none(layout, trace):
    with pytest.raises(ConfigError, match=f"--layout {layout}"):
        run(trace, "--layout", layout)


def test_no_torch_is_loaded_on_the_way(trace, tmp_path):
    """Not for the sake of a config.json either."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(NANO))
    calls = [["replay", str(trace), "--layout", name] for name in ("nemotron-3-nano", str(config))]
    script = (
        f"import sys; from cairn.cli import main; assert [main(call) for call in {calls!r}] == [0, 0]; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
