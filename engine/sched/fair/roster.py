"""Who is known to the policy and where each stands: seeking a row, resident, or parked while paused."""

from __future__ import annotations

from collections.abc import Iterable

from engine.request import Request, RequestState
from engine.sched.fair.claims import Claims
from engine.sched.fair.tree import Entry, Tree


class Roster:
    """Entries by request. Tree and claims are told of every change.

    Attributes:
        residents: in the order in which they got their rows.
        parked: with blocks and no row, those paused at their cap among them.
        new: rule R1, until `expire_new`.
    """

    def __init__(self, tree: Tree, claims: Claims) -> None:
        self.entries: dict[Request, Entry] = {}
        self.residents: dict[Entry, None] = {}
        self.parked: dict[Entry, None] = {}
        self.new: dict[Entry, None] = {}
        self._dormant: dict[Entry, None] = {}  # parked and paused
        self._tree = tree
        self._claims = claims

    def admit(self, request: Request, work_us: int, most_new_us: int, lead_us: int) -> None:
        """
        Args:
            work_us: until its next token.
            most_new_us: Θ.
            lead_us: Λ.
        """
        entry = self._tree.enter(request)
        self.entries[request] = entry
        may_be_new = not request.num_output_tokens and request.request_class != "batch"
        if may_be_new and self._tree.greet(entry, work_us, most_new_us, lead_us):
            self.new[entry] = None
        self._seek(entry)

    def forget(self, request: Request) -> None:
        entry = self.entries.pop(request)
        self._leave_place(entry)
        if entry.is_new:
            self.age(entry)
        self._tree.leave(entry)

    def preempted(self, request: Request) -> Entry:
        entry = self.entries[request]
        self._leave_place(entry)
        self._seek(entry)
        return entry

    def park(self, request: Request) -> Entry:
        entry = self.entries[request]
        self._leave_place(entry)
        self.parked[entry] = None
        if request.state is RequestState.PARKED:
            self._seek(entry)
        else:
            self._dormant[entry] = None
        return entry

    def seat(self, entry: Entry, step: int) -> None:
        self._tree.stop_seeking(entry)
        self._tree.take_row(entry)
        self._claims.seated(entry)
        self.parked.pop(entry, None)
        self.residents[entry] = None
        entry.seated_at = step

    def wake_resumed(self) -> None:
        """Parked requests whose cap has been raised in the meantime seek a row again."""
        for entry in [entry for entry in self._dormant if entry.request.state is RequestState.PARKED]:
            del self._dormant[entry]
            self._seek(entry)

    def expire_new(self, granted: Iterable[Entry], most_served_us: int) -> None:
        """Of those served, nobody is new after its first token, or after so much service."""
        for entry in granted:
            request = entry.request
            if entry.is_new and (request.num_known > request.num_prompt_tokens or entry.served_us > most_served_us):
                self.age(entry)

    def age(self, entry: Entry) -> None:
        """The request is new no more."""
        self._tree.ignore(entry)
        del self.new[entry]

    def _seek(self, entry: Entry) -> None:
        self._tree.seek(entry)
        self._claims.changed(entry.leaf)

    def _leave_place(self, entry: Entry) -> None:
        if entry.is_resident:
            self._tree.give_row(entry)
            del self.residents[entry]
            self._claims.changed(entry.leaf)
        if entry.is_seeking:
            self._tree.stop_seeking(entry)
        self.parked.pop(entry, None)
        self._dormant.pop(entry, None)
