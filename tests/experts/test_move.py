"""Experts on the move: the program against NumPy's indexing, its memory and its plan."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.experts.move import move_layout, move_program, pack_move, piece_rows, plan_moves
from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers.placement import make_placement
from deepinfer_jax.runner.mesh import make_mesh

EXPERTS, PHYSICAL = 10, 16


def placements(seed: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    extra = lambda: rng.integers(0, EXPERTS, PHYSICAL - EXPERTS)  # noqa: E731
    return [rng.permutation(np.concatenate([np.arange(EXPERTS), extra()])) for _ in range(count)]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=50, deadline=None)
def test_a_plan_fills_every_slot_and_no_pair_of_ranks_sends_twice_in_a_turn(seed, ranks):
    old, new = placements(seed, 2)
    plan, share = plan_moves(old, new, ranks), PHYSICAL // ranks
    np.testing.assert_array_equal(old[plan.source], new)
    stays = old == new
    np.testing.assert_array_equal(plan.source[stays], np.flatnonzero(stays))
    origin, home = plan.source // share, np.arange(PHYSICAL) // share
    sent = [(o, h, t) for o, h, t in zip(origin, home, plan.turn, strict=True) if o != h]
    assert len(set(sent)) == len(sent)
    assert plan.turns == max((t + 1 for _, _, t in sent), default=0)
    for slot in np.flatnonzero(origin != home):  # what is at home is not sent for
        assert new[slot] not in old.reshape(ranks, share)[home[slot]]


def arrays_of(rng: np.random.Generator) -> list[np.ndarray]:
    """Weights, block scales and per-expert scales; entry [p] of each says which expert it is."""
    shapes = ((PHYSICAL, 24, 6), (PHYSICAL, 6, 12), (PHYSICAL, 3, 2), (PHYSICAL,))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(("replicas", "ep", "tp"), [(1, 8, 1), (2, 4, 1), (1, 4, 2), (1, 1, 1)])
def test_one_program_moves_experts_as_indexing_would(replicas, ep, tp):
    axes = ParallelAxes(dp=replicas * ep, ep=ep, tp=tp)
    mesh, rng = make_mesh(axes), np.random.default_rng(0)
    specs = (P("ep", "tp"), P("ep", None, "tp"), P("ep"), P("ep"))
    host = arrays_of(rng)
    held = [*placements(1, 4), *placements(1, 1)]
    first = np.zeros(EXPERTS, int)
    first[held[0]] = np.arange(PHYSICAL)
    experts = [a[first] for a in host]  # what each expert looks like
    arrays = tuple(
        jax.device_put(e[held[0]], NamedSharding(mesh, s))
        for e, s in zip(experts, specs, strict=True)
    )
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P()))  # noqa: E731
    packed = put(pack_move(plan_moves(held[0], held[0], ep), held[0], EXPERTS))
    program = move_program(arrays, specs, EXPERTS, mesh, axes).lower(arrays, packed).compile()
    for old, new in itertools.pairwise(held):
        before = arrays
        packed = put(pack_move(plan_moves(old, new, ep), new, EXPERTS))
        arrays, tables = program(arrays, packed)
        for array, expert, spec in zip(arrays, experts, specs, strict=True):
            np.testing.assert_array_equal(np.asarray(array), expert[new])
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
        for table, expected in zip(
            tables, vars(make_placement(new, EXPERTS)).values(), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(table), expected)
        assert all(a.is_deleted() for a in before)


@pytest.mark.parametrize(("ep", "share"), [(8, 5), (8, 34), (4, 72)])
def test_a_move_needs_less_memory_than_the_layers_experts(ep, share):
    axes = ParallelAxes(dp=ep, ep=ep)
    mesh = make_mesh(axes)
    physical, specs = ep * share, (P("ep"), P("ep"))
    shapes = [
        jax.ShapeDtypeStruct((physical, *s), jnp.bfloat16, sharding=NamedSharding(mesh, P("ep")))
        for s in ((256, 96), (96, 128))
    ]
    packed = jax.ShapeDtypeStruct(
        (move_layout(physical, physical).size,), jnp.int32, sharding=NamedSharding(mesh, P())
    )
    program = move_program(shapes, specs, physical, mesh, axes)
    memory = program.lower(tuple(shapes), packed).compile().memory_analysis()
    own = sum(x.size * 2 for x in shapes) // ep
    assert memory.alias_size_in_bytes >= own
    assert memory.temp_size_in_bytes <= own


def test_pieces_divide_and_shrink_with_ranks():
    assert piece_rows((5, 4096, 7168), 64) == 64
    assert piece_rows((32, 4096, 7168), 8) == 512
    assert piece_rows((1, 1), 1) == 1


def test_an_expert_that_is_nowhere_cannot_be_moved():
    with pytest.raises(ValueError, match="expert 3 has no slot"):
        plan_moves(np.array([0, 1, 2, 2]), np.array([0, 1, 2, 3]), 2)
    with pytest.raises(ValueError, match=r"experts without a physical slot: \[3\]"):
        pack_move(plan_moves(*[np.array([0, 1, 2, 2])] * 2, 2), np.array([0, 1, 2, 2]), 4)
