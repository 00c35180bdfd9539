"""LLMEngine as users import it: the engine, and snapshots of what it is doing.

Imports: engine, snapshot, config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepinfer_jax.config import EngineArgs
from deepinfer_jax.engine import llm_engine
from deepinfer_jax.snapshot import job, restore


class LLMEngine(llm_engine.LLMEngine):
    """See `engine.llm_engine.LLMEngine`; this one also saves and takes over live requests."""

    def __init__(self, args: EngineArgs, **options: Any) -> None:
        """options: see `engine.llm_engine.LLMEngine`."""
        super().__init__(args, **options)
        if args.snapshot_on_sigterm is not None:
            job.snapshot_on_sigterm(self.snapshot, args.snapshot_on_sigterm)

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
