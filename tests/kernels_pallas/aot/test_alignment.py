"""The check of TMA addresses, on PTX written for it: what it must refuse, and what it must see
through."""

from __future__ import annotations

import pytest

from deepinfer_jax.kernels_pallas.aot.alignment import copies, misaligned

LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"


def kernel(*lines: str) -> str:
    body = "\n".join(f"\t{line}" if line.endswith(":") else f"\t{line};" for line in lines)
    return f"""
.version 8.8
.target sm_90a
\t.shared .align 16 .b8 __dynamic_shmem__0;
.visible .entry f(.param .u64 p)
{{
\t.reg .b32 %r<9>;
\tmov.b64 \t%rd1, __dynamic_shmem__0;
{body}
\tret;
}}
"""


def alignments(*lines: str) -> list[int]:
    return [c.alignment for c in copies(kernel(*lines))]


def store_of_rows(row_bytes: int) -> list[int]:
    """Rows of shared memory stored from a row on that only the device knows."""
    return alignments(
        "ld.global.b32 \t%r1, [%rd9]",
        f"mul.wide.s32 \t%rd2, %r1, {row_bytes}",
        "add.s64 \t%rd3, %rd1, %rd2",
        "cvt.u32.u64 \t%r2, %rd3",
        f"@%p1 {STORE} [%rd8, {{%r3,%r4}} ], [%r2]",
    )


def test_rows_of_64_bytes_from_any_row_on_are_refused():
    assert store_of_rows(64) == [64]
    assert store_of_rows(128) == [128]


def test_what_the_store_of_swiglu_with_32_columns_became():
    """As compiled from a shared buffer [2, 64, 32] of bfloat16, stored from row `skip` on."""
    lines = (
        "ld.global.b32 \t%r19, [%rd9]",
        "shl.b32 \t%r254, %r19, 5",
        "cvt.u64.u32 \t%rd64, %r254",
        "mul.wide.s32 \t%rd6, %r18, 2048",
        "add.s64 \t%rd65, %rd6, %rd64",
        "shl.b64 \t%rd66, %rd65, 1",
        "add.s64 \t%rd67, %rd66, %rd1",
        "cvt.u32.u64 \t%r251, %rd67",
        f"@%p33 {STORE} [%rd63, {{%r252, %r253}} ], [%r251]",
    )
    (found,) = misaligned(kernel(*lines))
    assert found.stores and found.alignment == 64
    assert "address %r251 is a multiple of 64 only" in str(found)
    wider = [line.replace("%r19, 5", "%r19, 6") for line in lines]
    assert misaligned(kernel(*wider)) == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["and.b32 \t%r2, %r1, -256"], 256),
        (["shl.b32 \t%r3, %r1, 9", "shr.u32 \t%r2, %r3, 2"], 128),
        (["mad.lo.s32 \t%r2, %r1, 384, 512"], 128),
        (["sub.s32 \t%r2, 1024, 64"], 64),
        (["shl.b32 \t%r3, %r1, 8", "selp.b32 \t%r2, %r3, 128, %p1"], 128),
        (["shl.b32 \t%r3, %r1, 8", "shfl.sync.idx.b32 \t%r2|%p1, %r3, 0, 31, -1"], 256),
        (["div.s32 \t%r2, %r1, 128"], 1),
        (["mov.b32 \t%r2, 256", "@%p1 mov.b32 \t%r2, 32"], 32),
    ],
)
def test_arithmetic(lines, expected):
    assert alignments(
        "ld.global.b32 \t%r1, [%rd9]", *lines, f"{LOAD} [%r2], [%rd8, {{%r3}}], [%r4]"
    ) == [expected]


def loop(step: int, first: str = "mov.b64 \t%rd5, 0") -> list[int]:
    """A pointer that begins as a copy of a counter's first value and has steps of its own."""
    return alignments(
        first,
        "mov.b64 \t%rd6, %rd5",
        "$L__BB0_1:",
        "add.s64 \t%rd7, %rd1, %rd6",
        "cvt.u32.u64 \t%r2, %rd7",
        f"{LOAD} [%r2+1024], [%rd8, {{%r3}}], [%r4]",
        "add.s64 \t%rd5, %rd5, 1",
        f"add.s64 \t%rd6, %rd6, {step}",
        "@%p1 bra \t$L__BB0_1",
    )


def test_loops():
    assert loop(16384) == [1024]
    assert loop(192) == [64]
    assert loop(16384, "mov.b64 \t%rd5, 16") == [16]


def test_the_worst_of_two_ways_counts():
    way = [
        "mov.b32 \t%r2, 256",
        "@%p1 bra \t$L__BB0_1",
        "mov.b32 \t%r2, 64",
        "$L__BB0_1:",
        f"{LOAD} [%r2], [%rd8, {{%r3}}], [%r4]",
    ]
    assert alignments(*way) == [64]


def test_what_braces_of_inline_assembly_write_is_unknown():
    text = kernel("mov.b32 \t%r2, 256", "ASM", f"{LOAD} [%r2], [%rd8, {{%r3}}], [%r4]").replace(
        "\tASM;", "\t{\n\t.reg .pred P1;\n\tWAIT:\n\tadd.s32 %r2, %r2, 1;\n\t@P1 bra WAIT;\n\t}"
    )
    assert [c.alignment for c in copies(text)] == [1]


def test_shared_memory_of_several_symbols_is_not_judged():
    with pytest.raises(ValueError, match="several shared-memory symbols"):
        copies(kernel() + "\t.shared .align 4 .b8 other;\n")
