"""Engine snapshots: all live requests with their KV, written by Orbax while serving goes on, restored into any engine of the model.

    job = engine.snapshot(folder)          # fixes the state between two steps, copies and writes in a thread
    job.wait()                             # a snapshot exists from here on; a crash before leaves the previous one
    ids = other.restore(folder)            # another mesh, dp, ep, tp, pool size or role; other.step() goes on with the same tokens

What is copied: used blocks only (and those the prefix cache can find); see snapshot_copy.py for how, while steps go on.
The folder is an Orbax CheckpointManager with one step per snapshot, the two newest kept: items `arrays` (StandardSave) and `meta`
(JsonSave). Arrays and requests carry a CRC-32 each. The block size must be the same on both sides; block ids are not part of a snapshot.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from deepinfer_jax import snapshot_state
from deepinfer_jax.scheduler import resume
from deepinfer_jax.snapshot_copy import EngineCopy, Rows, dtype_of, row_shapes

if TYPE_CHECKING:
    from deepinfer_jax.disaggregate import DisaggregatedEngine
    from deepinfer_jax.engine import LLMEngine

logger = logging.getLogger(__name__)

KEPT = 2
WRITER_NICE = 10
_starting = threading.Lock()
_last: SnapshotJob | None = None  # this process's newest; each is written after the one before, so that numbers tell their order


class SnapshotError(ValueError):
    """A snapshot is missing or damaged; the message names its folder and what is wrong."""


@dataclass
class Snapshot:
    """arrays: {"blocks" | "states": {cache: [rows, layers, *entry]}}, whole entries whatever tp is."""

    meta: dict[str, Any]
    arrays: dict[str, dict[str, np.ndarray]]


@dataclass
class Capture:
    """A snapshot whose arrays are still in engines' pools; their rows follow each other in the snapshot's arrays."""

    meta: dict[str, Any]
    copies: list[EngineCopy]

    def to_host(self) -> Snapshot:
        """Copies while the engines step; not in a thread that others rely on to step them."""
        arrays = {}
        for kind in self.copies[0].mover.kinds:
            total = sum(len(c.rows[kind]) for c in self.copies)
            if total:
                arrays[kind] = {n: np.empty((total, *shape), d) for n, (shape, d) in row_shapes(self.copies[0].mover, kind).items()}
        at = dict.fromkeys(arrays, 0)
        for copy in self.copies:
            views = {k: {n: a[at[k] : at[k] + len(copy.rows[k])] for n, a in caches.items()} for k, caches in arrays.items()}
            copy.fill(views)
            at = {k: at[k] + len(copy.rows[k]) for k in at}
        return Snapshot(self.meta, arrays)


@dataclass
class SnapshotJob:
    """A snapshot being written.

    pause: seconds during which no step could run while the state was fixed, `drain` of them until the step in flight had ended
    (which the next step would have waited for, too). holds: seconds of each later slice of copying, one between two steps.
    """

    folder: Path
    pause: float = 0.0
    drain: float = 0.0
    holds: list[float] = field(default_factory=list)
    step: int | None = None
    nbytes: int = 0
    _captured: Capture | None = None
    _previous: SnapshotJob | None = None
    _error: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def hurry(self) -> None:
        """From now on copying may take as long as the steps do."""
        captured = self._captured
        for copy in captured.copies if captured is not None else ():
            copy.share = 1.0

    def wait(self, timeout: float | None = None) -> int:
        """The snapshot's number, once it is on disk. Raises what writing raised; TimeoutError."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"snapshot into {self.folder} is not written after {timeout} s")
        if self._error is not None:
            raise self._error
        return self.step


# ---- taking -------------------------------------------------------------------------------------------------------------------


def take(engine: LLMEngine, folder: str | Path) -> SnapshotJob:
    """Captures between two steps and starts copying and writing. ValueError for an engine of several processes."""
    if jax.process_count() > 1:
        raise ValueError(f"a snapshot covers one process, this engine's job has {jax.process_count()}")
    job = SnapshotJob(Path(folder).absolute())
    own = snapshot_state.layout(engine)
    engine.compile_copies()  # here, before any step has to wait for it

    def timed() -> Capture:
        start = time.perf_counter()
        engine.drain()
        job.drain = time.perf_counter() - start
        captured = capture(engine, own)
        job.pause = time.perf_counter() - start
        return captured

    return start_writing(job, engine.at_step_boundary(timed))


def start_writing(job: SnapshotJob, captured: Capture) -> SnapshotJob:
    global _last
    job._captured = captured
    with _starting:
        job._previous, _last = _last, job
    threading.Thread(target=_write_job, args=(job, captured), name="snapshot", daemon=True).start()
    return job


