"""Optional orders of the waiting queue, beyond first come, first served: priority, fairness between
users, waiting time."""

from __future__ import annotations

from collections import deque

from deepinfer_jax.scheduler.config import SchedulerConfig
from deepinfer_jax.scheduler.sequence import Sequence


class WaitingOrder:
    """Sorts `waiting` before a prefill selection. Does nothing unless a policy is on.

    Those that were started already (chunks, forks, preempted) keep their place at the front. The
    rest is ordered by: waited longer than max_waiting_time; higher priority; the user served less;
    arrival. Fairness is start-time fair queueing over tokens: every waiting request gets a tag, its
    user's tokens served so far plus those of the user's earlier waiting requests; a returning user
    starts level with the least served active one, so that absence earns no credit.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._fair = config.fair_users
        self._priority = config.priority_scheduling
        self._max_wait = config.max_waiting_time
        self._served: dict[str, float] = {}
        self._open: dict[
            str, set[str | int]
        ] = {}  # user -> unfinished requests that came through `waiting`

    @property
    def enabled(self) -> bool:
        return self._fair or self._priority or self._max_wait is not None

    def arrived(self, seq: Sequence) -> None:
        if not self._fair:
            return
        if seq.user_id not in self._open:
            floor = min((self._served[user] for user in self._open), default=0.0)
            self._served[seq.user_id] = max(self._served.get(seq.user_id, 0.0), floor)
        self._open.setdefault(seq.user_id, set()).add(seq.request_id)

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        if self._fair:
            self._served[seq.user_id] = self._served.get(seq.user_id, 0.0) + num_tokens

    def ended(self, seq: Sequence) -> None:
        requests = self._open.get(seq.user_id)
        if requests is None or seq.request_id not in requests:
            return
        self.charge(seq, seq.num_output_tokens)
        requests.remove(seq.request_id)
        if not requests:
            del self._open[seq.user_id]
        # nobody is left to be fair to; also keeps the table from growing with every user ever seen
        if not self._open:
            self._served.clear()

    def sort(self, waiting: deque[Sequence], now: float) -> None:
        if not self.enabled or len(waiting) < 2:
            return
        started: list[Sequence] = []
        fresh: list[Sequence] = []
        for seq in waiting:
            (started if seq.num_blocks or seq.num_preemptions else fresh).append(seq)
        tags = self._tags(fresh)
        fresh.sort(key=lambda seq: self._key(seq, tags[id(seq)], now))
        waiting.clear()
        waiting.extend(started)
        waiting.extend(fresh)

    def _key(self, seq: Sequence, tag: float, now: float) -> tuple:
        overdue = self._max_wait is not None and now - seq.enqueue_time > self._max_wait
        if overdue:
            return (0, 0, 0.0, seq.enqueue_time)
        return (1, -seq.priority if self._priority else 0, tag, seq.enqueue_time)

    def _tags(self, fresh: list[Sequence]) -> dict[int, float]:
        if not self._fair:
            return {id(seq): 0.0 for seq in fresh}
        ahead = dict(self._served)
        tags = {}
        for seq in sorted(fresh, key=lambda seq: seq.enqueue_time):
            tags[id(seq)] = ahead.get(seq.user_id, 0.0)
            ahead[seq.user_id] = tags[id(seq)] + seq.num_tokens
        return tags
