"""The hits of requests that wait: uses that are certain.

What a waiting request is going to resume from is used once it is its turn, after the requests before it. So the
checkpoint there has a chance of one use within so many requests, however seldom checkpoints of its class are used. It
is no lock: what is worth more per byte stays before it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from cairn.cache.lookup import OriginFilter
from cairn.cache.sequence_blocks import Namespace
from cairn.cache.tree import Checkpoint, Node
from cairn.types import Keys

__all__ = ["MAX_AWAITED", "AwaitedHits", "WaitingPrompt"]

MAX_AWAITED = 128
"""So many requests at the head of the queue count: one that comes later has a chance of less than one in so many."""


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A prompt that waits for its turn, with the answer so far of one that was preempted: it is `resumed_from` so many
    prompt tokens then."""

    request_id: str
    namespace: Namespace
    keys: Keys
    resumed_from: int | None = None


class AwaitedHits:
    """Which checkpoints the requests at the head of the queue would resume from, as the trees are now.

    How far each prompt is known is remembered, so that to look again costs a few nodes and not the whole prompt.
    `nodes`: those of the checkpoints, by request, but for requests that would hit nothing.
    """

    def __init__(self, root: Callable[[Namespace], Node | None], exact: bool, resumes_anywhere: bool) -> None:
        """`root`: that of a namespace, or None. `exact`: see `OriginFilter`."""
        self._root, self._exact, self._resumes_anywhere = root, exact, resumes_anywhere
        self._known: dict[str, Node] = {}
        self.nodes: dict[str, Node] = {}

    def find(self, prompts: Iterable[WaitingPrompt]) -> Mapping[Node, float]:
        """By the node of the checkpoint the uses per request that are certain: the most per request for waiting until
        some turn and no longer, as with the chances that are learned (see `HazardTable.refresh`). `prompts`: in the
        order of their turns, of which the first `MAX_AWAITED` are looked at."""
        known: dict[str, Node] = {}
        uses: dict[Node, int] = {}
        chances: dict[Node, float] = {}
        self.nodes = {}
        for place, prompt in enumerate(islice(prompts, MAX_AWAITED), 1):
            num_prompt_tokens = len(prompt.keys) if prompt.resumed_from is None else prompt.resumed_from
            may = OriginFilter(self._exact, prompt.request_id, num_prompt_tokens, prompt.resumed_from is not None)
            node = self._follow(prompt, may.run_end())
            if node is None:
                continue
            known[prompt.request_id] = node
            checkpoint = self._keeper(node, prompt.keys) if self._resumes_anywhere else _deepest(node, may)
            if checkpoint is not None:
                node = checkpoint.node
                self.nodes[prompt.request_id] = node
                uses[node] = uses.get(node, 0) + 1
                chances[node] = max(chances.get(node, 0.0), uses[node] / place)
        self._known = known
        return chances

    def _follow(self, prompt: WaitingPrompt, run_end: Callable[[Node], int] | None) -> Node | None:
        """The deepest node of which the prompt has all tokens, and whose keys and values are there to be used."""
        node = self._known.get(prompt.request_id)
        while node is not None and node.pages is None and node.parent is not None:
            node = node.parent
        if node is None or node.parent is None:
            node = self._root(prompt.namespace)
        if node is None:
            return None
        keys = prompt.keys
        while node.end < len(keys):
            child = node.child(int(keys[node.end]))
            if child is None or child.pages is None or child.end > len(keys):
                break
            if run_end is not None and run_end(child) < child.end:
                break
            if not child.covers(keys[child.start : child.end]):
                break
            node = child
        return node

    def _keeper(self, node: Node, keys: Keys) -> Checkpoint | None:
        """Where keys and values alone can be resumed from: a checkpoint that keeps those that the prompt shares, which
        is at their last node or below it."""
        step = node.child(int(keys[node.end])) if node.end < len(keys) else None
        if step is None or step.pages is None:
            step = node if node.parent is not None else None
        while step is not None and step.checkpoint is None:
            step = next((child for child in step.children if child.pages is not None), None)
        return step.checkpoint if step is not None else None


def _deepest(node: Node, may: OriginFilter) -> Checkpoint | None:
    """The deepest checkpoint at `node` or above that may be resumed from."""
    step: Node | None = node
    while step is not None:
        if step.checkpoint is not None and may.accepts(step.checkpoint):
            return step.checkpoint
        step = step.parent
    return None
