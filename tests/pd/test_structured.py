"""A form that an answer has to have, across servers: the decode server holds to it, the prefill server need not."""

import json

import jsonschema
import numpy as np
import pytest
from real_servers import RealServer, finish, hand_over, settle

from cairn.engine.contract import Structure
from doubles.memory_link import MemoryFabric

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "many": {"type": "boolean"}},
    "required": ["color", "many"],
    "additionalProperties": False,
}
STRUCTURE = Structure(kind="json", text=json.dumps(SCHEMA), field="response_format.json_schema.schema")


@pytest.fixture(scope="module")
def servers(tiny_model):
    fabric = MemoryFabric()
    made = [RealServer(tiny_model, fabric, name) for name in ("p", "d")]
    made.append(RealServer(tiny_model, None, "alone", enable_prefix_caching=False))
    yield made
    for server in made:
        server.close()


@pytest.mark.more
def test_the_decode_server_holds_the_answer_to_its_form(servers):
    p, d, one = servers
    for seed, length in enumerate((40, 100, 300)):
        prompt = np.random.default_rng(seed).integers(20, 4000, length).tolist()
        tokens, _, params = hand_over(p, d, prompt, max_tokens=200, structure=STRUCTURE)
        expected, _ = finish(one, one.submit(prompt, 200, structure=STRUCTURE))
        assert tokens == expected and params["remote_num_tokens"] == length
        jsonschema.validate(json.loads(d.tokenizer.decode(tokens)), SCHEMA)
    assert d.core.stats().transfers.num_failed == 0
    assert d.core._grammars._tokenizer is not None and p.core._grammars._tokenizer is None
    settle(p, d)
