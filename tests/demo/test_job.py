"""The job against a client that answers by rote."""

import itertools

from demo.client import Reply
from demo.corpus import Corpus
from demo.job import AGAIN, BRANCHED, ONE_TOKEN, TURNS, run_job
from demo.shared_prefix import Shared


class RoteClient:
    """Tokenizes character by character and answers every request with tokens nobody else gets."""

    def __init__(self):
        self.fields = []

    def tokenize(self, text):
        return [ord(character) for character in text]

    def tokenize_chat(self, messages):
        return self.tokenize("".join(f"<{message['role']}>{message['content']}" for message in messages) + "<>")

    def complete(self, prompt, **fields):
        self.fields.append(fields)
        ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        answer = tuple(2_000_000 + 100 * len(self.fields) + i for i in range(fields["max_tokens"]))
        return Reply(tuple(ids), answer, "answer", 0, "never_seen", 0.0, 1)

    def chat(self, messages, **fields):
        return self.complete(self.tokenize_chat(messages), **fields)


def test_the_job_is_what_it_says():
    client = RoteClient()
    outcomes = run_job(client, Corpus())
    by_label = {outcome.label: outcome for outcome in outcomes}
    assert "".join(outcome.part for outcome in outcomes) == "aaabbb" + "c" * 2 * TURNS + "d"
    assert by_label[AGAIN].shared.prompts == len(by_label[AGAIN].reply.prompt_ids) > 2_000
    assert len(by_label[ONE_TOKEN].reply.answer_ids) == 1
    assert (len(by_label[BRANCHED].reply.prompt_ids), by_label[BRANCHED].shared) == (2_200, Shared(1_500, 1_500))
    assert outcomes[-1].shared == Shared(0, 0)
    assert outcomes[-1].reply.prompt_ids == by_label[AGAIN].reply.prompt_ids


def test_the_chat_as_ids_keeps_every_computed_token():
    outcomes = [outcome for outcome in run_job(RoteClient(), Corpus()) if outcome.label.startswith("as ids")]
    lengths = [len(outcome.reply.prompt_ids) for outcome in outcomes]
    assert lengths == sorted(set(lengths)) and len(lengths) == TURNS
    assert outcomes[0].shared == Shared(0, 0)
    for before, after in itertools.pairwise(outcomes):
        prompt, answer = len(before.reply.prompt_ids), len(before.reply.answer_ids)
        assert after.shared == Shared(prompt, prompt + answer - 1)


def test_answers_depend_on_nothing_but_the_request():
    client = RoteClient()
    run_job(client, Corpus())
    assert all(fields["ignore_eos"] for fields in client.fields)
    warm_up, *asked = client.fields
    assert warm_up["cache_salt"] == "warm-up"
    assert all(fields.get("temperature") == 0 or "seed" in fields for fields in asked)
