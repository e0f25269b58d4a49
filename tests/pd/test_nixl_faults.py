"""Faults between real processes over NIXL, and a real server that is told lies over HTTP and over its side channel."""

import importlib.util
import itertools
import json
import pickle
import random
import socket
from collections import Counter

import nixl_faults
import pytest
from hypothesis import HealthCheck, given, settings
from nixl_faults import EFFECTS, FAULTS, play, struck
from nixl_process import REMOTE_DECODE
from nixl_relay import HOST
from nixl_world import Round, World, world_of

from server.test_hostile_transfers import BODY, CHANGES, FOREIGN, GONE, PATHS, VALUES, ask, check, said
from server.test_real_engine import Served

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the extra nixl is not installed")

ROUNDS = 3
MORE_ROUNDS = 12
LEASE_SECONDS = 51.0


@pytest.fixture(scope="module")
def world(tiny_model):
    with world_of(tiny_model) as made:
        yield made


@pytest.mark.more
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_hangs_and_nothing_is_wrong(world, fault):
    times = Counter()
    for seed in range(ROUNDS + MORE_ROUNDS):
        if seed >= ROUNDS and times[True]:
            break  # enough, and it struck: when it does is a matter of the machine's load
        try:
            played = play(world, fault, seed)
            hit = struck(played, EFFECTS[fault])
            times[hit] += 1
            if hit and EFFECTS[fault] == nixl_faults.FAILED:
                assert played.failures() == (played.on_failure == "fail")
        except Exception as error:
            raise AssertionError(f"{fault.__name__}, seed {seed}: {error}") from error
    assert times[True], "the fault never struck"


def hand_over(world: World, rng: random.Random) -> None:
    """One that works."""
    p, d = world.p(), world.d("cma", "fail")
    prompt = [rng.randrange(20, 4000) for _ in range(100)]
    first = p.submit(prompt, 1, REMOTE_DECODE)
    world.wait(lambda: first.is_over, "P is done")
    before = d.stats().transfers.received_tokens
    asked, right = d.submit(prompt, 3, first.params), world.alone().submit(prompt, 3)
    world.wait(lambda: asked.is_over and right.is_over, "D is done")
    assert asked.tokens == right.tokens and len(right.tokens) == 3
    assert d.stats().transfers.received_tokens == before + 100


@pytest.mark.more
def test_what_is_given_up_is_let_go_of_once_the_peer_is_back(world):
    """Over TCP a read ends only with the help of the peer, whose lease has ended long before."""
    r = Round(world, "given up", ("tcp", "recompute"))
    r.prompt = r.tokens(3000)
    params = r.prefill()
    r.relay.hold = frozenset({"granted"})
    asked = r.decode(r.d, params=params)
    r.until("granted")
    r.p.freeze()
    r.relay.reset()
    world.wait(lambda: r.d.stats().transfers.num_open == 1 and not r.relay.num_held, "D reads")
    world.wait(lambda: r.d.advance(0.5) or asked.is_over, "D has computed what it could not read")
    assert r.d.stats().transfers.quarantined_pages >= 3000 // 16
    r.p.advance(LEASE_SECONDS)
    r.p.resume()
    world.wait(lambda: r.p.stats().transfers.leased_pages == 0, "P holds nothing any more")
    world.wait(lambda: r.d.stats().transfers.quarantined_pages == 0, "D has its pages back")
    r.finish()


# -- a real server ---------------------------------------------------------------------------------------------------


class TransferServer(Served):
    """What `test_hostile_transfers` asks of a server."""

    def post(self, path, **options):
        return self.http.post(path, **options)

    def get(self, path, **options):
        return self.http.get(path, **options)


