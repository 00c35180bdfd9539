"""Random movements of blocks between real pools on any meshes, several in flight, against NumPy
arrays that do the same."""

from __future__ import annotations

import random

import numpy as np
from fake_runner import fake_runner

from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.models.base import PagedCache

PAIRS = [
    (dict(), dict(first_device=1)),
    (dict(), dict()),
    (dict(dp=2), dict(dp=4, ep=2, first_device=2)),
    (dict(tp=2), dict(dp=2, tp=4)),
]


class Side:
    def __init__(self, seed: int, mesh: dict) -> None:
        self.runner = fake_runner(**mesh, seed=seed)
        self.mover = BlockMover(self.runner, (1, 2, 4))
        self.dp = self.runner.config.axes.dp

    def names(self, kind: str) -> list[str]:
        return [
            s.name
            for s in self.runner.cache_specs
            if isinstance(s, PagedCache) == (kind == "blocks")
        ]

    def rows(self, kind: str) -> int:
        return self.runner.host[self.names(kind)[0]][0].shape[1]

    def check(self) -> None:
        for name, layers in self.runner.host.items():
            for layer, expected in enumerate(layers):
                got = np.asarray(self.runner.caches[name][layer]).reshape(expected.shape)
                np.testing.assert_array_equal(got, expected, err_msg=f"{name} {layer}")


def gather(rng: random.Random, source: Side, target: Side, cut: int) -> list[tuple]:
    """Payloads on their way, each with the values it must hold."""
    kind = rng.choice(["blocks", "blocks", "states"])
    ids = [
        rng.sample(range(source.rows(kind)), rng.randint(0, source.rows(kind)))
        for _ in range(source.dp)
    ]
    at, out = [0] * source.dp, []
    for rank, payload in source.mover.gathers(ids, kind, cut):
        mine = ids[rank][at[rank] : at[rank] + payload.count]
        at[rank] += payload.count
        values = {n: [x[rank][mine] for x in source.runner.host[n]] for n in source.names(kind)}
        out.append((target.mover.receive(payload, rng.randrange(target.dp)), values))
    assert at == [len(i) for i in ids]
    return out


def scatter(rng: random.Random, target: Side, moved: list[tuple]) -> None:
    items = []
    for payload, values in moved:
        ids = [
            i if rng.random() < 0.8 else -1
            for i in rng.sample(range(target.rows(payload.kind)), payload.count)
        ]
        items.append((payload, ids))
        live = [i for i, block in enumerate(ids) if block >= 0]
        for name, layers in values.items():
            for pool, rows in zip(target.runner.host[name], layers, strict=True):
                pool[payload.rank][[ids[i] for i in live]] = rows[live]
    target.mover.scatter(items)


def copies(seed: int, moves: int) -> int:
    """Runs about `moves` payloads over every pair of meshes; returns how many were moved. Raises
    where a pool differs."""
    rng, done = random.Random(seed), 0
    for meshes in PAIRS:
        sides = [Side(seed + i, mesh) for i, mesh in enumerate(meshes)]
        tp = [s.runner.config.axes.tp for s in sides]
        cuts = [s.mover.prepare_for(t) for s, t in zip(sides, tp[::-1], strict=True)]
        flying: list[list] = [[], []]
        end = done + moves // len(PAIRS)
        while done < end:
            way = rng.randrange(2)
            if rng.random() < 0.5:
                flying[way] += gather(rng, sides[way], sides[1 - way], cuts[way])
            elif flying[way]:
                count = rng.randint(1, len(flying[way]))
                chosen, flying[way] = flying[way][:count], flying[way][count:]
                scatter(rng, sides[1 - way], chosen)
                done += count
            if rng.random() < 0.02:
                for side in sides:
                    side.check()
        for side in sides:
            side.check()
    return done
