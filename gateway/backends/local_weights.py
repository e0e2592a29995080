"""The weights that this process has told the engines, and telling them of changes.

An engine takes the weights that requests bring, and those it is told; the last word counts. So that the last word of
each process is the right one, whatever is sent at a time is the last weight known here: a request whose principal is
older than that (its body was long in coming) does not set an old weight again. A change is told whenever what is known
now is not what was sent, by requests or by us. Requests of another process are its own to speak for; it reads the same
storage, so all agree within the two seconds in which a change is known everywhere. Engines that were started anew have
nothing but requests that were sent since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.messages import PathNode
from gateway.domain.principal import NUM_TENANT_LEVELS, FairNode


class EngineWeights:
    """What was sent for organizations and teams; keys and sessions have weights that never change.

    Args:
        tell: tells every engine that is up a node's weight.
    """

    def __init__(self, tell: Callable[[str, int], None]) -> None:
        self._tell = tell
        self._sent: dict[str, int] = {}  # and those read that were never sent: at most all there are

    def path(self, nodes: Sequence[FairNode]) -> list[PathNode]:
        """The path of a request that is sent now."""
        sent = self._sent
        path = [PathNode(node.id, sent.setdefault(node.id, node.weight)) for node in nodes[:NUM_TENANT_LEVELS]]
        path += [PathNode(node.id, node.weight) for node in nodes[NUM_TENANT_LEVELS:]]
        return path

    def read(self, weights: Mapping[str, int]) -> None:
        """These are the weights now; nodes that are not among them keep theirs."""
        sent = self._sent
        for node_id, weight in weights.items():
            before = sent.get(node_id)
            if before != weight:
                sent[node_id] = weight
                if before is not None:
                    self._tell(node_id, weight)
