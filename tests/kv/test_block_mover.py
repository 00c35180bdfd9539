"""BlockMover: blocks arrive bit for bit, whatever the two meshes are, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from copies_fuzz import copies
from fake_runner import fake_runner

from deepinfer_jax.kv import block_mover as kv_transfer
from deepinfer_jax.kv.block_layout import BlockLayout
from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.kv.payload import BorrowedPayload
from deepinfer_jax.models.base import PagedCache


def rows(runner, kind):
    return {
        s.name: runner.caches[s.name]
        for s in runner.cache_specs
        if hasattr(s, "entry_shape") == (kind == "blocks")
    }


def pool_at(runner, name, layer, rank):
    pool = np.asarray(runner.caches[name][layer])
    return pool.reshape(runner.config.axes.dp, -1, *pool.shape[1:])[rank]


def check_move(source, target):
    a, b = fake_runner(**source, seed=1), fake_runner(**target, seed=2, num_blocks=20)
    before = {n: [x.copy() for x in layers] for n, layers in b.host.items()}
    send, receive = BlockMover(a, (2, 4)), BlockMover(b, (2, 4))
    assert send.describe() == receive.describe()
    cut = send.prepare_for(b.config.axes.tp)
    receive.prepare_for(a.config.axes.tp)
    src_rank, dst_rank = a.config.axes.dp - 1, b.config.axes.dp - 1
    for kind, ids, out_ids in (
        ("blocks", [7, 0, 11, 3, 5, 2, 8], [19, 4, 0, 1, 9, 3, 12]),
        ("states", [3, 1, 4], [1, 4, 2]),
    ):
        wanted = [ids if r == src_rank else [] for r in range(a.config.axes.dp)]
        payloads = send.gather(wanted, kind, cut)[src_rank]
        moved = [receive.receive(p, dst_rank) for p in payloads]
        at, items = 0, []
        for p in moved:
            p.wait()
            assert p.ready()
            items.append((p, out_ids[at : at + p.count]))
            at += p.count
        receive.scatter(items)
        for name in rows(b, kind):
            for layer, expected in enumerate(before[name]):
                expected[dst_rank][out_ids] = a.host[name][layer][src_rank][ids]
    for name, layers in before.items():
        for layer, expected in enumerate(layers):
            for rank in range(b.config.axes.dp):
                np.testing.assert_array_equal(
                    pool_at(b, name, layer, rank), expected[rank], err_msg=f"{name} {layer} {rank}"
                )


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (dict(), dict(first_device=1)),
        (dict(), dict()),  # both on one device
        (dict(dp=2), dict(dp=4, ep=2, first_device=2)),
        (dict(dp=4, ep=4), dict(dp=2, first_device=4)),
        (dict(tp=2), dict(first_device=2)),
        (dict(dp=2), dict(dp=2, tp=2, first_device=4)),
        (dict(tp=4), dict(tp=2, dp=2, first_device=4)),
    ],
)
def test_any_mesh_to_any_mesh(source, target):
    check_move(source, target)


@pytest.mark.parametrize(
    ("source", "target"), [(dict(), dict(first_device=1)), (dict(tp=2), dict(tp=4, first_device=4))]
)
def test_devices_with_memories_of_their_own(source, target, monkeypatch):
    """What runs on GPUs: their gather and scatter, and copies between devices."""
    monkeypatch.setattr(kv_transfer, "has_own_memory", lambda payload: True)
    init = BlockLayout.__init__
    monkeypatch.setattr(
        BlockLayout, "__init__", lambda self, *args, stacked: init(self, *args, stacked=False)
    )
    check_move(source, target)


@pytest.mark.parametrize(
    "target",
    [dict(first_device=1), dict(dp=2, first_device=1), dict(tp=2, first_device=1)],
    ids=str,
)
def test_between_cpu_devices_of_a_process_nothing_is_copied(target):
    a, b = fake_runner(seed=1), fake_runner(**target)
    send, receive = BlockMover(a, (4,)), BlockMover(b, (4,))
    (payload,) = send.gather([[7, 1, 3]], cut=send.prepare_for(b.config.axes.tp))[0]
    moved = receive.receive(payload, 0)
    sent = {x.unsafe_buffer_pointer() for x in payload.arrays()}
    assert (
        isinstance(moved, BorrowedPayload)
        and {x.unsafe_buffer_pointer() for x in moved.arrays()} == sent
    )
    for devices in receive._here(moved)["k"]:  # what the scatter's program is given
        for device, (x,) in zip(receive.device_row(0), devices, strict=True):
            if receive.mesh.size > 1:
                assert x.devices() == {device} and x.unsafe_buffer_pointer() in sent
            else:
                assert isinstance(x, np.ndarray) and x.ctypes.data in sent
    del payload, devices, x
    receive.scatter([(moved, [4, 0, 9])])
    del moved  # the memory lives on until it is read
    send.gather([[0, 0, 0]])
    for layer in range(2):
        np.testing.assert_array_equal(
            pool_at(b, "k", layer, 0)[[4, 0, 9]], a.host["k"][layer][0][[7, 1, 3]]
        )


def test_payloads_stay_in_the_cache():
    specs = (PagedCache("k", 4, (1, 2**18), jnp.float32),)  # 16 MB a block
    assert BlockMover(fake_runner(specs=specs, num_blocks=1), (1, 2, 4)).buckets == (1,)
    assert BlockMover(fake_runner(), (64, 4, 16)).buckets == (4, 16, 64)


def test_several_ranks_in_one_transfer():
    a, b = fake_runner(dp=2, seed=1), fake_runner(dp=2, first_device=2)
    send, receive = BlockMover(a, (4,)), BlockMover(b, (4,))
    (p0,), (p1,) = send.gather([[1, 2], [3, 4, 5]])
    first, second, third = receive.receive(p0, 1), receive.receive(p1, 0), receive.receive(p1, 1)
    receive.scatter(
        [(first, [0, 1]), (second, [6, -1, 8]), (third, [9, 10, 0])]
    )  # the last one overwrites block 0 of rank 1
    for layer in range(2):
        np.testing.assert_array_equal(
            pool_at(b, "k", layer, 0)[[6, 8]], a.host["k"][layer][1][[3, 5]]
        )
        assert not pool_at(b, "k", layer, 0)[[0, 7, 11]].any()
        np.testing.assert_array_equal(
            pool_at(b, "k", layer, 1)[[9, 10, 0]], a.host["k"][layer][1][[3, 4, 5]]
        )
        np.testing.assert_array_equal(pool_at(b, "k", layer, 1)[1], a.host["k"][layer][0][2])


def test_through_the_host():
    a, b = fake_runner(dp=2, tp=2, seed=1), fake_runner(tp=4, first_device=4)
    send, receive = BlockMover(a, (2, 4)), BlockMover(b, (2, 4))
    arrays = [send.to_host(p) for p in send.gather([[], [9, 1, 4, 6, 2]])[1]]
    whole = {n: np.concatenate([x[n] for x in arrays]) for n in arrays[0]}
    assert whole["k"].shape == (5, 2, 4, 4, 6) and whole["latent"].shape == (5, 3, 4, 1, 5)
    assert sum(x.nbytes for x in whole.values()) == 5 * send.block_bytes()
    payloads = receive.from_host(whole, 0)
    receive.scatter(list(zip(payloads, ([0, 3, 5, 7], [2]), strict=True)))
    for name in ("k", "latent"):
        for layer, values in enumerate(a.host[name]):
            np.testing.assert_array_equal(
                pool_at(b, name, layer, 0)[[0, 3, 5, 7, 2]], values[1][[9, 1, 4, 6, 2]]
            )
    with pytest.raises(ValueError, match=r"cache 'k': got float64"):
        receive.from_host({**whole, "k": whole["k"].astype(np.float64)}, 0)


def test_a_gather_reads_before_a_later_step_overwrites():
    a, b = fake_runner(seed=1), fake_runner(seed=3)
    mover, other = BlockMover(a, (4,)), BlockMover(b, (4,))
    foreign = other.gather([[0, 1, 2, 3]])[0][0]
    for _ in range(20):
        expected = [np.asarray(x)[[4, 5, 6, 7]] for x in a.caches["k"]]
        payload = mover.gather([[4, 5, 6, 7]])[0][0]
        mover.scatter(
            [(mover.receive(foreign, 0), [4, 5, 6, 7])]
        )  # donates the pools that the gather still reads
        got = mover.to_host(payload)
        for layer in range(2):
            np.testing.assert_array_equal(got["k"][:, layer], expected[layer])
        mover.scatter([(payload, [4, 5, 6, 7])])


def test_nothing_compiles_in_steady_state():
    a, b = fake_runner(seed=1), fake_runner(first_device=1)
    send, receive = BlockMover(a), BlockMover(b)
    for runner in (a, b):
        for key in runner.programs._lower:
            runner.programs.put(key, runner.programs.lower(key).compile())

    def move(count):
        for p in send.gather([list(range(count))])[0]:
            receive.scatter([(receive.receive(p, 0), list(range(p.count)))])

    move(1)
    with jax.log_compiles(False):
        for count in (1, 3, 4, 5, 12):
            move(count)
    assert a.programs.compiles == b.programs.compiles == 0


def test_refuses_what_cannot_be_cut():
    mover = BlockMover(fake_runner())
    with pytest.raises(ValueError, match="dimension of 4 cannot be cut into 8 pieces"):
        mover.prepare_for(8)


def test_many_in_flight_both_ways():
    assert copies(seed=0, moves=400) >= 400
