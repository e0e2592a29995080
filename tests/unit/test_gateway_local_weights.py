"""What a gateway sends of weights: never an older one after a newer one, and every change of what it has sent."""

from __future__ import annotations

from local_backend_kit import ASSETS, INFO, FakeClient, FakeStream, request

from engine.messages import PathNode
from gateway.backends.local import LocalBackend
from gateway.backends.local_weights import EngineWeights
from gateway.domain.principal import FairNode


class Wire:
    """What was sent to the engines, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.weights = EngineWeights(lambda node_id, weight: self.told.append((node_id, weight)))

    def submit(self, team_weight: int) -> int:
        """The weight that a request of the team brings to an engine, having this one in its principal."""
        nodes = (FairNode("org:o", 1), FairNode("team:t", team_weight), FairNode("key:k", 1), FairNode("session:s", 1))
        path = self.weights.path(nodes)
        assert [node.id for node in path] == ["org:o", "team:t", "key:k", "session:s"]
        return path[1].weight


def test_a_change_is_told_once() -> None:
    wire = Wire()
    wire.weights.read({"org:o": 1, "team:t": 1})
    wire.weights.read({"org:o": 1, "team:t": 4})
    wire.weights.read({"org:o": 1, "team:t": 4})

    assert wire.told == [("team:t", 4)]


def test_the_first_reading_is_told_only_where_requests_have_said_something_else() -> None:
    """A process that has just begun, whose first requests have overtaken its first reading."""
    wire = Wire()
    assert wire.submit(1) == 1
    wire.weights.read({"org:o": 1, "team:t": 4, "team:other": 9})

    assert wire.told == [("team:t", 4)]


def test_a_request_with_an_old_principal_brings_the_weight_that_was_read_since() -> None:
    wire = Wire()
    assert wire.submit(1) == 1
    wire.weights.read({"org:o": 1, "team:t": 4})

    assert wire.submit(1) == 4


def test_a_request_with_a_newer_principal_does_not_hide_the_change_from_those_that_wait() -> None:
    wire = Wire()
    wire.weights.read({"org:o": 1, "team:t": 1})
    wire.submit(1)
    wire.submit(4)
    wire.weights.read({"org:o": 1, "team:t": 4})

    assert wire.told == [("team:t", 4)]


def test_a_team_that_is_new_brings_its_own_weight() -> None:
    wire = Wire()
    wire.weights.read({"org:o": 1})
    assert wire.submit(3) == 3
    wire.weights.read({"org:o": 1, "team:t": 3})

    assert wire.told == []


def test_keys_and_sessions_are_not_remembered() -> None:
    wire = Wire()
    for i in range(100):
        nodes = (FairNode("org:o", 1), FairNode("team:t", 1), FairNode(f"key:{i}", 1), FairNode(f"session:{i}", 1))
        wire.weights.path(nodes)

    assert set(wire.weights._sent) == {"org:o", "team:t"}


async def test_the_backend_sends_what_was_read_and_tells_the_client_of_changes() -> None:
    client = FakeClient(FakeStream(), FakeStream())
    backend = LocalBackend(client, {"m": ASSETS})
    (await backend.prepare(request())).start(INFO)
    backend.weights.read({"org:o1": 1, "team:t1": 8})
    (await backend.prepare(request())).start(INFO)

    assert client.weights == [("team:t1", 8)]
    first, second = (submit["path"] for submit in client.submits)
    assert first[:3] == [PathNode("org:o1", 1), PathNode("team:t1", 3), PathNode("key:k1", 1)]
    assert second[1] == PathNode("team:t1", 8)
