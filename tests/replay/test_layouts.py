"""Replay's own sums against the models' own layouts, and against the published arithmetic."""

import json

import pytest

from cairn.errors import ConfigError
from cairn.models.registry import family_of
from cairn.replay.layouts import LAYOUT_NAMES, layout_for, remembers
from models.decoder_families import granite
from models.published import NANO
from models.published_qwen3_5 import QWEN35


def assert_same(mine, theirs):
    assert mine.page_bytes == theirs.page_bytes
    assert mine.checkpoint_bytes == theirs.checkpoint_bytes
    assert mine.bytes_per_token == theirs.bytes_per_token
    assert mine.pages_per_checkpoint == theirs.pages_per_checkpoint


def models_layout(raw):
    family = family_of(raw)
    return family.layout(family.parse(raw), 16, 2)


@pytest.mark.parametrize(("name", "raw"), [("nemotron-3-nano", NANO), ("qwen3.5-35b-a3b", QWEN35)])
def test_the_names_are_the_published_models(name, raw):
    assert_same(layout_for(name), models_layout(raw))


def test_configs_give_the_models_own_layout(made_model):
    for family in ("nemotron_h", "qwen3_5", "qwen3_5_moe", "granitemoehybrid"):
        folder = made_model(family)
        raw = json.loads((folder / "config.json").read_text())
        assert_same(layout_for(str(folder)), models_layout(raw))
        assert layout_for(str(folder)) == layout_for(str(folder / "config.json"))
    assert_same(remembers(granite(), "granite").layout(16, 4), models_layout(granite()))


@pytest.mark.parametrize(
    ("name", "dtype", "token_bytes", "tokens"),
    [
        ("nemotron-3-nano", None, 6144, 7989),
        ("nemotron-3-nano", "bfloat16", 6144, 4063),
        ("qwen3.5-35b-a3b", None, 20480, 3144),
        ("qwen3-next-80b-a3b", None, 24576, 3144),
        ("granite-4-h-small", None, 16384, 4719),
        ("granite-4-h-small", "float32", 16384, 9327),
    ],
)
def test_published_sizes(name, dtype, token_bytes, tokens):
    """Bytes of a token, and how many tokens a checkpoint weighs, without the final hidden state."""
    layout = layout_for(name, 16, dtype)
    assert layout.bytes_per_token == token_bytes
    assert round(layout.state_bytes / token_bytes) == tokens
    assert layout_for(name, 32, dtype).page_bytes == 2 * layout.page_bytes


def test_what_is_wrong_is_named(tmp_path):
    def refused(says, **changes):
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**NANO, **changes}))
        with pytest.raises(ConfigError, match=says):
            layout_for(str(config))

    refused("model_type 'gpt'", model_type="gpt")
    refused("conv_kernel must be", conv_kernel=0)
    refused("head_dim must be", head_dim="128")
    refused("hybrid_override_pattern must list", hybrid_override_pattern=None)
    refused("without attention", hybrid_override_pattern="MMM")
    for arguments, says in [
        (("nemotron-4",), LAYOUT_NAMES[0]),
        (("nemotron-3-nano", 0), "--block-size"),
        (("nemotron-3-nano", 16, "int8"), "--state-dtype"),
    ]:
        with pytest.raises(ConfigError, match=says):
            layout_for(*arguments)
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="--layout"):
            layout_for(str(tmp_path))
