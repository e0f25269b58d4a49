"""The flags about images."""

import pytest

from cairn.cli import engine_config, image_options
from cairn.errors import ConfigError
from cairn.settings.images import image_limit, media_domains
from test_settings import load


def test_defaults():
    options, config = image_options(load("m")), engine_config(load("m"))
    assert (options.limit, options.domains, options.max_bytes, options.fetch_seconds) == (16, None, 16 << 20, 5.0)
    assert (config.language_model_only, config.mm_encoder_cache_bytes) == (False, 256 << 20)


def test_every_flag():
    settings = load(
        *("m", "--limit-mm-per-prompt", '{"image": 3}', "--allowed-media-domains", "A.example,b.example"),
        *("--image-fetch-timeout", "2", "--max-image-bytes", "1MiB", "--max-image-pixels", "1000"),
        *("--mm-encoder-cache-bytes", "0"),
    )
    options, config = image_options(settings), engine_config(settings)
    assert (options.limit, options.domains) == (3, ("a.example", "b.example"))
    assert (options.fetch_seconds, options.max_bytes, options.max_pixels) == (2.0, 1 << 20, 1000)
    assert (config.language_model_only, config.mm_encoder_cache_bytes) == (False, 0)


@pytest.mark.parametrize("flags", [["--language-model-only"], ["--limit-mm-per-prompt", '{"image": 0}']])
def test_text_alone(flags):
    settings = load("m", *flags)
    assert image_options(settings).limit == 0 and engine_config(settings).language_model_only


@pytest.mark.parametrize(
    ("text", "limit"), [(None, 16), ('{"image": 7}', 7), ("image=7", 7), ("image=7,video=0", 7), ("{}", 16)]
)
def test_limit(text, limit):
    assert image_limit(text) == limit


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "image", "image=x", "[7]", "{" * 4000, '{"image": -1}', '{"image": "7"}', '{"image": 1e9}'),
        *('{"image": 9999}', '{"video": 1}', '{"images": 1}', '{"image": {"count": 1}}'),
    ],
)
def test_wrong_limits(text):
    with pytest.raises(ConfigError, match="--limit-mm-per-prompt"):
        image_limit(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        (None, None),
        ("[]", ()),
        ("a", ("a",)),
        (" A.b , c. ", ("a.b", "c")),
        ('["a", "b"]', ("a", "b")),
        ("10.0.0.1,2606::1", ("10.0.0.1", "2606::1")),
    ],
)
def test_domains(text, hosts):
    assert media_domains(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "*.example.com", "http://a", "a:80", "a/b", "[1, 2", "[1]", '["a", null]', "a b", '{"a": 1}', '[["a"]]'],
)
def test_wrong_domains(text):
    with pytest.raises(ConfigError, match="--allowed-media-domains"):
        media_domains(text)


def test_files_are_refused():
    with pytest.raises(ConfigError, match="--allowed-local-media-path"):
        load("m", "--allowed-local-media-path", "/")
