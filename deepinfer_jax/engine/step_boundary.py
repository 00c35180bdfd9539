"""What an engine does between steps with its state: calls at step boundaries, snapshots, the KV
store. Part of LLMEngine."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_jax.disagg.protocol import model_fingerprint
from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.models.resolve import resolve_model_path
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.runner.compile_watch import compile_watch
from deepinfer_jax.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from deepinfer_jax.engine.prefix_store import PrefixStore
    from deepinfer_jax.snapshot.job import SnapshotJob

COMMON_EVERY = 16
"""Steps between two votes of a job's processes on whether all want a call at a common step
boundary."""
LOADING_POLL = 0.002
"""Seconds an idle step waits for a prefix on its way from the KV store."""


class EngineStateMixin:
    """Mixed into LLMEngine, whose __init__ calls `init_state` first."""

    mover: BlockMover | None = None
    kv: PrefixStore | None = None
    """The engine's side of its KV store; None without one."""

    def init_state(self) -> None:
        self._undelivered: list[RequestOutput] = []  # made between steps, returned by the next one
        self._boundary: deque[tuple[Callable[[], Any], Future]] = (
            deque()
        )  # calls that wait for the end of a step
        self._stepping = False
        self._steps = 0  # taken; the same in all processes of a job
        self._common: deque[Callable[[int], None]] = (
            deque()
        )  # calls that wait for the other processes
        self._fingerprint: str | None = None

    # ---- step boundaries -------------------------------------------------------------------------

    def at_step_boundary(self, call: Callable[[], Any]) -> Any:
        """Runs call() while no step is going on, under the engine's lock, and returns its result;
        any thread.

        Raises what it raises; RuntimeError when called from within a step (a hook, an output
        callback).
        """
        task: Future = Future()
        self._boundary.append((call, task))
        while not task.done():
            if self._lock.acquire(
                timeout=0.01
            ):  # a loop of steps may never let go of it: then the next step makes the call
                try:
                    self._run_boundary()
                finally:
                    self._lock.release()
        return task.result()

    @property
    def spans_processes(self) -> bool:
        """This process has a part of the engine's ranks; others have the rest and take every step
        with it."""
        return len(self.schedulers) < self.config.axes.dp

    def at_common_boundary(self, call: Callable[[int], None]) -> None:
        """Has the stepping thread run call(key) between the same two steps in all processes of the
        job, once all have asked; key is the same in all and never comes twice. Any thread; returns
        at once. The n-th calls of all processes belong together."""
        self._common.append(call)

    def _run_common(self) -> None:
        ranks = len(self.schedulers)
        if self.dp_group.all_reduce_min([int(bool(self._common))] * ranks):
            key = self.dp_group.all_reduce_min([secrets.randbits(62)] * ranks)
            self._common.popleft()(key)

    def _before_step(self) -> None:
        self._run_boundary()
        self._steps += 1
        if self.spans_processes and self._steps % COMMON_EVERY == 0:
            self._run_common()

    def _run_boundary(self) -> None:
        while self._boundary:
            call, task = self._boundary.popleft()
            try:
                if self._stepping:
                    raise RuntimeError(f"{self.name}: not from within a step")
                task.set_result(call())
            except Exception as error:
                task.set_exception(error)

    def drain(self) -> None:
        """Reads the step in flight, if any; its outputs are returned by the next step()."""
        done, self._pending = self._pending, None
        self._undelivered += self.post_process(done)
        self._undelivered += self._outputs_outside_steps([])

    def _take_undelivered(self) -> list[RequestOutput]:
        outputs, self._undelivered = self._undelivered, []
        return outputs

    # ---- snapshots -------------------------------------------------------------------------------

    def ensure_mover(self) -> BlockMover:
        """The engine's BlockMover. Made here unless the role or the KV store has made it: then its
        programs are compiled now if warm-up is over."""
        if self.mover is None:
            self.mover = BlockMover(self.runner)
            if self.runner.programs.warm:
                self.compile_copies("")
        return self.mover

    def compile_copies(self, kind: str = "gather") -> None:
        """Compiles copy programs that are not compiled yet, so that no step has to wait for the
        compiler."""
        programs = self.runner.programs
        with compile_watch().expected():
            for key in [
                k
                for k in programs._registered
                if k.kind.startswith(kind) and k not in programs._compiled
            ]:
                programs.put(key, programs.lower(key).compile())

    def fingerprint(self) -> str:
        """Equal for equal checkpoints; computed once."""
        if self._fingerprint is None:
            self._fingerprint = model_fingerprint(resolve_model_path(self.args.model))
        return self._fingerprint

    def snapshot(self, path: str | Path) -> SnapshotJob:
        """Copies all live requests and their KV aside between two steps, then writes them into the
        folder `path` in a thread.

        Any thread, while others step. The job's `wait()` returns the snapshot's number once it is
        complete on disk; a crash before leaves the previous one. The two newest are kept. In a job
        of several processes each calls this, with a folder all can reach.
        """
        from deepinfer_jax.snapshot import job as snapshot

        return snapshot.take(self, path)

    def restore(self, path: str | Path, step: int | None = None) -> list[str]:
        """Adds the requests of a snapshot (default: the newest) to this engine; returns their ids.
        step() goes on with them.

        Mesh, dp, ep, tp, number of blocks and role may differ from where it was taken; model, block
        size and number formats may not. What does not fit into the pool is computed again. Raises
        SnapshotError, SnapshotMismatch, or ValueError naming a request; nothing has changed then.
        """
        from deepinfer_jax.snapshot import restore as snapshot_resume

        return snapshot_resume.restore(self, path, step)

    def snapshot_on_sigterm(self, path: str | Path) -> None:
        """From now on SIGTERM takes a snapshot into `path` before it ends the process. Main thread
        only."""
        from deepinfer_jax.snapshot import job as snapshot

        snapshot.snapshot_on_sigterm(self, path)

    def adopt_request(self, request: Request) -> None:
        """Takes over a restored request, whose sequences are queued already."""
        self._requests[request.request_id] = request
        for c in request.completions:
            self._completions[c.seq.request_id] = c
            if not c.finished:
                self._ranks[c.seq.request_id] = c.rank

    # ---- KV store --------------------------------------------------------------------------------

    def init_kv(self) -> None:
        """The KV store that the arguments ask for."""
        if self.args.kv_store is not None or self.args.kv_host_bytes:
            from deepinfer_jax.engine.prefix_store import PrefixStore

            self.ensure_mover()
            self.kv = PrefixStore.for_engine(self)

    def _enqueue(self, c: Completion) -> None:
        """Queues a new sequence, at once or when the KV store has brought the beginning of its
        prompt."""
        if self.kv is None or not self.kv.start_loading(c):
            self.schedulers[c.rank].add_request(c.seq)

    def _take_loaded(self) -> None:
        """Queues sequences whose stored prefix has arrived. With nothing else to do, waits a moment
        for one."""
        idle = self._pending is None and not any(s.has_unfinished() for s in self.schedulers)
        for c in self.kv.take_loaded(LOADING_POLL if idle else 0.0):
            s = self.schedulers[c.rank]
            if c.seq.is_finished:  # aborted meanwhile
                self.release_seq(c.seq)
            else:
                c.seq._enqueue_time = s.clock()
                s.waiting.append(c.seq)
                s.order.arrived(c.seq)

    def save_tails(self, finished: list[Sequence]) -> None:
        """Saves the KV of ended sequences, whose blocks are still theirs: their conversation's next
        turn starts from it."""
        if self.kv is not None and self.policy.does_decode:
            for seq in finished:
                self.kv.save(seq, self.rank_of(seq))
