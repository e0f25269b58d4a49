"""Engine requests whose sampling parameters and stop conditions are given flat, as a body has them."""

from dataclasses import fields

from cairn.engine.contract import GenerateRequest, StopConditions
from cairn.types import SamplingParams

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_STOPPING = frozenset(StopConditions.__struct_fields__)

NEVER = "\x00 nobody says this"
"""A stop string that ends nothing: an answer that has it gets its text from the core, not from the client."""


def generate_request(**flat) -> GenerateRequest:
    """Lists among the sampling parameters become tuples, a mapping its pairs: what they are behind the wire."""
    drawn = {name: _tuples(flat.pop(name)) for name in _SAMPLING & flat.keys()}
    ended = {name: flat.pop(name) for name in _STOPPING & flat.keys()}
    flat = {"sampling": SamplingParams(**drawn), "stop_conditions": StopConditions(**ended), **flat}
    return GenerateRequest(**flat)


def _tuples(value):
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
