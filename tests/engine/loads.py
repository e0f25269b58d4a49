"""Clients of an engine, so many at once: chats, questions on documents, and agents with tools."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from logged import LoggedServer

from cairn.types import Boundary

SALTS = (None, None, None, "blue")


@dataclass(frozen=True, slots=True)
class Ask:
    """What one client sends next."""

    prompt: list[int]
    max_tokens: int
    boundaries: tuple[Boundary, ...] = ()
    salt: str | None = None
    n: int = 1
    abort_after: int | None = None


Client = Iterator[Ask | None]
"""Is sent prompt and answer of what it has asked last."""


class Load:
    """Lengths grow with `scale`. `fresh` makes tokens that nobody has seen. `holds`: clients hold their system prompts
    for some seconds; `aborts`: some leave before their answer is complete."""

    def __init__(self, seed: int, scale: int = 1, holds: bool = False, aborts: bool = True) -> None:
        self.draw = random.Random(seed)
        tokens = np.random.default_rng(seed)
        self.scale, self.holds, self.aborts = scale, holds, aborts
        self.fresh: Callable[[int], list[int]] = lambda count: tokens.integers(50, 1 << 30, count).tolist()
        self.systems = [self.fresh(self.length(40, 90)) for _ in range(3)]
        self.documents = [self.fresh(self.length(60, 200)) for _ in range(12)]

    def length(self, least: int, most: int) -> int:
        return self.scale * self.draw.randint(least, most) + self.draw.randint(0, 15)

    def client(self, kind: str) -> Client:
        kinds = {"chat": self.chat, "rag": self.rag, "agent": self.agent}
        return kinds[kind if kind != "mixed" else self.draw.choice(tuple(kinds))]()

    def chat(self) -> Client:
        draw, salt = self.draw, self.draw.choice(SALTS)
        sequence = list(draw.choice(self.systems))
        ends = [Boundary(len(sequence), "system_end", 2 * self.holds)]
        for _ in range(draw.randint(1, 6)):
            sequence = sequence + self.fresh(self.length(3, 40))
            ends = [*ends, Boundary(len(sequence))]
            sequence = [*sequence, 7, 8, 9]
            abort_after = draw.randint(0, 20) if draw.random() < 0.08 * self.aborts else None
            n = 1 if draw.random() < 0.9 else 2
            sequence = yield Ask(sequence, self.length(1, 30), tuple(ends), salt, n, abort_after)
            if draw.random() < 0.1:
                sequence = sequence[: draw.randint(1, len(sequence))]  # a question is asked anew
                ends = [end for end in ends if end.position <= len(sequence)]

    def rag(self) -> Client:
        draw = self.draw
        document = self.documents[min(int(draw.expovariate(0.4)), len(self.documents) - 1)]
        yield Ask(self.systems[0] + document + self.fresh(self.length(3, 12)), self.length(1, 12))

    def agent(self) -> Client:
        draw = self.draw
        sequence = self.systems[1] + self.fresh(self.length(10, 30))
        for _ in range(draw.randint(2, 8)):
            sequence = yield Ask(sequence, self.length(1, 12), (Boundary(len(sequence)),))
            sequence = sequence + self.fresh(self.length(5, 60))


def serve(server: LoggedServer, load: Load, kind: str, requests: int, concurrency: int = 8) -> None:
    """Ask until so many have been asked, then let all end."""
    clients: list[tuple[Client, str | None]] = [(load.client(kind), None) for _ in range(concurrency)]
    going: dict[str, tuple[Client, int | None]] = {}
    asked, pauses = 0, random.Random(0)
    while going or (clients and asked < requests):
        while clients and asked < requests:
            client, ended = clients.pop(0)
            ask = next(client, None) if ended is None else _told(client, server.sequences[ended])
            if ask is None:
                clients.append((load.client(kind), None))
                continue
            name = f"r{asked}"
            asked += 1
            server.submit(name, ask.prompt, ask.max_tokens, ask.salt, boundaries=list(ask.boundaries), n=ask.n)
            going[name] = client, ask.abort_after
        server.clock.advance(pauses.random() * 0.2)
        for name in server.step():
            if name in going:
                clients.append((going.pop(name)[0], name))
        for name, (client, left) in list(going.items()):
            if left is not None:
                going[name] = client, left - 1
                if left == 0:
                    server.core.abort(name)
                    clients.append((going.pop(name)[0], name))
    server.close()


def _told(client: Client, sequence: list[int]) -> Ask | None:
    try:
        return client.send(list(sequence))
    except StopIteration:
        return None
