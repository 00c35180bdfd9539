"""Engine snapshots: all live requests with their KV, written by Orbax while serving goes on,
restored into any engine of the model.

    job = take(engine, folder)       # fixes the state between two steps; a thread copies and writes
    job.wait()                       # exists from here on; a crash before leaves the previous one
    ids = restore(other, folder)     # another mesh, dp, ep, tp, pool size or role;
                                     # other.step() goes on with the same tokens

What is copied: used blocks only (and those the prefix cache can find); see copy.py for how, while
steps go on. Files: files.py. The block size must be the same on both sides; block ids are not part
of a snapshot.

In a job of several processes every process calls `snapshot` with the same folder, which all can
reach; the state is that between the same two steps in all of them, and each writes its own ranks'
requests and blocks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import jax
import numpy as np

from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.snapshot import records
from deepinfer_jax.snapshot.copy import EngineCopy, Rows
from deepinfer_jax.snapshot.files import Share, Snapshot, write, write_share
from deepinfer_jax.snapshot.records import ExpertsRecord, PageRecord, SnapshotRecord

logger = logging.getLogger(__name__)

WRITER_NICE = 10
_starting = threading.Lock()
_last: SnapshotJob | None = (
    # this process's newest; each is written after the one before, so that numbers tell their order
    None
)


@dataclass
class Capture:
    """A snapshot whose arrays are still in engines' pools; their rows follow each other in the
    snapshot's arrays."""

    record: SnapshotRecord
    copies: list[EngineCopy]

    def to_host(self) -> Snapshot:
        """Copies while the engines step; not in a thread that others rely on to step them."""
        arrays = {}
        for kind in self.copies[0].mover.kinds:
            total = sum(len(c.rows[kind]) for c in self.copies)
            if total:
                arrays[kind] = {
                    n: np.empty((total, *shape), d)
                    for n, (shape, d) in self.copies[0].mover.row_shapes(kind).items()
                }
        at = dict.fromkeys(arrays, 0)
        for copy in self.copies:
            views = {
                k: {n: a[at[k] : at[k] + len(copy.rows[k])] for n, a in caches.items()}
                for k, caches in arrays.items()
            }
            copy.fill(views)
            at = {k: at[k] + len(copy.rows[k]) for k in at}
        return Snapshot(self.record, arrays)


