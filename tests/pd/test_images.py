"""Images across servers: nothing is encoded on the decode side, and another image is never taken for the same one."""

import json

import numpy as np
import pytest
from real_servers import RealServer, finish, hand_over, settle

from cairn.engine.contract import Pixels
from doubles.memory_link import MemoryFabric


@pytest.fixture(scope="module")
def servers(tiny_vl_model):
    fabric = MemoryFabric()
    made = [RealServer(tiny_vl_model, fabric, name) for name in ("p", "d")]
    made.append(RealServer(tiny_vl_model, None, "alone", enable_prefix_caching=False))
    yield made
    for server in made:
        server.close()


def picture(seed, width=96, height=64) -> dict:
    rgb = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8).tobytes()
    return {"type": "image", "image": Pixels(width=width, height=height, rgb=rgb)}


def chat(server, *parts):
    """The prompt's tokens, and what goes with them."""
    rendered = server.tokenizer.render_chat([{"role": "user", "content": list(parts)}])
    return rendered.token_ids, {"boundaries": rendered.boundaries, "images": rendered.images}


def test_every_logit_is_that_of_one_server_and_d_encodes_nothing(servers):
    p, d, one = servers
    text = {"type": "text", "text": "What is in these pictures? " * 8}
    for number, parts in enumerate(
        [(picture(1), text), (text, picture(1), picture(2, 160, 96), text), (picture(3, 64, 160), text, picture(1))]
    ):
        prompt, fields = chat(p, *parts)
        encoded = d.core.stats().images.num_encoded
        tokens, last, params = hand_over(p, d, prompt, **fields)
        request = one.submit(prompt, 4, **fields)
        expected, _ = finish(one, request)
        assert tokens == expected
        for found, wanted in zip(d.logits[d.count], one.logits[request], strict=True):
            assert np.array_equal(found, wanted)
        assert d.core.stats().images.num_encoded == encoded
        assert last.cache.cached_tokens + last.cache.received_tokens == len(prompt) == params["remote_num_tokens"]
        assert d.core.stats().transfers.num_failed == 0, number
    settle(p, d)


def test_a_reference_used_with_another_image_is_refused(servers):
    p, d, one = servers
    text = {"type": "text", "text": "And here? " * 20}
    prompt, fields = chat(p, picture(50), text)
    other, other_fields = chat(p, picture(51), text)
    assert prompt == other
    _, prefilled = finish(p, p.submit(prompt, 1, {"do_remote_decode": True}, **fields))
    failed = d.core.stats().transfers.num_failed
    tokens, _ = finish(d, d.submit(other, 4, json.loads(prefilled.kv_transfer_params), **other_fields))
    expected, _ = finish(one, one.submit(other, 4, **other_fields))
    assert tokens == expected
    assert d.core.stats().transfers.num_failed == failed + 1