@pytest.fixture(scope="module")
def served(world, tiny_model, tmp_path_factory):
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    flags = ["--exact", "--kv-transfer-config", config, "--kv-cache-memory-bytes", "64MiB"]
    flags += ["--kv-secret-file", str(world.secret)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", HOST)
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
        server = TransferServer(tiny_model, tmp_path_factory.mktemp("served") / "log", *flags)
    yield server.wait_healthy()
    assert server.end() == 0, server.log.read_text()


@pytest.fixture(scope="module")
def reference(served):
    """The right answers, and what is handed over, once for each endpoint."""
    found = {}
    for path in PATHS:
        plain, asked = ask(served, path, None), ask(served, path, REMOTE_DECODE)
        assert plain.status_code == asked.status_code == 200, asked.text
        found[path] = said(plain), asked.json()["kv_transfer_params"]
    return found


FEW = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.more
@FEW
@given(params=VALUES)
def test_any_json_over_http(served, reference, params):
    for path, (right, _) in reference.items():
        check(ask(served, path, params), right)


@pytest.mark.more
@FEW
@given(changes=CHANGES, gone=GONE)
def test_a_reference_that_somebody_has_changed_over_http(served, reference, changes, gone):
    for path, (right, params) in reference.items():
        params = {key: value for key, value in (params | changes).items() if key not in gone}
        answer = ask(served, path, params)
        check(answer, right)
        if params.get("do_remote_prefill") is True and params.get("remote_host") in FOREIGN:
            assert answer.status_code == 400


SALTS = itertools.count()


@pytest.mark.more
@pytest.mark.parametrize("key", ["none", "remote_engine_id", "remote_request_id", "remote_num_tokens"])
def test_a_reference_that_is_not_for_this_prompt_over_http(served, reference, key):
    """Under another salt nothing is cached here, so the server asks its peer, which is itself."""
    right, params = reference["/v1/completions"]
    wrong = {
        "none": {},
        "remote_engine_id": {"remote_engine_id": "somebody"},
        "remote_request_id": {"remote_request_id": "x~" + "0" * 32},
        "remote_num_tokens": {"remote_num_tokens": 10**6},
    }
    body = BODY | {"kv_transfer_params": params | wrong[key], "cache_salt": f"salt{next(SALTS)}"}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert said(answer) == right
    assert answer.json()["cairn"]["cache"]["reason"] == "remote_failed"


@pytest.fixture
def nothing_offered(served, reference):
    """The server holds nothing for others any more, whichever tests it has been through."""
    for path, (right, params) in reference.items():
        check(ask(served, path, params), right)
    served.until(lambda: served.metric("cairn:held_pages") == 0)


@pytest.mark.more
@pytest.mark.usefixtures("nothing_offered")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["hello", "claim", "granted", "confirm", "done"])
def test_an_http_client_that_leaves_at_any_phase_leaves_nothing_behind(world, served, kind, stream):
    """P is a core of its own; D is the server whose client goes away while a frame is held."""
    p, rng = world.p(), random.Random(f"{kind} {stream}")
    relay = world.new_relay(p.side_port)
    prompt = [rng.randrange(20, 4000) for _ in range(300)]
    first = p.submit(prompt, 1, REMOTE_DECODE)
    world.wait(lambda: first.is_over, "P is done")
    params = first.params | {"remote_port": relay.port}
    relay.hold = frozenset({kind})
    body = {"prompt": prompt, "max_tokens": 3, "stream": stream, "kv_transfer_params": params}
    content = json.dumps(body).encode()
    with socket.create_connection((HOST, served.port), 5) as client:
        head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head += [f"Content-Length: {len(content)}", "", ""]
        client.sendall("\r\n".join(head).encode() + content)
        world.wait(lambda: relay.num_held, f"a {kind} is held")
    served.until(lambda: served.metric("vllm:num_requests_waiting") + served.metric("vllm:num_requests_running") == 0)
    relay.reset()
    p.advance(700.0)
    world.wait(lambda: p.stats().transfers.leased_pages == 0, "P lets go")
    served.until(lambda: served.metric("cairn:quarantined_pages") == 0)
    served.assert_at_rest()


@pytest.mark.more
def test_strangers_at_the_side_channel_of_a_server_are_counted(served, reference):
    (_, params) = reference["/v1/completions"]
    before = served.metric("cairn:side_channel_dropped_total")
    for _ in range(50):
        with socket.create_connection((HOST, params["remote_port"]), 5) as stranger:
            stranger.sendall(pickle.dumps({"do_remote_prefill": True}))
    served.until(lambda: served.metric("cairn:side_channel_dropped_total") == before + 50)
    assert served.get("/health").status_code == 200
