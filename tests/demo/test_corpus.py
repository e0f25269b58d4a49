import pytest
from demo.corpus import LEAST_CHARACTERS, Corpus
from demo.server import DemoError


def test_passages_are_real_different_and_the_same_every_time():
    passages = [Corpus().passage(number, 1_000) for number in range(11)]
    assert passages == [Corpus().passage(number, 1_000) for number in range(11)]
    assert len(set(passages)) == 11
    assert all(len(passage) == 1_000 and "\n" in passage for passage in passages)


def test_short_sources_do_not_count(tmp_path):
    (tmp_path / "a.py").write_text("x" * (LEAST_CHARACTERS - 1))
    with pytest.raises(DemoError, match="no Python sources"):
        Corpus(tmp_path)
    (tmp_path / "b.py").write_text("y" * LEAST_CHARACTERS)
    assert Corpus(tmp_path).passage(5, 3) == "yyy"


def test_copies_and_generated_tables_do_not_count(tmp_path):
    for name, letter in (("a.py", "x"), ("b.py", "x"), ("c.py", "y"), ("_data.py", "z")):
        (tmp_path / name).write_text(letter * LEAST_CHARACTERS)
    assert [Corpus(tmp_path).passage(number, 1) for number in range(3)] == ["x", "y", "x"]
