"""How a demo, a benchmark and tests tell Ray's processes apart."""

import pytest
from demo.local_ray import runs_actor

ACTOR = "ServeReplica:cairn:replica"


@pytest.mark.parametrize("title", [f"ray::{ACTOR}", f"ray::{ACTOR}.record_routing_stats"])
def test_an_actor_is_known_whatever_it_carries_out(title):
    assert runs_actor([title], ACTOR)


@pytest.mark.parametrize(
    "command",
    [[], [""], ["python", f"ray::{ACTOR}"], [f"ray::{ACTOR}s"], ["ray::ProxyActor"]],
    ids=["ended", "no title", "an argument", "a longer name", "another actor"],
)
def test_another_process_is_none_of_the_actor(command):
    assert not runs_actor(command, ACTOR)
