"""LLMEngine as users import it: the engine, and snapshots of what it is doing.

Imports: engine, snapshot.
"""

from __future__ import annotations

from pathlib import Path

from deepinfer_jax.engine import llm_engine
from deepinfer_jax.snapshot import job, restore


class LLMEngine(llm_engine.LLMEngine):
    """See `engine.llm_engine.LLMEngine`; this one also saves and takes over live requests."""

    def snapshot(self, path: str | Path) -> job.SnapshotJob:
        """Saves all live requests with their KV while steps go on, from any thread; `.wait()`
        returns once the snapshot is complete on disk. See `snapshot.job.take`."""
        return job.take(self, path)

    def restore(self, path: str | Path, step: int | None = None) -> list[str]:
        """Takes over the requests of the newest snapshot of a folder, or of number `step`; their
        ids, in order of arrival.

        Raises SnapshotError (nothing there, damaged), SnapshotMismatch (another model or layout),
        ValueError (an id is in use, a request does not fit). Then nothing has changed.
        """
        return restore.restore(self, path, step)
