"""Commands as users of vLLM write them: what is true here is taken, what is not is refused with the reason."""

import argparse
import shlex

import pytest

from cairn.cli import engine_config, main
from cairn.cli.run import read_chat_template, warn
from cairn.cli.words import rewrite_words
from cairn.errors import ConfigError
from cairn.settings.serve import add_flags, load_settings
from cairn.settings.vllm_flags import VLLM_FLAGS, check_vllm_line


def load(line):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    source = add_flags(parser)
    return load_settings(parser.parse_args(rewrite_words(shlex.split(line))), source)


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("serve my_model --max_model_len 8k", "serve my_model --max-model-len 8k"),
        ("proxy --max_hints=1_0 --log_level x_y", "proxy --max-hints=1_0 --log-level x_y"),
        ("m -tp 2 --seed -1 -1.5 -0.5x", "m -tp 2 --seed -1 -1.5 -0.5x"),
        ("m --api_key a_b -- --not_a.flag", "m --api-key a_b -- --not_a.flag"),
        ("--limit_mm.image 2 m", """m '--limit-mm={"image": 2}'"""),
        (
            "--x.a_b.c=x.y --x.d 8K --x.e 1.5K --x.f true",
            """'--x={"a_b": {"c": "x.y"}, "d": 8192, "e": "1.5K", "f": true}'""",
        ),
        ("-O.mode 3 --y.a 1 -O.level=25.6k", """'-O={"mode": 3, "level": 25600}' '--y={"a": 1}'"""),
    ],
)
def test_words(line, plain):
    assert rewrite_words(shlex.split(line)) == shlex.split(plain)


@pytest.mark.parametrize(
    ("line", "said"), [("m --x.a", "--x.a: expected one"), ("--x.a 1 --x.a.b 2", "--x.a.b: a has")]
)
def test_words_that_make_no_object(line, said):
    with pytest.raises(ConfigError, match=said):
        rewrite_words(shlex.split(line))


def test_a_command_line_of_vllms():
    settings = load(
        "m --served_model_name a,b c --max_model_len 8k --max-num-batched-tokens 4K -tp 1 --dtype half "
        "--limit-mm-per-prompt.image 2 --kv-cache-memory-bytes 2G --enable-chunked-prefill --kv_cache_dtype auto "
        "--mamba-ssm-cache-dtype float16 -pp 1 --data-parallel-size=1 -O3 --no-enable-log-requests "
        "--disable-log-requests --async-scheduling --trust-remote-code --gpu-memory-utilization .9 "
        """--structured-outputs-config.backend guidance --cudagraph-capture-sizes 1 2 4 -cc '{"mode": 3}' """
        "--log-level INFO"
    )
    config = engine_config(settings)
    assert (settings.model, settings.model_names, settings.model_name) == ("m", ("a,b", "c"), "a,b")
    assert (config.max_model_len, config.max_num_batched_tokens, config.dtype) == (8000, 4096, "bfloat16")
    assert (config.kv_cache_memory_bytes, config.tensor_parallel_size, settings.log_level) == (2 << 30, 1, "info")
    assert config.mamba_ssm_cache_dtype == "float16"
    assert settings.limit_mm_per_prompt == '{"image": 2}' and config.cudagraph_capture_sizes == [1, 2, 4]
    assert " ".join(settings.without_effect) == (
        "--enable-chunked-prefill --kv-cache-dtype -pp --data-parallel-size -O "
        "--no-enable-log-requests --disable-log-requests --async-scheduling --trust-remote-code "
        "-cc --structured-outputs-config"
    )


@pytest.mark.parametrize(
    "line",
    [
        "--served-model-name model --max-num-seqs 8 --tensor-parallel-size 1 --max-model-len 262144 --port 8000 "
        "--trust-remote-code --enable-auto-tool-choice --tool-call-parser qwen3_coder "
        "--reasoning-parser-plugin nano_v3_reasoning_parser.py --reasoning-parser nano_v3",
        "--port 8000 --tensor-parallel-size 8 --max-model-len 262144 --reasoning-parser qwen3 "
        "--enable-auto-tool-choice --tool-call-parser qwen3_coder --language-model-only",
        "-tp 8 --mm-encoder-tp-mode data --mm-processor-cache-type shm --enable-expert-parallel "
        "--reasoning-parser qwen3 --enable-prefix-caching --kv_cache_dtype auto --mamba_ssm_cache_dtype float32 "
        "--async-scheduling --compilation-config.cudagraph_mode FULL_AND_PIECEWISE --mamba-cache-mode align",
    ],
)
def test_commands_as_published_with_models_that_are_served(line):
    assert engine_config(load(f"a/model {line}")).model == "a/model"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("proxy --decode http://a:1 --max_hints x", "--max-hints: should be a valid integer"),
        ("bench serve --num_prompts x", "argument --num-prompts: "),
        ("check m --max_num_seqs 0", "argument --max-num-seqs: must be between"),
        ("replay f --replay_no_such 1", "unrecognized arguments: --replay-no-such"),
    ],
)
def test_underscores_in_every_command(line, said, capsys):
    assert main(shlex.split(line)) == 2
    assert said in capsys.readouterr().err


