"""The mesh of one role's job, and how host arrays reach it.

Mesh axes are (replica, ep, tp); a DP rank is a (replica, ep) pair, ranks are numbered
replica-major. Every per-rank array (caches, decode state, step inputs) has its rank dimension
folded into dimension 0, which is split over (replica, ep).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.runner.gpu_settings import reserve_memory


def make_mesh(axes: ParallelAxes, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A (dp // ep, ep, tp) mesh over the first dp * tp of `devices` (default: all). ValueError if
    there are too few."""
    need = axes.dp * axes.tp
    if devices is None:
        reserve_memory()
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < need:
        raise ValueError(
            f"dp={axes.dp} x tp={axes.tp} needs {need} devices, only {len(devices)} given"
        )
    grid = np.array(devices[:need]).reshape(axes.dp // axes.ep, axes.ep, axes.tp)
    return Mesh(
        grid, (axes.replica_axis, axes.ep_axis, axes.tp_axis), axis_types=(AxisType.Auto,) * 3
    )


def rank_spec(axes: ParallelAxes, *rest: str | None) -> P:
    """PartitionSpec of an array whose dimension 0 is split over the DP ranks."""
    return P(axes.dp_axes, *rest)


class RankPlacement:
    """Which DP ranks this process owns, and transfers of their data to and from the mesh."""

    def __init__(self, mesh: Mesh, axes: ParallelAxes) -> None:
        self.mesh, self.axes = mesh, axes
        self.sharding = NamedSharding(mesh, rank_spec(axes))
        process = jax.process_index()
        owners = mesh.devices.reshape(axes.dp, axes.tp)[:, 0]
        self.owners = [d.process_index for d in owners]  # of every rank
        self.local_ranks = tuple(r for r, owner in enumerate(self.owners) if owner == process)
        self._single_process = len(self.local_ranks) == axes.dp

    def put(self, rows: np.ndarray) -> jax.Array:
        """Host rows of the local ranks, concatenated in rank order -> one global array split over
        the ranks."""
        if self._single_process:
            return jax.device_put(rows, self.sharding)
        return jax.make_array_from_process_local_data(self.sharding, rows)

    def fetch(self, array: jax.Array) -> np.ndarray:
        """The local ranks' rows of `array`, concatenated in rank order; waits for the device."""
        if self._single_process:
            return np.asarray(array)
        rows = {s.index[0].start or 0: s.data for s in array.addressable_shards}
        return np.concatenate([np.asarray(rows[start]) for start in sorted(rows)])
