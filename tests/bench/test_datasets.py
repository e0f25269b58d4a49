"""What is sent: lengths, what prompts share, and the same again from the same seed."""

import json
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from cairn.bench.datasets import (
    Chats,
    PrefixRepetition,
    RandomPrompts,
    ShareGpt,
    make_chats,
    make_prefix_repetition,
    make_random_prompts,
    read_sharegpt,
)
from cairn.bench.work import FIRST_TOKEN, TokenizerSpeller, Vocabulary, WordSpeller, spell_prompts
from cairn.errors import ConfigError

VOCABULARY = Vocabulary.of_size(4000)


def rng(seed=0):
    return np.random.default_rng(seed)


def turns(work):
    return [turn for conversation in work for turn in conversation.turns]


def test_random_prompts_have_their_lengths():
    work = turns(make_random_prompts(RandomPrompts(100, 20, 0.25, prefix_len=8), 300, VOCABULARY, rng()))
    assert {turn.num_tokens == len(turn.prompt) for turn in work} == {True}
    assert {turn.prompt[:8] for turn in work} == {work[0].prompt[:8]}
    assert len({turn.prompt[8] for turn in work}) > 200
    lengths = [turn.num_tokens - 8 for turn in work]
    assert (min(lengths), max(lengths)) == (75, 125)
    assert {turn.max_tokens for turn in work} == set(range(15, 26))
    ids = [token for turn in work for token in turn.prompt]
    assert min(ids) == FIRST_TOKEN and max(ids) == 3999


def test_random_prompts_without_a_range_are_all_as_long():
    work = turns(make_random_prompts(RandomPrompts(33, 7), 20, VOCABULARY, rng()))
    assert {(turn.num_tokens, turn.max_tokens) for turn in work} == {(33, 7)}


def test_a_prompt_has_a_token():
    with pytest.raises(ConfigError, match="--random-input-len"):
        make_random_prompts(RandomPrompts(0, 5), 3, VOCABULARY, rng())
    assert turns(make_random_prompts(RandomPrompts(0, 5, prefix_len=1), 3, VOCABULARY, rng()))[0].num_tokens == 1


def test_prefixes_repeat():
    work = turns(make_prefix_repetition(PrefixRepetition(60, 20, 10, 9), 100, VOCABULARY, rng()))
    assert {(len(turn.prompt), turn.max_tokens) for turn in work} == {(80, 9)}
    assert Counter(Counter(turn.prompt[:60] for turn in work).values()) == {10: 10}
    assert len({turn.prompt[60:] for turn in work}) == 100
    first_ten = {turn.prompt[:60] for turn in work[:10]}
    assert 1 < len(first_ten) < 10, "in random order"


def test_prompts_that_are_no_multiple_are_spread():
    work = turns(make_prefix_repetition(PrefixRepetition(6, 2, 4, 9), 10, VOCABULARY, rng()))
    assert sorted(Counter(turn.prompt[:6] for turn in work).values()) == [2, 2, 3, 3]
    with pytest.raises(ConfigError, match="--num-prompts 3"):
        make_prefix_repetition(PrefixRepetition(6, 2, 4, 9), 3, VOCABULARY, rng())


def test_chats_share_systems_and_nothing_else():
    work = make_chats(Chats(4, 2, 30, 5, 6), 22, VOCABULARY, rng(), WordSpeller())
    assert [len(conversation.turns) for conversation in work] == [4] * 5 + [2]
    assert len({conversation.system for conversation in work}) == 2
    assert {len(conversation.system.split(" ")) for conversation in work} == {30}
    assert len({turn.prompt for turn in turns(work)}) == 22
    assert {(turn.num_tokens, turn.max_tokens) for turn in turns(work)} == {(5, 6)}


@pytest.fixture
def recorded(tmp_path):
    def entry(question, answer, *more):
        return {"conversations": [{"value": text} for text in (question, answer, *more)]}

    entries = [
        entry("a" * 100, "b" * 80, "c"),
        entry("short", "b" * 80),
        entry("a" * 100, "short"),
        entry("a" * 5000, "b" * 80),
        entry("a" * 4000, "b" * 4400),
        {"conversations": [{"value": "alone"}]},
        entry("e" * 60, "f" * 40),
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))
    return path


def test_sharegpt_takes_what_fits(recorded):
    work = turns(read_sharegpt(ShareGpt(recorded), 100, WordSpeller(), rng()))
    assert sorted((turn.prompt[0], turn.num_tokens, turn.max_tokens) for turn in work) == [("a", 25, 20), ("e", 15, 10)]
    work = turns(read_sharegpt(ShareGpt(recorded, output_len=3), 100, WordSpeller(), rng()))
    assert sorted(turn.num_tokens for turn in work) == [15, 25, 25, 1000]
    assert {turn.max_tokens for turn in work} == {3}
    assert len(read_sharegpt(ShareGpt(recorded, output_len=3), 2, WordSpeller(), rng())) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "must be a JSON list"),
        ("[{}]", "entry 0: `conversations`"),
        ('[{"conversations": [{"value": "a"}, {"value": 7}]}]', "entry 0: `value`"),
        ('[{"conversations": ["a", "b"]}]', "entry 0: `value`"),
        ("[" * 100_000, "cannot be read"),
        ("nonsense", "cannot be read"),
        ("[]", "no conversation in it"),
    ],
)
def test_a_sharegpt_file_that_is_none(tmp_path, text, said):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_sharegpt(ShareGpt(path), 5, WordSpeller(), rng())


@pytest.mark.parametrize(
    "make",
    [
        lambda seed, path: make_random_prompts(RandomPrompts(10, 5, 0.5, 2), 30, VOCABULARY, rng(seed)),
        lambda seed, path: make_prefix_repetition(PrefixRepetition(6, 2, 4, 9), 30, VOCABULARY, rng(seed)),
        lambda seed, path: make_chats(Chats(3, 2, 3, 4, 5), 30, VOCABULARY, rng(seed), WordSpeller()),
        lambda seed, path: read_sharegpt(ShareGpt(path, 3), 4, WordSpeller(), rng(seed)),
    ],
    ids=["random", "prefix_repetition", "chat", "sharegpt"],
)
def test_the_seed_decides(make, recorded):
    assert make(7, recorded) == make(7, recorded)
    assert any(make(7, recorded) != make(seed, recorded) for seed in (8, 9, 10))


@pytest.fixture
def tokenizer_file(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "red": 1, "green": 2, "blue": 3, "<unk>": 4}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_spells_and_counts(tokenizer_file):
    for path in (tokenizer_file, tokenizer_file / "tokenizer.json"):
        speller = TokenizerSpeller(path)
        assert speller.regular_token_ids().tolist() == [1, 2, 3, 4]
        assert speller.text([3, 1]) == "blue red" and speller.count("red red green") == 3
    (work,) = make_random_prompts(RandomPrompts(5, 1), 1, Vocabulary(speller.regular_token_ids()), rng())
    assert speller.count(spell_prompts(work, speller).turns[0].prompt) == 5


@pytest.mark.parametrize("content", [None, "{}", "nonsense"])
def test_a_tokenizer_that_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"--tokenizer .*tokenizer.json cannot be read"):
        TokenizerSpeller(tmp_path)


def test_words_are_the_same_for_the_same_ids():
    assert WordSpeller().text([20, 21, 20]).split(" ")[0] == WordSpeller().text([20])
    assert WordSpeller().count("") == 1
