"""The block pool against a slow model of it: a plain list of unheld blocks in the order of their use."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import IntegrityError
from engine.kv.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.references = [0] * num_blocks
        self.cached = [False] * num_blocks
        self.unheld = list(range(num_blocks))

    def _held(self) -> list[int]:
        return [b for b, count in enumerate(self.references) if count]

    @precondition(lambda self: self.unheld)
    @rule()
    def take(self) -> None:
        expected = self.unheld.pop(0)

        assert expected == self.pool.take()

        self.references[expected], self.cached[expected] = 1, False

    @precondition(lambda self: self._held() or any(self.cached))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(
            st.sampled_from([b for b in range(len(self.cached)) if self.references[b] or self.cached[b]])
        )
        self.pool.share(block_id)
        if not self.references[block_id]:
            self.unheld.remove(block_id)
        self.references[block_id] += 1

    @precondition(lambda self: self._held())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self._held()))
        self.pool.release(block_id)
        self.references[block_id] -= 1
        if not self.references[block_id]:
            self._put_back(block_id)

    @precondition(lambda self: self._held())
    @rule(data=st.data())
    def mark_cached(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self._held()))
        self.pool.mark_cached(block_id)
        self.cached[block_id] = True

    @precondition(lambda self: any(self.cached))
    @rule(data=st.data())
    def unmark_cached(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from([b for b, cached in enumerate(self.cached) if cached]))
        self.pool.unmark_cached(block_id)
        self.cached[block_id] = False
        if not self.references[block_id]:
            self.unheld.remove(block_id)
            self._put_back(block_id)

    def _put_back(self, block_id: int) -> None:
        self.unheld.insert(len(self.unheld) if self.cached[block_id] else 0, block_id)

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.references)
        num_cached = sum(self.cached[b] for b in self.unheld)
        assert num_cached == self.pool.num_cached
        assert len(self.unheld) - num_cached == self.pool.num_free
        assert len(self.unheld) == self.pool.num_available


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)


def test_check_finds_a_reference_that_nobody_holds() -> None:
    pool = BlockPool(4)
    pool.take()

    with pytest.raises(IntegrityError, match="reference counts"):
        pool.check([0, 0, 0, 0])


def test_check_finds_a_free_block_in_use() -> None:
    pool = BlockPool(4)
    block_id = pool.take()
    pool._link(block_id)

    with pytest.raises(IntegrityError):
        pool.check([1, 0, 0, 0])


def test_check_finds_a_broken_list() -> None:
    pool = BlockPool(4)
    pool._next[1] = 0

    with pytest.raises(IntegrityError, match="broken"):
        pool.check([0, 0, 0, 0])
