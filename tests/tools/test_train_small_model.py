"""The script that trains demo/model."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers.models.qwen3_5 import modeling_qwen3_5

from cairn.cli import main as cairn

SOURCE = Path(__file__).parents[2] / "tools" / "train_small_model.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("train_small_model", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chunked_delta_rule_is_that_of_transformers(tool):
    torch.manual_seed(0)
    query, key = (torch.randn(2, 192, 3, 16) for _ in range(2))
    value, gate, rate = torch.randn(2, 192, 3, 8), -torch.rand(2, 192, 3), torch.rand(2, 192, 3)
    ours, _ = tool.chunked_delta_rule(query, key, value, gate, rate)
    theirs, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        query, key, value, g=gate, beta=rate, use_qk_l2norm_in_kernel=True
    )
    assert (ours - theirs).abs().max() < 1e-5


def test_a_function_with_a_docstring_becomes_a_chat(tool):
    source = 'class A:\n    def size(self):\n        """Return the size.\n\n        More."""\n        return 1\n'
    (chat,) = tool.chats_about(source + "\ndef without_docstring():\n    pass\n")
    assert chat == (
        "<|im_start|>user\nWrite a Python function named size: Return the size.<|im_end|>\n<|im_start|>assistant\n"
        'def size(self):\n    """Return the size.\n\n    More."""\n    return 1\n<|im_end|>\n'
    )
    assert list(tool.chats_about("def broken(:")) == []


def test_batches_go_through_every_document_once_an_epoch(tool, monkeypatch):
    monkeypatch.setattr(tool, "LENGTH", 8)
    monkeypatch.setattr(tool, "BATCH", 2)
    documents = [tool.Document(str(n), torch.arange(n * 10, n * 10 + 10).numpy(), 10) for n in range(8)]
    batches = tool.Batches(documents, seed=3)
    seen = [batches.batch(step)[:, :8].flatten() for step in range(5)]
    assert torch.cat(seen).sort().values.tolist() == list(range(80))
    first, second = batches.batch(0)[:, :8].flatten(), batches.batch(5)[:, :8].flatten()
    assert first.tolist() != second.tolist(), "the second epoch has another order"
    assert torch.equal(tool.Batches(documents, seed=3).batch(5), batches.batch(5))


class StopAt:
    def __init__(self, batches, step):
        self.batches, self.step = batches, step

    def batch(self, step):
        if step == self.step:
            raise KeyboardInterrupt
        return self.batches.batch(step)


@pytest.mark.more
def test_a_run_that_was_stopped_ends_with_the_same_weights_and_they_are_a_checkpoint(
    tool, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tool, "LENGTH", 64)
    monkeypatch.setattr(tool, "BATCH", 1)
    monkeypatch.setattr(tool, "SAVE_EVERY", 2)
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    (tmp_path / "whole").mkdir()
    tool.make_tokenizer(tmp_path / "whole", tool.VOCAB_SIZE, tool.MAX_POSITIONS)
    tokens = torch.randint(8, tool.VOCAB_SIZE, (700,), generator=torch.Generator().manual_seed(1)).numpy()
    batches = tool.Batches([tool.Document("a", tokens, 700)], seed=0)
    config = tool.model_config(2, 0)

    def run(name, source):
        torch.manual_seed(0)
        model = tool.SmallModel(config)
        work = tmp_path / f"{name}-work"
        work.mkdir(exist_ok=True)
        curve = tool.train(model, source, work, 3, 1e-3, Console(quiet=True))
        return model, curve

    model, curve = run("whole", batches)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", StopAt(batches, 2))
    again, _ = run("stopped", batches)
    for name, weight in model.stored().items():
        assert torch.equal(weight, again.stored()[name]), name
    assert len(curve.steps) == 1 and curve.next_token[0] > 7

    num_bytes = tool.export(model, config, tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert num_bytes < 12_000_000 and any(name.startswith("mtp.") for name in stored)
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    assert cairn(["check", str(tmp_path / "whole")]) == 0, capsys.readouterr().err
