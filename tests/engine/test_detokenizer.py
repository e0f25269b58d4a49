"""The client adds the text to answers that the core sends as tokens alone."""

import pytest

from cairn.engine.contract import GenerateOutput
from cairn.engine.detokenizer import Detokenizer
from doubles.byte_tokenizer import END_OF_SEQUENCE, ByteTokenizer
from doubles.engine_requests import generate_request

TEXT = "Grüße, 世界: 🦜"


def request(name="a", **fields):
    return generate_request(request_id=name, prompt=b"", **fields)


def read(requests, *outputs):
    detokenizers = {each.request_id: Detokenizer(ByteTokenizer(), each) for each in requests}
    for output in outputs:
        detokenizers[output.request_id].add_text(output)
    return outputs, detokenizers


def output(tokens, name="a", finish=None, **fields):
    return GenerateOutput(request_id=name, token_ids=list(tokens), finish_reason=finish, **fields)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_text_comes_as_its_characters_are_whole(size):
    tokens = [*TEXT.encode(), END_OF_SEQUENCE]
    parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    outputs, _ = read([request()], *(output(part) for part in parts[:-1]), output(parts[-1], finish="stop"))
    assert "".join(each.text for each in outputs) == TEXT
    assert [token for each in outputs for token in each.token_ids] == tokens
    assert not any("\ufffd" in each.text for each in outputs)


def test_a_character_that_the_end_cuts_is_told_then():
    cut = "世".encode()[:2]
    outputs, _ = read([request()], output(cut), output([], finish="length"))
    assert [each.text for each in outputs] == ["", "\ufffd"]


def test_special_tokens_are_shown_where_they_are_asked_for():
    tokens = [*b"ab", END_OF_SEQUENCE]
    for skips, text in ((True, "ab"), (False, "ab<end>")):
        (last,), _ = read([request(skip_special_tokens=skips)], output(tokens, finish="stop"))
        assert last.text == text


def test_answers_have_texts_of_their_own():
    first, second = "é".encode()
    outputs, detokenizers = read(
        [request(n=2), request("b")],
        *(output([first], index=0), output([first], index=1), output([first], "b")),
        *(output([second], index=1, finish="stop"), output([second], "b", finish="stop")),
    )
    assert [each.text for each in outputs] == ["", "", "", "é", "é"]
    held = [[stream is not None for stream in each._streams] for each in detokenizers.values()]
    assert held == [[True, False], [False]], "what has ended is forgotten"


def test_the_cores_own_text_stays():
    """With stop strings the core has cut it: the tokens have more."""
    (last,), _ = read([request(stop=["c"])], output(b"abcd", finish="stop", text="ab"))
    assert last.text == "ab"


def test_an_output_without_text_is_the_same_object():
    given = output([END_OF_SEQUENCE])
    (last,), _ = read([request()], given)
    assert last is given