def test_the_log_says_once_what_has_no_effect(caplog):
    caplog.set_level("INFO")
    warn(load("m --enable-chunked-prefill --trust-remote-code --dtype float16"))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert caplog.messages[0].endswith(": --enable-chunked-prefill, --trust-remote-code")
    assert caplog.messages[1].startswith("--dtype float16 is served as bfloat16")
    caplog.clear()
    warn(load("m --dtype float"))
    assert caplog.records == [] and engine_config(load("m --dtype float")).dtype == "float32"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--kv-cache-dtype fp8", "--kv-cache-dtype: must be auto, not 'fp8': keys and values have"),
        ("--pipeline_parallel_size 2", "--pipeline-parallel-size: must be 1, not '2': one engine"),
        ("-dp=2", "-dp: must be 1, not '2'"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill is not supported: prompts are"),
        ("--enable-lora", "--enable-lora is not supported: there are no LoRA"),
        ("--lora-modules a=b c=d", "--lora-modules is not supported: there are no LoRA"),
        ("--speculative-config.method eagle", "--speculative-config: method: must be auto, mtp, ngram, suffix or none"),
        ("--spec-method ngram", "--spec-method is not supported: `--speculative-config` says it"),
        (
            "--mamba-ssm-cache-dtype fp8",
            "--mamba-ssm-cache-dtype: should be 'auto', 'float32', 'bfloat16'",
        ),
        (
            "--mamba-ssm-cache-dtype float16 --exact",
            "--mamba-ssm-cache-dtype float16: not with --exact, whose states are float32: leave one of them out",
        ),
        ("--load-format dummy", "--load-format: must be auto or safetensors, not 'dummy'"),
        ("--allowed-local-media-path /", "--allowed-local-media-path is not supported: images are never"),
        (
            "--disable-hybrid-kv-cache-manager",
            "--disable-hybrid-kv-cache-manager is not supported: the cache is always",
        ),
    ],
)
def test_what_is_untrue_here_is_exit_code_2_with_the_reason(line, said, capsys):
    assert main(["serve", "m", *shlex.split(line)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cairn: {said}") and error.count("\n") == 1


def test_every_flag_of_the_table_takes_what_it_says_and_nothing_else():
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser)
    for row in VLLM_FLAGS:
        for name in row.names.split():
            if row.form == "switch":
                words = (
                    {"on": [name], "off": [name.replace("--", "--no-")]} if name.startswith("--") else {"on": [name]}
                )
            else:
                words = {value: [f"{name}={value}"] for value in [*(row.values or "").split(), "x-7"]}
            for value, given in words.items():
                if row.values is None or value in row.values.split():
                    assert parser.parse_args(given).flags_without_effect == [given[0].split("=")[0]]
                else:
                    with pytest.raises(ConfigError, match=f"^{given[0].split('=')[0]}"):
                        parser.parse_args(given)


def test_lines_of_a_file(tmp_path):
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: m\nenable-chunked-prefill: true\nno-enable-log-requests: true\nenable_log_outputs: false\n"
        "pipeline-parallel-size: 1\nserved-model-name: [a, b]\nmax-model-len: 8k\ncompilation-config: {mode: 3}\n"
        "structured-outputs-config: {backend: guidance}\ndefault-chat-template-kwargs: {enable_thinking: false}\n"
    )
    settings = load(f"--config {file} --async-scheduling")
    assert (settings.model_names, settings.max_model_len) == (("a", "b"), 8000)
    assert settings.default_chat_template_kwargs == '{"enable_thinking": false}'
    assert " ".join(settings.without_effect) == (
        "--enable-chunked-prefill --no-enable-log-requests --enable-log-outputs --pipeline-parallel-size "
        "--compilation-config --structured-outputs-config --async-scheduling"
    )
    for line in (
        "enable-lora: true",
        "no-enable-chunked-prefill: true",
        "kv-cache-dtype: fp8",
        "nnodes: 2",
        "headless: 1",
    ):
        file.write_text(f"model: m\n{line}\n")
        name = line.partition(":")[0]
        with pytest.raises(ConfigError, match=rf"^--config .*{name.replace('-', '.')}") as caught:
            load(f"--config {file}")
        assert "\n" not in str(caught.value)
    assert check_vllm_line("no_such_flag", True, "") is None


def test_where_model_may_stand(tmp_path, monkeypatch):
    def found(line):
        settings = load(line)
        return settings.model, settings.model_names

    assert found("--model m --port 1") == ("m", ("m",)) == found("m --model m")
    assert found("--served-model-name a m") == ("m", ("a",)) == found("--served-model-name a -- m")
    assert found("m --served-model-name a --served-model-name b") == ("m", ("a", "b"))
    assert found(f"--served-model-name a b --api-key k {tmp_path}") == (str(tmp_path), ("a", "b"))
    monkeypatch.setenv("CAIRN_SERVED_MODEL_NAME", '["x", "y,z"]')
    assert found("m") == ("m", ("x", "y,z"))
    for line, said in (
        ("m --model other", "--model: "),
        ("m --served-model-name a ''", "--served-model-name: must not be empty"),
        ("m --served-model-name " + "a " * 65, "--served-model-name: .* at most 64"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}"):
            load(line)


def test_a_chat_template_is_a_file_or_the_template(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert (
        read_chat_template(str(file)) == "{{ messages }}" == read_chat_template("{{ messages }}")
        and read_chat_template(None) is None
    )
    with pytest.raises(ConfigError, match=r"^--chat-template no/such\.jinja: this file cannot be read"):
        read_chat_template("no/such.jinja")
    with pytest.raises(ConfigError, match=r"^--chat-template: is no Jinja template: "):
        read_chat_template("{% for %}")


def test_check_takes_the_same_words(tiny_model, capsys):
    assert main(["check", str(tiny_model), "--dtype", "half", "--max_model_len", "2K"]) == 0
    assert "bfloat16" in capsys.readouterr().out