@dataclass
class SnapshotJob:
    """A snapshot being written.

    pause: seconds during which no step could run while the state was fixed, `drain` of them until
    the step in flight had ended (which the next step would have waited for, too). holds: seconds of
    each later slice of copying, one between two steps.
    """

    folder: Path
    pause: float = 0.0
    drain: float = 0.0
    holds: list[float] = field(default_factory=list)
    step: int | None = None
    nbytes: int = 0
    _share: Share | None = None
    _hurried: bool = False
    _captured: Capture | None = None
    _previous: SnapshotJob | None = None
    _error: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def hurry(self) -> None:
        """From now on copying may take as long as the steps do."""
        self._hurried, captured = True, self._captured
        for copy in captured.copies if captured is not None else ():
            copy.share = 1.0

    def wait(self, timeout: float | None = None) -> int:
        """The snapshot's number, once it is on disk. Raises what writing raised; TimeoutError."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"snapshot into {self.folder} is not written after {timeout} s")
        if self._error is not None:
            raise self._error
        return self.step


# ---- taking --------------------------------------------------------------------------------------


def take(engine: LLMEngine, folder: str | Path) -> SnapshotJob:
    """Captures between two steps and starts copying and writing. In a job of several processes it
    returns at once: the moment comes within a few steps after all of them have asked."""
    job = SnapshotJob(Path(folder).absolute())
    engine.ensure_mover()
    engine.runner.compile_missing("gather")  # here, before any step has to wait for it

    def timed() -> Capture:
        start = time.perf_counter()
        engine.drain()
        job.drain = time.perf_counter() - start
        captured = capture(engine)
        job.pause = time.perf_counter() - start
        return captured

    def share(key: int) -> None:
        job._share = Share(key, jax.process_index(), jax.process_count())
        try:
            start_writing(job, timed())
        except Exception as error:  # the step that this is called from has nothing to do with it
            _end(job, error)

    if engine.boundary.spans_processes:
        engine.boundary.run_in_all_processes(share)
        return job
    return start_writing(job, engine.boundary.run(timed))


def start_writing(job: SnapshotJob, captured: Capture) -> SnapshotJob:
    global _last
    job._captured = captured
    if job._hurried:
        job.hurry()
    with _starting:
        job._previous, _last = _last, job
    threading.Thread(target=_write_job, args=(job, captured), name="snapshot", daemon=True).start()
    return job


def _end(job: SnapshotJob, error: Exception | None = None) -> None:
    if error is not None:
        logger.error("snapshot into %s failed", job.folder, exc_info=error)
        job._error = error
    job._previous = job._captured = None  # the newest job is remembered, an engine must not be
    job._done.set()


def capture(engine: LLMEngine) -> Capture:
    """Everything as of now; enqueues a few copies on the device, waits for the step in flight only.
    Under the engine's lock."""
    engine.drain()
    rows = {"blocks": Rows(), "states": Rows()}
    requests = [
        records.record_request(engine, r, rows["blocks"], rows["states"])
        for r in engine.live.requests.values()
    ]
    record = SnapshotRecord(
        identity=engine.kv_identity(),
        role=engine.config.role.name,
        created=time.time(),
        requests=requests,
        outputs=[records.record_output(o) for o in engine.boundary.undelivered],
        prefix=_record_prefix(engine, rows["blocks"]),
        seeds=engine.seeds.state,
        ranks=len(engine.schedulers),
        experts=None if engine.experts is None else ExpertsRecord.of(engine.experts.record()),
    )
    return Capture(record, [EngineCopy(engine, rows)])


def _record_prefix(engine: LLMEngine, rows: Rows) -> list[PageRecord]:
    return [
        PageRecord(
            rank,
            rows.add(rank, page.block, changing=False),
            page.parent,
            page.content.hex(),
            page.node,
        )
        for rank, s in enumerate(engine.schedulers)
        for page in s.blocks.cached_pages()
    ]


def _write_job(job: SnapshotJob, captured: Capture) -> None:
    try:
        snapshot = captured.to_host()
        job.holds = [seconds for copy in captured.copies for seconds in copy.holds]
        job.nbytes = snapshot.nbytes
        _lower_priority()
        if job._previous is not None:
            job._previous._done.wait()
        job.step = (
            write(snapshot, job.folder)
            if job._share is None
            else write_share(snapshot, job.folder, job._share)
        )
    except Exception as error:
        _end(job, error)
    else:
        _end(job)


def _lower_priority() -> None:
    """This thread, and those it starts, give way to the steps'."""
    if sys.platform == "linux":  # elsewhere the number of a thread means nothing to setpriority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICE)


# ---- SIGTERM -------------------------------------------------------------------------------------


def snapshot_on_sigterm(take: Callable[[str | Path], SnapshotJob], folder: str | Path) -> None:
    """From now on SIGTERM first calls take(folder), then ends the process as it would have. Main
    thread only.

    Steps go on while the snapshot is written. jax.distributed's preemption service takes SIGTERM
    for itself: set jax_enable_preemption_service=False in such jobs.
    """
    previous = signal.getsignal(signal.SIGTERM)

    def save_and_exit() -> None:
        try:
            logger.warning("SIGTERM: taking a snapshot into %s", folder)
            job = take(folder)
            job.hurry()
            job.wait()
        except Exception:
            logger.exception("no snapshot could be taken")
        finally:
            finished.set()
            os.kill(os.getpid(), signal.SIGTERM)

    finished, started = threading.Event(), threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        if finished.is_set():
            signal.signal(signal.SIGTERM, previous if previous is not None else signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif not started.is_set():
            started.set()
            threading.Thread(target=save_and_exit, name="snapshot-on-sigterm", daemon=False).start()

    signal.signal(signal.SIGTERM, handler)
