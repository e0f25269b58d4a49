"""`cairn check --generate`: the same model is found to be the same, and one that is not is not."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from cairn.check import reference as reference_module
from cairn.check.generation import (
    NUM_PROMPTS,
    AnswerComparison,
    EngineAnswer,
    GenerationReport,
    check_generation,
    gap_of,
    prompts_of,
    render_generation,
)
from cairn.check.reference import TransformersReference, check_packages
from cairn.cli import main
from cairn.engine.contract import TokenLogprobs
from cairn.errors import ConfigError, ModelError
from models.gguf_files import write_gguf
from models.packed_checkpoints import FORMATS, write_packed
from source_scan import ROOT
from tiers import long


@pytest.fixture(scope="module")
def model(made_model):
    return made_model("qwen3_5")


def answer(**changes):
    same = AnswerComparison(
        prompt_tokens=20,
        text="a",
        transformers_text="a",
        first_difference=None,
        gap=0.0,
        cached_tokens=20,
        cached_answer_equal=True,
    )
    return replace(same, **changes)


def report(*answers, dtype="bfloat16", perplexity=10.0):
    return GenerationReport(
        model="m",
        dtype=dtype,
        text_tokens=100,
        perplexity=perplexity,
        transformers_perplexity=10.0,
        answers=answers or (answer(),),
    )


NEAR_TIE = answer(first_difference=3, gap=0.1)
OUTLIER = answer(first_difference=0, gap=2.0)


def test_equal_answers_and_near_ties_are_right():
    found = report(answer(), NEAR_TIE)
    assert (found.problems, found.num_equal, found.num_near_ties, found.outliers) == ([], 1, 1, [])


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (report(perplexity=10.5), "perplexities are 5.00% apart"),
        (report(perplexity=math.nan), "perplexities"),
        (report(OUTLIER, OUTLIER, OUTLIER), "answers 0, 1, 2 part where transformers' token is up to 2.000 nats"),
        (report(NEAR_TIE, dtype="float32"), "answers 0 part"),
        (report(answer(cached_tokens=0)), "found nothing in the cache"),
        (
            report(answer(cached_answer_equal=False, cached_gap=0.2)),
            "when its prompt is cached, from a token on that was 0.2",
        ),
        (report(answer(cached_answer_equal=False, cached_gap=None)), "from a token on that was much less likely"),
    ],
)
def test_what_is_wrong_is_said(found, problem):
    assert problem in " ".join(found.problems)
    assert not found.as_json()["ok"]


def test_a_cached_answer_may_part_where_its_tokens_were_equally_likely():
    """Its states may have been stored in fewer bits."""
    near = answer(cached_answer_equal=False, cached_gap=0.1)
    assert report(near).problems == [] and report(near, dtype="float32").problems


def likely(*rows):
    """Rows of a token and others, best first, each with its log-probability."""
    columns = [np.array([[one[part] for one in row] for row in rows]) for part in range(2)]
    ids, values = columns[0].astype("<i4"), columns[1].astype("<f4")
    ranks = np.ones(len(rows), "<i4")
    return TokenLogprobs(width=ids.shape[1], token_ids=ids.tobytes(), values=values.tobytes(), ranks=ranks.tobytes())


def test_the_gap_is_where_the_two_part():
    told = likely([(7, -0.5), (7, -0.5), (8, -1.0)], [(5, -0.25), (5, -0.25), (6, -0.75)])
    first = EngineAnswer([7, 5], logprobs=told)
    assert gap_of(first, EngineAnswer([7, 5])) == 0.0
    assert gap_of(first, EngineAnswer([7, 6])) == 0.5
    assert gap_of(first, EngineAnswer([8, 6])) == 0.5
    assert gap_of(first, EngineAnswer([7, 9])) is None


def test_two_outliers_are_rounding_in_bfloat16_alone():
    assert report(OUTLIER, OUTLIER).problems == []
    assert report(OUTLIER, OUTLIER, dtype="float32").problems


def test_the_table_shows_both_texts():
    out = StringIO()
    found = report(answer(text="mine", transformers_text="theirs", first_difference=1, gap=9.0))
    Console(file=out, width=150).print(render_generation(found))
    assert "mine" in out.getvalue() and "theirs" in out.getvalue() and "the same model" in out.getvalue()


@pytest.mark.parametrize(("gap", "shown"), [(0.0, "other, gap 0.000"), (0.25, "gap 0.250"), (None, "gap inf")])
def test_the_table_shows_how_far_a_cached_answer_is_apart(gap, shown):
    out = StringIO()
    Console(file=out, width=150).print(render_generation(report(answer(cached_answer_equal=False, cached_gap=gap))))
    assert shown in out.getvalue()


@pytest.mark.parametrize(("num_tokens", "limit"), [(1024, 991), (1024, 64), (40, 30)])
def test_prompts_fit_and_differ_in_length(num_tokens, limit):
    prompts = prompts_of(range(num_tokens), limit)
    assert len(prompts) == NUM_PROMPTS
    assert all(16 <= len(prompt) <= limit for prompt in prompts)
    assert len(prompts[-1]) == min(num_tokens, limit)


@pytest.mark.more
def test_a_made_model_is_the_same_model(model, tmp_path, capsys):
    found = tmp_path / "found.json"
    assert main(["check", "--generate", "--output", str(found), str(model)]) == 0
    assert "the same model" in capsys.readouterr().out
    written = json.loads(found.read_text())
    assert written["ok"] and written["num_equal"] == len(written["answers"]) == NUM_PROMPTS
    assert all(one["cached_tokens"] == one["prompt_tokens"] for one in written["answers"])


@pytest.mark.more
@pytest.mark.parametrize("quantization", [None, long("int8"), "int4"])
def test_the_trained_model_is_the_same_model(capsys, quantization):
    """With states in float16, as it is served."""
    flags = [] if quantization is None else ["-q", quantization]
    assert main(["check", "--generate", *flags, str(ROOT / "demo" / "model")]) == 0
    assert "the same model" in capsys.readouterr().out


@pytest.mark.more
def test_another_model_is_found_out(model, tmp_path, monkeypatch, capsys):
    """transformers is given weights of which one matrix is another."""
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    changed = False
    for path in sorted(other.glob("*.safetensors")):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("layers.2.mlp.down_proj.weight"):
                tensors[name] = tensors[name].flip(0).contiguous()
                changed = True
        save_file(tensors, path, metadata={"format": "pt"})
    assert changed
    started = TransformersReference.__init__
    monkeypatch.setattr(TransformersReference, "__init__", lambda self, folder, dtype: started(self, other, dtype))
    assert main(["check", "--generate", str(model)]) == 1
    assert "not the same model" in capsys.readouterr().out


@pytest.mark.more
def test_a_gguf_file_is_the_same_model(model, tmp_path, capsys):
    """As transformers reads it, with the package of the extra `check`."""
    pytest.importorskip("accelerate")
    file = write_gguf(model, tmp_path / "model.gguf", "Q8_0")
    assert main(["check", "--generate", "--dtype", "float32", str(file)]) == 0
    assert "the same model" in capsys.readouterr().out


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("W4A16", "float32"),
        long("W8A16", "float32"),
        ("W8A8", "float32"),
        long("compressed FP8", "float32"),
        ("compressed NVFP4", "bfloat16"),
        long("compressed MXFP4", "bfloat16"),
    ],
)
def test_a_compressed_checkpoint_is_the_same_model(name, dtype, model, tmp_path, capsys):
    """As transformers reads it, with the packages of the extra `check`; it computes with four bits of floats in
    bfloat16 alone."""
    pytest.importorskip("accelerate")
    pytest.importorskip("compressed_tensors")
    write_packed(model, tmp_path / "codes", tmp_path / "same", FORMATS[name])
    assert main(["check", "--generate", "--dtype", dtype, str(tmp_path / "codes")]) == 0
    assert "the same model" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["W4A16", "W8A8", "compressed FP8"])
def test_the_reference_has_the_numbers_of_a_compressed_checkpoint(name, model, tmp_path):
    """And activations as they are, also those of W8A8."""
    pytest.importorskip("accelerate")
    pytest.importorskip("compressed_tensors")
    write_packed(model, tmp_path / "codes", tmp_path / "same", FORMATS[name])
    codes, same = (TransformersReference(tmp_path / folder, "float32") for folder in ("codes", "same"))
    tokens = list(range(100, 140))
    assert codes.sum_logprobs(tokens) == pytest.approx(same.sum_logprobs(tokens), rel=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("name", ["AWQ", "GPTQ", "GPTQ desc_act"])
def test_the_reference_has_the_numbers_of_four_bits_as_gptqmodel_reads_them(name, model, tmp_path):
    """They are float16 there."""
    pytest.importorskip("gptqmodel")
    write_packed(model, tmp_path / "codes", tmp_path / "same", FORMATS[name])
    codes, same = (TransformersReference(tmp_path / folder, "float32") for folder in ("codes", "same"))
    logprobs = [each.logprobs(range(100, 140), range(200, 220)) for each in (codes, same)]
    assert (logprobs[0] - logprobs[1]).abs().max() < 0.05 < logprobs[1].std() / 10


AWQ, GPTQ, AUTO_ROUND = (dict(FORMATS[name].config) for name in ("AWQ", "GPTQ", "AutoRound"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "fp8"}, r"reads fp8 .* only with accelerate: pip install .*\[check\]"),
        (
            dict(FORMATS["W4A16"].config),
            r"reads compressed-tensors .* only with accelerate and compressed_tensors: pip install .*\[check\]",
        ),
        (AWQ, "reads awq .* only with accelerate and gptqmodel: pip install accelerate gptqmodel"),
        (GPTQ, "reads gptq .* only with optimum and gptqmodel: pip install optimum gptqmodel"),
        (AUTO_ROUND, "reads auto-round .* only with accelerate and auto_round: pip install accelerate auto_round"),
        ({"quant_method": "mxfp4"}, r"reads mxfp4 .* only with accelerate: pip install .*\[check\]"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "does not read modelopt checkpoints"),
        (None, None),
    ],
)
def test_what_transformers_lacks_is_said_before_anything_is_started(config, said, tmp_path, monkeypatch):
    monkeypatch.setattr(reference_module, "find_spec", lambda name: None)
    (tmp_path / "config.json").write_text(json.dumps({} if config is None else {"quantization_config": config}))
    if said is None:
        check_packages(tmp_path)
        return
    with pytest.raises(ConfigError, match=said):
        check_generation(tmp_path, "float32", None, None, Console())


def test_whatever_transformers_raises_is_said_in_one_line(model):
    reference = TransformersReference(model, "float32")
    with pytest.raises(ModelError, match="transformers cannot compute with it: index out of range"):
        reference.sum_logprobs([1 << 20, 1])


def test_what_transformers_lacks_for_a_gguf_file_is_said(model, tmp_path, monkeypatch):
    monkeypatch.setattr(reference_module, "find_spec", lambda name: None)
    place = write_gguf(model, tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(ConfigError, match=r"reads gguf .* only with accelerate: pip install .*\[check\]"):
        check_generation(place, "float32", None, None, Console())


def test_what_transformers_cannot_compute_is_no_traceback(model, monkeypatch):
    """As it cannot with some checkpoints that it has loaded."""
    reference = TransformersReference(model, "float32")
    monkeypatch.setattr(reference._model, "forward", lambda *_, **__: torch.zeros(2, 3) @ torch.zeros(2, 3))
    for compute in (
        lambda: reference.sum_logprobs([1, 2]),
        lambda: reference.logprobs([1], [2]),
        lambda: reference.generate([1, 2], 3),
    ):
        with pytest.raises(ModelError, match="transformers cannot compute with it: mat1 and mat2"):
            compute()


def test_a_checkpoint_that_transformers_cannot_load(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(ModelError, match="transformers cannot load it"):
        TransformersReference(Path(tmp_path), "float32")


def test_the_reference_scores_as_it_generates(model):
    """The log-probabilities of a greedy answer, token by token, are those of the whole text."""
    reference = TransformersReference(model, "float32")
    prompt = list(range(100, 120))
    generated = reference.generate(prompt, 8)
    chosen = sum(row[token].item() for row, token in zip(generated.logprobs, generated.token_ids, strict=True))
    both = reference.sum_logprobs([*prompt, *generated.token_ids]) - reference.sum_logprobs(prompt)
    assert both == pytest.approx(chosen, abs=1e-3)
    assert torch.equal(generated.logprobs.argmax(-1), torch.tensor(generated.token_ids))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--output", "x.json"], "--generate"),
        (["--generate", "--output", "no/such/folder/x.json"], "no folder"),
        (["--generate", "--output", "/"], "--output / cannot be written: Is a directory"),
    ],
)
def test_bad_flags(model, flags, text, capsys):
    assert main(["check", *flags, str(model)]) == 2
    assert text in capsys.readouterr().err
