"""Prefix reuse: which leading blocks of a sequence already exist, and which of its own may be
reused by others.

Blocks become findable only once the step that wrote them has been processed. Contents are compared
token by token; image tokens carry the digest of their pixels; `cache_salt` keeps tenants apart. At
least the last token is always recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_jax.scheduler.block_manager import BlockManager
from deepinfer_jax.scheduler.sequence import Sequence


@dataclass(frozen=True)
class PrefixHit:
    blocks: np.ndarray  # i32 [pages], not pinned yet
    parent: int | str  # node of the last page, or the salt

    def num_tokens(self, block_size: int) -> int:
        return self.blocks.size * block_size


class PrefixCache:
    """Maps token pages of sequences to the block manager's content nodes."""

    def __init__(
        self, blocks: BlockManager, block_size: int, enabled: bool, restart: int = 0
    ) -> None:
        """restart: tokens; a hit must end at a multiple of it (0: at any block's end)."""
        self.blocks, self.block_size, self.enabled = blocks, block_size, enabled
        self.restart = restart or block_size

    def find(self, seq: Sequence) -> PrefixHit:
        """Longest cached prefix of `seq` in whole blocks, ending in front of its last token, inside
        no image and where the sequence can do without state of its own."""
        parent: int | str = seq.cache_salt
        found: list[int] = []
        parents: list[int | str] = [parent]
        if self.enabled and not seq.skip_prefix_cache:
            for page in range((seq.num_tokens - 1) // self.block_size):
                content = self._content(seq, page)
                hit = None if content is None else self.blocks.lookup(parent, content)
                if hit is None:
                    break
                block, parent = hit
                found.append(block)
                parents.append(parent)
        while found and not self._may_start_at(seq, len(found) * self.block_size):
            found.pop()
            parents.pop()
        return PrefixHit(np.array(found, np.int32), parents[-1])

    def _may_start_at(self, seq: Sequence, position: int) -> bool:
        return position % self.restart == 0 and seq.image_around(position) is None

    def take(self, seq: Sequence, hit: PrefixHit) -> None:
        """Pins a hit as the beginning of the sequence's block table."""
        self.blocks.pin(hit.blocks)
        seq.own_blocks = hit.blocks
        seq.cached_pages, seq.cache_parent = hit.blocks.size, hit.parent
        seq.num_prefilled = seq.num_scheduled = seq.hit_tokens = hit.num_tokens(self.block_size)

    def register(self, seq: Sequence) -> None:
        """Makes the sequence's computed whole blocks findable, as far as its chain of known
        contents goes."""
        if not self.enabled or seq.cached_pages < 0:
            return
        table = seq.block_ids
        for page in range(seq.cached_pages, min(seq.num_cached // self.block_size, table.size)):
            content = self._content(seq, page)
            node = (
                None
                if content is None
                else self.blocks.register(int(table[page]), seq.cache_parent, content)
            )
            if node is None:
                seq.cached_pages = -1  # the chain is broken: later pages have no known predecessor
                return
            seq.cached_pages, seq.cache_parent = page + 1, node

    def forget(self, seq: Sequence) -> None:
        """The sequence starts over."""
        seq.cached_pages, seq.cache_parent = 0, seq.cache_salt

    def _content(self, seq: Sequence, page: int) -> bytes | None:
        """What the block's KV depends on, beyond its predecessors; None if unknown (an image
        without a digest)."""
        start = page * self.block_size
        end = start + self.block_size
        content = seq.token_ids[start:end].tobytes()
        for span in seq.image_spans:
            if span.start < end and start < span.end:
                if not span.digest:
                    return None
                # length-prefixed and with its offset, so that no two different lists of images give
                # the same bytes
                content += b"%d:%d:" % (span.start - start, len(span.digest)) + span.digest
        return content
