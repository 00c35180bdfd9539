"""A deliberately naive scheduler, one page, written from the rules alone: lists, sums and loops,
everything recomputed at every step. NORMAL role, one rank, drafts, chunking, preemption,
zero-overhead scheduling off. It counts blocks, it has no block ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(eq=False)
class Naive:
    id: int
    prompt: int
    max_tokens: int
    stops: tuple
    tokens: list = field(default_factory=list)  # outputs
    kv: int = 0
    blocks: int = 0
    reason: str | None = None

    def __len__(self):
        return self.prompt + len(self.tokens)


class NaiveScheduler:
    def __init__(self, c):
        self.c, self.waiting, self.running, self.decode_step, self.admissions = c, [], [], 0, []

    def pages(self, n):
        return math.ceil(n / self.c.block_size)

    def free(self):
        return self.c.num_blocks - sum(s.blocks for s in self.waiting + self.running)

    def add(self, s):
        self.waiting.append(s)

    def schedule(self):
        self.running = [s for s in self.running if not s.reason]  # freed at once by the caller
        at_any = (
            self.decode_step != 0 and self.decode_step % self.c.prefill_any_attempt_interval == 0
        )
        if at_any or self.decode_step % self.c.prefill_attempt_interval == 0 or not self.running:
            full = 1 - self.free() / self.c.num_blocks > 0.9
            if self.waiting and not (full and self.running):
                chunks, ignored = self.prefill()
                if chunks or ignored:
                    self.decode_step = 0
                    return "prefill", chunks, ignored, []
        self.decode_step += 1
        return ("decode", *self.decode())

    def prefill(self):
        chunks, ignored, budget, sum_k = [], [], self.c.max_num_batched_tokens, 0
        while self.waiting and budget:
            s = self.waiting[0]
            if not s.blocks:
                too_long = len(s) > self.c.prompt_limit and not s.tokens
                if too_long or self.pages(len(s)) > self.c.num_blocks:
                    s.reason = (
                        "insufficient_system_resource"
                        if s.tokens and not too_long
                        else "prompt_length_exceeded"
                    )
                    ignored.append(self.waiting.pop(0))
                    continue
                if self.pages(len(s)) > self.free():
                    break
            if len(self.running) + 1 > self.c.max_num_seqs:
                break
            q = min(len(s) - s.kv, budget)
            if sum_k + s.kv + q > self.c.prefill_max_sum_seqlen_k or (
                s.kv + q < len(s) and not self.c.chunked_prefill
            ):
                break
            s.blocks = self.pages(len(s))
            chunks.append((s, s.kv, q))
            budget, sum_k, s.kv = budget - q, sum_k + s.kv + q, s.kv + q
            if s.kv < len(s):
                break  # NORMAL: one chunked sequence, which stays at the front
            self.running.append(self.waiting.pop(0))
            self.admissions.append(s)
        return chunks, ignored

    def decode(self):
        admitted = {id(s): i for i, s in enumerate(self.admissions)}
        queue = sorted(
            self.running, key=lambda s: (-len(s.tokens), -admitted[id(s)])
        )  # first to be preempted first
        rows, preempted = [], []
        while queue:
            s = queue.pop()
            drafts = min(
                self.c.num_speculative_tokens,
                min(s.prompt + s.max_tokens, self.c.max_model_len) - len(s) - 1,
            )
            need = self.pages(len(s) + drafts) - s.blocks
            while need > self.free() and queue:
                self.preempt(queue.pop(0), preempted)
            if need > self.free():
                self.preempt(s, preempted)
            else:
                s.blocks += max(need, 0)
                rows.append((s, 1 + drafts))
        return (
            sorted(rows, key=lambda row: -len(row[0])),
            [s for s in preempted if s.reason],
            preempted,
        )

    def preempt(self, s, preempted):
        s.blocks = s.kv = 0
        self.running.remove(s)
        preempted.append(s)
        if self.c.stop_preempted_request:
            s.reason = "insufficient_system_resource"
        else:
            self.waiting.insert(sum(1 for w in self.waiting if w.blocks), s)

    def commit(self, s, tokens):
        for token in tokens:
            if s.reason:
                break
            s.tokens.append(token)
            if token in s.stops:
                s.reason = "stop"
            elif len(s) >= max(s.prompt + 1, min(s.prompt + s.max_tokens, self.c.max_model_len)):
                s.reason = "length"
        s.kv = len(s) - 1
        if s.reason:
            s.blocks = 0
