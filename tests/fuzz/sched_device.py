"""A device that computes with integers what a model computes with floats, for tests of the
scheduler.

The KV of a token depends on the token, its position and the sum of all KV before it, read from the
pool through the block table; the next token depends on the sum of all keys. Any wrong block, slot,
length, clone or stale row changes the tokens, so comparing them with `next_token` of the plain
token list checks the whole chain.
"""

from __future__ import annotations

import numpy as np

_M = (1 << 64) - 1
VOCAB = 29
EOS, STOP = 0, 1


def mix(total: int, token: int, position: int) -> int:
    x = (
        (total ^ (token * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9
        + position * 0x94D049BB133111EB
        + 1
    ) & _M
    return x ^ (x >> 31)


def pick(total: int) -> int:
    return (mix(total, 77, 7) >> 20) % VOCAB


def continuation(tokens, start: int) -> list[int]:
    """[pick after tokens[:start], pick after tokens[:start + 1], ...]: what
    tokens[start:] must be."""
    total, picks = 0, []
    for position, token in enumerate(tokens):
        if position >= start:
            picks.append(pick(total))
        total = (total + mix(total, int(token), position)) & _M
    return picks


class FakeDevice:
    """KV pool, block table and decode state of one rank. A slot's block table is written when it is
    admitted, then kept by `block_updates` alone."""

    def __init__(self, config) -> None:
        self.config = config
        self.pool = np.full((config.num_blocks, config.block_size), 0xDEAD, np.uint64)
        self.table = np.zeros((config.max_num_seqs, config.max_pages), np.int64)
        self.pages = np.zeros(config.max_num_seqs, np.int64)
        self.length = np.zeros(config.max_num_seqs, np.int64)
        self.last = np.zeros(config.max_num_seqs, np.int64)
        self.state = np.full(max(1, config.num_state_slots), 0xBEEF, np.uint64)

    def run(self, out):
        """Runs one step; (token_ids [n, 1 + num_speculative_tokens], num_new [n])."""
        self._edit(out)
        if out.is_prefill:
            tokens = np.array([[self._prefill(item)] for item in out.prefill], np.int32).reshape(
                -1, 1
            )
            return tokens, np.ones(len(tokens), np.int32)
        tokens = np.full((out.slots.size, 1 + self.config.num_speculative_tokens), -7, np.int32)
        counts = np.zeros(out.slots.size, np.int32)
        seqs = out.seqs
        for row, (slot, q_len, kv_len) in enumerate(
            zip(out.slots.tolist(), out.q_lens.tolist(), out.kv_lens.tolist(), strict=True)
        ):
            made = self._decode(slot, q_len, kv_len, seqs[row])
            tokens[row, : len(made)], counts[row] = made, len(made)
        return tokens, counts

    def _edit(self, out) -> None:
        if out.clone_blocks:
            src, dst = np.array(out.clone_blocks).T
            assert len(set(dst.tolist())) == dst.size
            self.pool[dst] = self.pool[src].copy()
        if out.clone_states:
            src, dst = np.array(out.clone_states).T
            assert len(set(dst.tolist())) == dst.size
            self.state[dst] = self.state[src].copy()
        self.state[out.zero_states] = 0
        slots, pages, blocks = out.block_updates
        assert len({*zip(slots.tolist(), pages.tolist(), strict=True)}) == slots.size
        for seq in out.admitted:
            assert seq.slot not in slots
            self.pages[seq.slot] = seq.num_blocks
            self.table[seq.slot, : seq.num_blocks] = seq.block_ids
            self.length[seq.slot], self.last[seq.slot] = seq.num_tokens, seq.token_ids[-1]
        self.table[slots, pages] = blocks
        np.maximum.at(self.pages, slots, pages + 1)

    def _sum(self, blocks: np.ndarray, count: int) -> int:
        return int(self.pool[blocks].reshape(-1)[:count].sum(dtype=np.uint64)) if count else 0

    def _write(self, blocks: np.ndarray, position: int, value: int) -> None:
        self.pool[blocks[position // self.config.block_size], position % self.config.block_size] = (
            value
        )

    def _advance_state(self, seq, value: int) -> None:
        if seq.state_id >= 0:
            self.state[seq.state_id] = (int(self.state[seq.state_id]) + value) & _M

    def _seen(self, seq, total: int) -> int:
        """The token: from the keys, or, in a model with state, from the state, which must agree."""
        return pick(total if seq.state_id < 0 else int(self.state[seq.state_id]))

    def _prefill(self, item) -> int:
        seq, blocks = item.seq, item.seq.block_ids
        assert blocks.size * self.config.block_size >= item.kv_len
        total = self._sum(blocks, item.q_start)
        for position in range(item.q_start, item.kv_len):
            value = mix(total, int(seq.token_ids[position]), position)
            self._write(blocks, position, value)
            self._advance_state(seq, value)
            total = (total + value) & _M
        token = self._seen(seq, total)
        if item.is_last:
            self.length[seq.slot], self.last[seq.slot] = item.kv_len + 1, token
        return token

    def _decode(self, slot: int, q_len: int, kv_len: int, seq) -> list[int]:
        length, blocks = int(self.length[slot]), self.table[slot, : self.pages[slot]]
        true_kv = length - 1 + q_len
        assert true_kv <= kv_len <= self.config.runtime_max_model_len + 1, (seq, true_kv, kv_len)
        assert self.config.num_speculative_tokens or kv_len == true_kv, (seq, true_kv, kv_len)
        assert kv_len <= blocks.size * self.config.block_size, (seq, kv_len, blocks)
        total, token, made = self._sum(blocks, length - 1), int(self.last[slot]), []
        for j in range(q_len):
            value = mix(total, token, length - 1 + j)
            self._write(blocks, length - 1 + j, value)
            self._advance_state(seq, value)
            total = (total + value) & _M
            token = self._seen(seq, total)
            made.append(token)
            if (
                total % 3 == 0
            ):  # the next draft is rejected: its row and those behind it leave garbage
                for position in range(length + j, length - 1 + q_len):
                    self._write(blocks, position, 0xBAD)
                break
        self.length[slot], self.last[slot] = length + len(made), token
        return made
