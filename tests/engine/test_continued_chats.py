"""A chat whose last message goes on, under templates of published forms; and what single tokens spell."""

from pathlib import Path

import pytest
from chat_templates import TEMPLATES, TOOLS, tokenizer_with
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from cairn.engine.text.tokenizer import ModelTokenizer, TokenSpelling
from cairn.errors import InvalidRequest

USER = {"role": "user", "content": "What is a cairn?"}
BEGUN = {"role": "assistant", "content": "A heap of st"}


@pytest.fixture(scope="module")
def tokenizers(plain_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelTokenizer]:
    folder = tmp_path_factory.mktemp("templates")
    return {"plain": ModelTokenizer(plain_tokenizer)} | {
        name: tokenizer_with(plain_tokenizer, folder / name, template) for name, template in TEMPLATES.items()
    }


@pytest.mark.parametrize("name", ["plain", *TEMPLATES])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_prompt_ends_where_the_last_message_does(tokenizers, name, tools):
    tokenizer = tokenizers[name]
    messages = [{"role": "system", "content": "Be brief."}, USER, BEGUN]
    settings_ = {"tools": tools, "add_generation_prompt": False}
    rendered = tokenizer.render_chat(messages, **settings_, continue_final_message=True)
    text = tokenizer.decode(rendered.token_ids)
    assert text.endswith(BEGUN["content"])
    ended = tokenizer.decode(tokenizer.render_chat(messages, **settings_).token_ids)
    assert ended.startswith(text) and len(ended) > len(text)
    ends = [boundary.position for boundary in rendered.boundaries]
    assert ends == sorted(set(ends)) and ends[-1] <= len(rendered.token_ids)
    # what the next turns share of it: the question's end is where it is when the answer is complete
    whole = tokenizer.render_chat(messages, **settings_)
    known = [end for end in (boundary.position for boundary in whole.boundaries) if end < len(rendered.token_ids)]
    assert set(known) <= set(ends)


def test_a_template_that_hides_the_message_is_refused(plain_tokenizer: Path, tmp_path: Path):
    hiding = tokenizer_with(plain_tokenizer, tmp_path / "hiding", "{{ messages[0].content }}!")
    with pytest.raises(InvalidRequest) as caught:
        hiding.render_chat([USER, BEGUN], add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "messages"


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_tokens_spell_their_text(tokenizers, text):
    tokenizer = tokenizers["plain"]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()


def test_special_tokens_spell_their_names(tokenizers):
    tokenizer = tokenizers["plain"]
    assert tokenizer.token_bytes(2).decode() == tokenizer.decode([2]) != ""
    assert tokenizer.token_bytes(1 << 20) == b""


def test_sentencepiece_spelling():
    vocabulary = {"<unk>": 0, "▁a": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4, "ü": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    spelling = TokenSpelling(tokenizer)
    assert b"".join(map(spelling.token_bytes, [1, 2, 3, 4, 5])).decode() == " a€ü"


@pytest.mark.parametrize("skip", [True, False])
def test_streams_leave_special_tokens_out_unless_asked(tokenizers, skip):
    tokenizer = tokenizers["plain"]
    stream = tokenizer.stream(skip)
    pieces = [stream.push(token) for token in (*tokenizer.encode("ab", add_special_tokens=False), 2)]
    text = "".join(pieces) + stream.finish()
    assert text == ("ab" if skip else "ab" + tokenizer.decode([2]))
