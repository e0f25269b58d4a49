"""Random-weight checkpoints: their form, their reproducibility, and that transformers takes them as they are."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from cairn.check.report import check
from cairn.errors import ConfigError, ModelError
from cairn.models.random_weights import make_model as make_model_module
from cairn.models.random_weights import make_tokenizer
from cairn.models.random_weights.make_model import RECIPES, make_model
from cairn.models.random_weights.recipe import CheckpointOptions
from cairn.models.registry import open_model
from cairn.models.weights.loader import WeightReader
from runner.harness import parse, tensors

TEXT = "def mean(values):\n    return sum(values) / len(values)\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_model("nemotron_h", folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny).eval()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_folder_has_the_published_form(tiny: Path) -> None:
    files = set(contents(tiny))
    shards = {name for name in files if name.startswith("model-")}
    assert len(shards) >= 2
    assert files - shards == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    raw = json.loads((tiny / "config.json").read_text())
    assert raw["architectures"] == ["NemotronHForCausalLM"]
    assert set(raw["hybrid_override_pattern"]) == set("M*-E")
    assert raw["torch_dtype"] == "float32"
    assert raw["max_position_embeddings"] == 32768
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * check(tiny).parameters


def test_tiny_is_tiny_and_its_checkpoints_are_worth_several_pages(tiny: Path) -> None:
    report = check(tiny)
    assert report.ok
    assert 4.5e6 < report.parameters < 5.5e6
    assert 5 <= report.layout.pages_per_checkpoint <= 12
    assert 5 <= open_model(tiny, "bfloat16").layout(16).pages_per_checkpoint <= 12


def test_small_has_about_300_million_parameters() -> None:
    config = parse(RECIPES["nemotron_h"].config("small", CheckpointOptions("float32", 4096, 32768, 2, 0, {})))
    assert 2.8e8 < sum(torch.Size(shape).numel() for shape in tensors(config).values()) < 3.2e8
    assert set(config.layer_counts()) == {"Mamba2", "attention", "MLP", "mixture of experts"}


@pytest.mark.more
def test_same_seed_same_bytes(tiny: Path, tmp_path: Path) -> None:
    """In another process with another hash seed, so that no iteration order is taken from memory addresses."""
    code = (
        "import sys, pathlib; from cairn.models.random_weights.make_model import make_model;"
        "make_model('nemotron_h', pathlib.Path(sys.argv[1]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "again")], check=True, env=environment, timeout=120)
    assert contents(tmp_path / "again") == contents(tiny)


def test_another_seed_changes_the_weights_alone(tiny: Path, tmp_path: Path) -> None:
    make_model("nemotron_h", tmp_path / "other", seed=1)
    first = contents(tiny)
    differing = {name for name, data in contents(tmp_path / "other").items() if first[name] != data}
    assert differing == {name for name in first if name.startswith("model-")}


def test_bfloat16(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_model("nemotron_h", tmp_path, dtype="bfloat16", show=True)
    assert capfd.readouterr() == ("", "")
    report = check(tmp_path)
    assert report.ok
    assert report.dtype == "bfloat16"
    assert report.stored_dtypes == {"BF16": report.num_tensors - 2, "F32": 2}  # the routers' correction biases
    assert report.num_files >= 2


def test_weights_have_the_spread_of_trained_ones(tiny: Path) -> None:
    expected = open_model(tiny).family.tensors(open_model(tiny).config)
    with WeightReader(tiny, torch.float32) as reader:
        found = {name: reader.load(name, shape) for name, shape in expected.items()}
    drawn = {
        part: torch.cat([value for name, value in found.items() if name.endswith(part)])
        for part in ("A_log", "dt_bias", "mixer.D", "conv1d.bias", "e_score_correction_bias", "norm.weight")
    }
    assert 0 < drawn["A_log"].min() < 0.9 < 2.5 < drawn["A_log"].max() < 2.78
    assert -10 <= drawn["dt_bias"].min() < -8 < 0 < drawn["dt_bias"].max() <= 2
    for part, middle in [("mixer.D", 1), ("conv1d.bias", 0), ("e_score_correction_bias", 0), ("norm.weight", 1)]:
        assert abs(drawn[part].mean() - middle) < 0.1
        assert 0.03 < drawn[part].std() < 0.3


def test_transformers_loads_config_and_weights_as_they_are(tiny: Path, reference: Any) -> None:
    config = AutoConfig.from_pretrained(tiny)
    assert type(config).__name__ == "NemotronHConfig"
    assert Counter(config.layers_block_type) == {"linear_attention": 5, "full_attention": 2, "mlp": 1, "moe": 2}
    assert parse(config.to_dict()).pattern == open_model(tiny).config.pattern
    assert reference.dtype == torch.float32
    assert reference.generation_config.eos_token_id == [2, 0]
    _, report = AutoModelForCausalLM.from_pretrained(tiny, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_logits_are_sane_and_answers_vary(tiny: Path, reference: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    answers = []
    for prompt in (TEXT, "import os\n", "class A:\n    pass\n"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = reference(ids).logits[0]
            answer = reference.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
        assert torch.isfinite(logits).all()
        assert 1 < logits.std() < 3
        assert len(set(answer)) >= 8
        answers.append(tuple(answer))
    assert len(set(answers)) == 3


def test_tokenizer_loads_with_transformers(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == 4096
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"):
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "llama"}, "no family 'llama'; known: nemotron_h"),
        ({"size": "huge"}, "no size 'huge'; known: tiny, small"),
        ({"dtype": "float16"}, "no dtype 'float16'; known: float32, bfloat16"),
        ({"seed": -1}, "--seed must be in 0..2^63-1, not -1"),
    ],
)
def test_refused_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_model(**{"family": "nemotron_h", "out": tmp_path / "new", **arguments})
    assert message in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_refused_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"is not empty; choose another folder"):
        make_model("nemotron_h", tmp_path)
    with pytest.raises(ConfigError, match=r"file cannot be made: File exists"):
        make_model("nemotron_h", tmp_path / "file")
    assert contents(tmp_path) == {"file": b"kept"}


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make_model_module, "save_file", fail)
    with pytest.raises(ConfigError, match=r"new cannot be written: .*No space left on device"):
        make_model("nemotron_h", tmp_path / "new")
    assert not (tmp_path / "new" / "config.json").exists()  # nobody takes it for a finished one


def test_too_little_text_for_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(make_tokenizer.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    with pytest.raises(ModelError, match="holds no Python sources"):
        make_model("nemotron_h", tmp_path / "a")
    (tmp_path / "lib" / "few.py").write_text(TEXT)
    with pytest.raises(ModelError, match=r"the standard library's sources give \d+ tokens, not 4096"):
        make_model("nemotron_h", tmp_path / "b")