def capture(engine: LLMEngine, own_layout: dict[str, Any]) -> Capture:
    """Everything as of now; enqueues a few copies on the device, waits for the step in flight only. Under the engine's lock."""
    engine.drain()
    rows = {"blocks": Rows(), "states": Rows()}
    requests = [snapshot_state.record_request(engine, r, rows["blocks"], rows["states"]) for r in engine._requests.values()]
    prefix = [
        [rank, rows["blocks"].add(rank, page.block, changing=False), page.parent, page.content.hex(), page.node]
        for rank, s in enumerate(engine.schedulers)
        for page in resume.cached_pages(s.blocks)
    ]
    meta = {
        "layout": own_layout,
        "role": engine.config.role.name,
        "created": time.time(),
        "requests": requests,
        "outputs": [snapshot_state.record_output(o) for o in engine._undelivered],
        "prefix": prefix,
        "seeds": engine._seeds.bit_generator.state,
        "ranks": len(engine.schedulers),
    }
    return Capture(meta, [EngineCopy(engine, rows)])


def _write_job(job: SnapshotJob, captured: Capture) -> None:
    try:
        snapshot = captured.to_host()
        _lower_priority()
        if job._previous is not None:
            job._previous._done.wait()
        job.holds = [seconds for copy in captured.copies for seconds in copy.holds]
        job.nbytes = sum(a.nbytes for caches in snapshot.arrays.values() for a in caches.values())
        job.step = write(snapshot, job.folder)
    except Exception as error:
        logger.exception("snapshot into %s failed", job.folder)
        job._error = error
    finally:
        job._previous = job._captured = None  # the newest job is remembered, an engine must not be
        job._done.set()


def _lower_priority() -> None:
    """This thread, and those it starts, give way to the steps'."""
    if sys.platform == "linux":  # elsewhere the number of a thread means nothing to setpriority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICE)


# ---- files --------------------------------------------------------------------------------------------------------------------


def write(snapshot: Snapshot, folder: Path) -> int:
    """Writes one step of the folder's CheckpointManager; returns its number. Complete or not there."""
    import orbax.checkpoint as ocp  # takes seconds to import: only who snapshots pays

    arrays = {kind: dict(caches) for kind, caches in snapshot.arrays.items()}
    described = {k: {n: [list(a.shape), a.dtype.name, checksum(a)] for n, a in c.items()} for k, c in arrays.items()}
    text = json.dumps(snapshot.meta | {"arrays": described})
    with _manager(folder, max_to_keep=KEPT) as manager:
        step = (manager.latest_step() or 0) + 1
        items = {"meta": ocp.args.JsonSave({"text": text, "crc32": zlib.crc32(text.encode())})}
        if arrays:
            items["arrays"] = ocp.args.StandardSave(arrays)
        manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    return step


def load(folder: str | Path, step: int | None = None) -> Snapshot:
    """The newest complete snapshot of a folder, or number `step`. Raises SnapshotError if there is none or it is damaged."""
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise SnapshotError(f"{folder}: no such folder of snapshots")
    with _manager(folder, read_only=True) as manager:
        step = manager.latest_step() if step is None else step
        if step is None or step not in manager.all_steps():
            raise SnapshotError(f"{folder}: no complete snapshot{'' if step is None else f' {step}'}; there are {manager.all_steps()}")
        try:
            saved = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
            if zlib.crc32(saved["text"].encode()) != saved["crc32"]:
                raise SnapshotError("checksum of the requests differs")
            meta = json.loads(saved["text"])
            described = meta.pop("arrays")
            arrays: dict[str, dict[str, np.ndarray]] = {}
            if described:
                target = {k: {n: np.empty(shape, dtype_of(name)) for n, (shape, name, _) in c.items()} for k, c in described.items()}
                arrays = manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(target)))["arrays"]
        except Exception as error:  # tensorstore, zstd, JSON: each has exceptions of its own
            raise SnapshotError(f"{folder}: snapshot {step} is damaged: {type(error).__name__}: {error}") from error
    for kind, caches in arrays.items():
        for name, array in caches.items():
            if checksum(array) != described[kind][name][2]:
                raise SnapshotError(f"{folder}: snapshot {step} is damaged: checksum of {kind}/{name} differs")
    return Snapshot(meta, arrays)


def _manager(folder: Path, **options: Any) -> Any:
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False, **options))


def checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8))


# ---- SIGTERM ------------------------------------------------------------------------------------------------------------------


def snapshot_on_sigterm(engine: LLMEngine | DisaggregatedEngine, folder: str | Path) -> None:
    """From now on SIGTERM first takes a snapshot, then ends the process as it would have. Main thread only.

    Steps go on while the snapshot is written. jax.distributed's preemption service takes SIGTERM for itself: set
    jax_enable_preemption_service=False in such jobs.
    """
    previous = signal.getsignal(signal.SIGTERM)

    def save_and_exit() -> None:
        try:
            logger.warning("SIGTERM: taking a snapshot into %s", folder)
            job = engine.snapshot(folder)
            job.hurry()
            job.wait()
        except Exception:
            logger.exception("no snapshot could be taken")
        finally:
            finished.set()
            os.kill(os.getpid(), signal.SIGTERM)

    finished, started = threading.Event(), threading.Event()

    def handler(number: int, frame: Any) -> None:
        if finished.is_set():
            signal.signal(signal.SIGTERM, previous if previous is not None else signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif not started.is_set():
            started.set()
            threading.Thread(target=save_and_exit, name="snapshot-on-sigterm", daemon=False).start()

    signal.signal(signal.SIGTERM, handler)
