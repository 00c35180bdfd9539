"""BlockManager and StateManager: reference counts, prefix reuse, eviction, integrity."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer_jax.scheduler import BlockManager, StateManager


def test_allocation_takes_distinct_blocks_lowest_first():
    m = BlockManager(6)
    assert m.allocate(2).tolist() == [0, 1] and m.allocate(3).tolist() == [2, 3, 4]
    assert (m.num_free, m.num_used, m.usage) == (1, 5, 5 / 6)
    with pytest.raises(ValueError, match="2 blocks: 1 of 6"):
        m.allocate(2)
    m.check_integrity()


def test_shared_blocks_are_free_once_the_last_holder_leaves():
    m = BlockManager(4)
    blocks = m.allocate(2)
    m.pin(blocks)
    m.unpin(blocks)
    assert m.num_free == 2
    m.unpin(blocks)
    assert m.num_free == 4
    with pytest.raises(ValueError, match="more often"):
        m.unpin(blocks)
    with pytest.raises(ValueError, match="free"):
        m.pin(blocks)
    m.check_integrity()


def test_cached_block_is_found_again_and_survives_being_unheld():
    m = BlockManager(4)
    block = int(m.allocate(1)[0])
    node = m.register(block, "", b"abcd")
    m.unpin(np.array([block]))
    assert (m.num_free, m.num_cached, m.num_used) == (4, 1, 0)
    assert m.lookup("", b"abcd") == (block, node)
    assert m.lookup("tenant", b"abcd") is None and m.lookup("", b"abcx") is None
    m.pin(np.array([block]))
    assert (m.num_free, m.num_cached, m.num_used) == (3, 0, 1)
    m.check_integrity()


def test_same_content_after_another_prefix_is_another_block():
    m = BlockManager(4)
    a, b, c = m.allocate(3).tolist()
    first, second = m.register(a, "", b"a"), m.register(b, "", b"b")
    m.register(c, first, b"x")
    assert m.lookup(first, b"x")[0] == c and m.lookup(second, b"x") is None


def test_a_hash_collision_costs_a_hit_and_never_mixes_prefixes():
    m = BlockManager(4, hash_fn=lambda parent, content: 0)
    a, b = m.allocate(2).tolist()
    node = m.register(a, "", b"one")
    assert m.register(b, "", b"two") is None  # the bucket is taken
    assert (
        m.lookup("", b"two") is None
        and m.lookup(node, b"one") is None
        and m.lookup("", b"one") == (a, node)
    )
    m.unpin(np.array([a, b]))
    m.check_integrity()


def test_second_copy_of_a_known_content_continues_its_chain():
    m = BlockManager(4)
    a, b = m.allocate(2).tolist()
    assert m.register(a, "", b"one") == m.register(b, "", b"one")
    m.unpin(np.array([a, b]))
    assert m.num_cached == 1
    m.check_integrity()


def test_eviction_is_least_recently_used_and_last_page_first():
    m = BlockManager(4)
    first = m.allocate(2)
    root = m.register(int(first[0]), "", b"p0")
    m.register(int(first[1]), root, b"p1")
    second = m.allocate(1)
    m.register(int(second[0]), "", b"q0")
    m.unpin(first)
    m.unpin(second)
    m.allocate(2)  # one free block, one eviction: p1
    assert m.lookup("", b"p0") and m.lookup("", b"q0") and m.lookup(root, b"p1") is None
    m.pin(first[:1])
    m.unpin(first[:1])  # used again: now q0 is the oldest
    m.allocate(1)
    assert m.lookup("", b"p0") and m.lookup("", b"q0") is None
    m.check_integrity()


def test_overwritten_block_is_forgotten():
    m = BlockManager(2)
    block = int(m.allocate(1)[0])
    m.register(block, "", b"one")
    m.uncache(block)
    assert m.lookup("", b"one") is None
    m.unpin(np.array([block]))
    assert m.num_cached == 0
    m.check_integrity()


def test_drop_cache_only_when_nothing_is_used():
    m = BlockManager(2)
    block = m.allocate(1)
    m.register(int(block[0]), "", b"one")
    with pytest.raises(ValueError, match="1 blocks are in use"):
        m.drop_cache()
    m.unpin(block)
    m.drop_cache()
    assert m.num_cached == 0 and m.lookup("", b"one") is None
    m.check_integrity()


@pytest.mark.parametrize("damage", ["refs", "free", "entries"])
def test_check_integrity_sees_damage(damage):
    m = BlockManager(4)
    blocks = m.allocate(2)
    if damage == "refs":
        m.ref_counts[blocks[0]] = 0
    elif damage == "free":
        m._free[0] = blocks[0]
    else:
        m.register(int(blocks[0]), "", b"one")
        m._buckets.clear()
    with pytest.raises(AssertionError):
        m.check_integrity()
    with pytest.raises(AssertionError):
        BlockManager(4).check_integrity(np.array([1, 0, 0, 0]))


def test_state_rows_are_reference_counted_and_row_zero_is_padding():
    m = StateManager(3)
    rows = [m.allocate(), m.allocate()]
    assert sorted(rows) == [1, 2] and not m.has_room
    with pytest.raises(ValueError, match="all 2"):
        m.allocate()
    m.pin(rows[0])
    m.unpin(rows[0])
    m.check_integrity(rows)
    m.unpin(rows[0])
    with pytest.raises(ValueError, match="more often"):
        m.unpin(rows[0])
    with pytest.raises(ValueError, match="free"):
        m.pin(rows[0])
    with pytest.raises(AssertionError):
        m.check_integrity(rows)
    assert StateManager(0).allocate() == -1 and StateManager(0).has_room


class BlockMachine(RuleBasedStateMachine):
    """Random holders over a small pool; a dict of contents says what every cached block
    must hold."""

    @initialize(num_blocks=st.integers(1, 8), weak=st.booleans())
    def make(self, num_blocks, weak):
        self.m = BlockManager(
            num_blocks, (lambda parent, content: hash((parent, content)) % 3) if weak else None
        )
        self.held: list[list[int]] = []
        self.contents: dict[int, tuple] = {}  # node -> (parent, content)

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        if count > self.m.num_free:
            with pytest.raises(ValueError):
                self.m.allocate(count)
        else:
            self.held.append(self.m.allocate(count).tolist())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.sampled_from(self.held))
        self.m.pin(np.array(blocks, np.int32))
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.m.unpin(np.array(blocks, np.int32))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), text=st.lists(st.sampled_from([b"a", b"b"]), min_size=4, max_size=4))
    def register(self, data, text):
        parent = ""
        for block, content in zip(data.draw(st.sampled_from(self.held)), text, strict=False):
            node = self.m.register(block, parent, content)
            if node is None:
                break
            assert self.contents.setdefault(node, (parent, content)) == (parent, content)
            parent = node

    @rule(text=st.lists(st.sampled_from([b"a", b"b"]), max_size=4))
    def find(self, text):
        parent, found = "", []
        for content in text:
            hit = self.m.lookup(parent, content)
            if hit is None:
                break
            assert self.contents[hit[1]] == (parent, content)
            found.append(hit[0])
            parent = hit[1]
        if found and len(set(found)) == len(found):
            self.m.pin(np.array(found, np.int32))
            self.held.append(found)

    @invariant()
    def intact(self):
        if hasattr(self, "m"):
            expected = np.zeros(self.m.num_blocks, np.int32)
            for blocks in self.held:
                np.add.at(expected, blocks, 1)
            self.m.check_integrity(expected)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
