"""Words that may not come: which tokens would complete one."""

from cairn.runner.slots import Sample


def ends_of_bad_words(sample: Sample) -> tuple[int, ...]:
    """The tokens that would complete a bad word here, rising: the last token of each whose other tokens are what the
    answer ends with. vLLM's `bad_words`: a word is looked for in the answer alone, spelled with those tokens.

    A word of one token needs no history; for others `sample.history` has to be there.
    """
    words = sample.params.bad_words
    begun = max(map(len, words), default=1) - 1
    tail: tuple[int, ...] = ()
    if begun:
        assert sample.history is not None, f"position {sample.position}: bad words without what was drawn before"
        tail = tuple(sample.history[max(sample.num_prompt_tokens, len(sample.history) - begun) :].tolist())
    return tuple(sorted({word[-1] for word in words if word[:-1] == tail[len(tail) - len(word) + 1 :]}))
