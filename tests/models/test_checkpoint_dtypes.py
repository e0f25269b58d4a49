"""What --checkpoint-dtype comes to."""

import pytest

from cairn.errors import ConfigError
from cairn.models.checkpoint_dtypes import FLOAT16_ERRORS, MOST_ERROR, choose_encoding
from cairn.models.families import FAMILIES
from cairn.models.registry import open_model


def test_auto_goes_by_what_was_measured():
    assert FLOAT16_ERRORS.keys() <= FAMILIES.keys()
    for model_type in FAMILIES:
        small = model_type in FLOAT16_ERRORS and FLOAT16_ERRORS[model_type] < MOST_ERROR
        assert choose_encoding("auto", model_type, "bfloat16").name == ("float16" if small else "float32")
        assert choose_encoding("auto", model_type, "float32").name == "float32"
        assert choose_encoding("auto", model_type, "bfloat16", exact=True).name == "float32"
        for asked in ("float32", "float16", "int8"):
            assert choose_encoding(asked, model_type, "float32").name == asked
    assert any(choose_encoding("auto", each, "bfloat16").name == "float16" for each in FAMILIES)


def test_what_is_none_is_refused():
    with pytest.raises(ConfigError, match="--checkpoint-dtype must be one of auto, float32, float16, int8, not 'fp8'"):
        choose_encoding("fp8", "nemotron_h", "bfloat16")
    with pytest.raises(ConfigError, match="--checkpoint-dtype int8: not with --exact"):
        choose_encoding("int8", "nemotron_h", "float32", exact=True)


def test_a_checkpoint_folder_comes_to_a_layout(made_model):
    opened = open_model(made_model("nemotron_h"), "bfloat16")
    found = {name: opened.layout(16, checkpoint_dtype=name) for name in ("auto", "float32", "float16", "int8")}
    assert found["auto"] == found["float16"] and found["float16"].checkpoint_dtype == "float16"
    assert opened.layout(16) == found["float32"]
    state = found["float32"].state_bytes
    assert state / 2 < found["float16"].state_bytes < 0.62 * state
    assert state / 4 < found["int8"].state_bytes < 0.45 * state
    assert len({layout.page_bytes for layout in found.values()}) == 1
