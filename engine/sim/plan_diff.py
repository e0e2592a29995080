"""Two plans of one step, and who is meant by their rows: a difference that people can read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from zlib import crc32

import msgspec
from msgspec import structs

from engine.messages import Output, Submit
from engine.sched.plan import Chunk, NewRow, StepPlan


class Submissions:
    """Requests by what plans know of them.

    A plan names rows, and a new row brings its request's sampling parameters: the very object that was submitted. So
    each message gets one of its own.
    """

    def __init__(self) -> None:
        self._messages: dict[str, Submit] = {}
        self._id_of: dict[int, str] = {}  # by the identity of sampling parameters, which `_messages` keeps alive
        self._num_choices: dict[str, int] = {}  # that have not ended
        self._rows: dict[int, tuple[str, int]] = {}

    def add(self, message: Submit, seed: int | None) -> Submit:
        """The message to submit in place of this one.

        Args:
            seed: what was drawn for it if it has none.
        """
        sampling = message.sampling
        own = structs.replace(sampling, seed=seed if sampling.seed is None else sampling.seed)
        message = structs.replace(message, sampling=own)
        self._messages[message.request_id] = message
        self._id_of[id(own)] = message.request_id
        self._num_choices[message.request_id] = message.num_choices
        return message

    def planned(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._rows[new.row] = self.whose(new)

    def stepped(self, outputs: Iterable[Output]) -> None:
        """Forget who has ended."""
        for output in outputs:
            if output.finish is None:
                continue
            request_id = output.request_id
            self._num_choices[request_id] -= 1
            if not self._num_choices[request_id]:
                del self._num_choices[request_id]
                del self._id_of[id(self._messages.pop(request_id).sampling)]

    def whose(self, new: NewRow) -> tuple[str, int]:
        """Request id and choice of a row that this process has planned."""
        return self._id_of[id(new.sampling)], new.choice

    def name(self, row: int, new: NewRow | None) -> str:
        """For people; of a row as a plan finds it, or as it is made new by it."""
        if new is None:
            request_id, choice = self._rows.get(row, ("?", 0))
        else:
            request_id, choice = self._like(new), new.choice
        return f"{request_id} choice {choice}" if choice else request_id

    def _like(self, new: NewRow) -> str:
        """Of a row that was read from a file."""
        for message in self._messages.values():
            prompt = new.token_ids[: new.num_prompt_tokens]
            if message.sampling == new.sampling and tuple(message.token_ids) == prompt:
                return message.request_id
        return "?"


def diff(recorded: StepPlan | None, replayed: StepPlan | None, submissions: Submissions) -> str:
    """Told before the step is taken in; at least one is there."""
    before = list(_lines(recorded, submissions))
    after = list(_lines(replayed, submissions))
    lines = difflib.unified_diff(before, after, "recorded", "replayed", n=1, lineterm="")
    return "\n".join(["the plans differ", *lines])


def _lines(plan: StepPlan | None, submissions: Submissions) -> Iterator[str]:
    if plan is None:
        yield "no plan"
        return
    yield f"step {plan.step_id}: {len(plan.chunks)} rows, {plan.num_tokens} tokens"
    new_rows = {new.row: new for new in plan.new_rows}
    for new in plan.new_rows:
        yield f"row {new.row} becomes {submissions.name(new.row, new)}: {_about(new)}"
    for chunk in plan.chunks:
        yield f"row {chunk.row}, {submissions.name(chunk.row, new_rows.get(chunk.row))}: {_of(chunk)}"


def _about(new: NewRow) -> str:
    tokens = msgspec.json.encode(new.token_ids)
    sampling = msgspec.json.encode(new.sampling).decode()
    return (
        f"{new.num_prompt_tokens} prompt tokens, {len(new.token_ids) - new.num_prompt_tokens} of output "
        f"(checksum {crc32(tokens):08x}), {sampling}"
    )


def _of(chunk: Chunk) -> str:
    last = chunk.start + chunk.num_tokens - 1
    parts = [f"tokens {chunk.start} to {last}" if last > chunk.start else f"token {last}"]
    if chunk.new_block_ids:
        parts.append(f"new blocks {' '.join(map(str, chunk.new_block_ids))}")
    if chunk.samples:
        parts.append("samples")
    return ", ".join(parts)
