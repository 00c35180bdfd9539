"""Where a kernel's TMA copies touch shared memory: every address must be a multiple of 128.

`cp.async.bulk.tensor` demands that (PTX ISA, "Tensor copy restrictions"), and neither the compiler
nor the interpreter checks it. So the PTX is read: along every path the largest power of two that
surely divides each register.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

REQUIRED = 128
BASE = 1024
"""Alignment of a block's dynamic shared memory where the kernel has no other: it begins at an
address that hardware reserves 1 KiB before (Hopper tuning guide, "Unified shared memory")."""

_EXACT = 16  # exponent that stands for "a multiple of anything that matters"
_COPY = re.compile(r"cp(?:\.reduce)?\.async\.bulk\.tensor\.\S+")
_REGISTER = re.compile(r"%r[d]?\d+")


@dataclass(frozen=True)
class Copy:
    """One TMA copy. alignment: the largest power of two that surely divides its shared-memory
    address."""

    line: int
    stores: bool
    address: str
    alignment: int

    def __str__(self) -> str:
        kind = "store" if self.stores else "load"
        return (
            f"TMA {kind} at PTX line {self.line}: address {self.address} is a multiple of"
            f" {self.alignment} only"
        )


@dataclass(frozen=True)
class _Instruction:
    """label: the name of a place to branch to, and then nothing else."""

    line: int
    opcode: str = ""
    operands: tuple[str, ...] = ()
    predicated: bool = False
    label: str = ""


State = dict[str, int]
"""Register -> exponent of two that surely divides it; one that is absent has no value yet."""


def copies(ptx: str) -> list[Copy]:
    """All TMA copies of a module, in order. ValueError where shared memory is laid out in a way
    that this check does not know."""
    shared = re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)", ptx)
    if len(shared) > 1:
        raise ValueError(f"several shared-memory symbols: {', '.join(shared)}")
    blocks = _blocks(_instructions(ptx))
    symbols = dict.fromkeys(shared, BASE.bit_length() - 1)
    found = []
    for block, state in zip(blocks, _states(blocks, symbols), strict=True):
        for i in block.instructions:
            if _COPY.match(i.opcode):
                # a tensor's coordinates are in its own brackets: [tensor, {...}]
                plain = [o for o in i.operands if o.startswith("[") and "{" not in o]
                address = plain[0].strip("[] ")
                stores = ".global.shared" in i.opcode
                found.append(Copy(i.line, stores, address, 1 << _of_sum(address, state)))
            _step(i, state)
    return found


def misaligned(ptx: str) -> list[Copy]:
    """The copies whose shared-memory address is not surely a multiple of 128."""
    return [c for c in copies(ptx) if c.alignment < REQUIRED]


def _instructions(ptx: str) -> list[_Instruction]:
    """Those of the kernel's body. Inline assembly in braces branches only within them; what it
    writes counts as unknown, as an instruction called "asm"."""
    found: list[_Instruction] = []
    depth = 0
    for number, raw in enumerate(ptx.splitlines(), 1):
        text = re.sub(r"//.*", "", raw).strip().rstrip(";").strip()
        depth += (text == "{") - (text == "}")
        bare = re.sub(r"^@!?\S+\s+", "", text)
        opcode, *rest = bare.split(None, 1) or [""]
        operands = tuple(_split(rest[0])) if rest else ()
        if label := re.fullmatch(r"(\$\w+):", text):
            found.append(_Instruction(number, label=label[1]))
        elif depth > 1 and operands and not opcode.startswith(("bra", ".")):
            found.append(_Instruction(number, "asm", operands))
        elif depth == 1 and re.match(r"[a-z]", opcode):
            found.append(_Instruction(number, opcode, operands, predicated=bare != text))
    return found


@dataclass
class _Block:
    """Instructions without a branch into or out of them; after: indices of the blocks that may
    follow."""

    instructions: list[_Instruction]
    after: list[int]


def _blocks(instructions: list[_Instruction]) -> list[_Block]:
    blocks, labels = [_Block([], [])], {}
    for i in instructions:
        if i.label:
            labels[i.label] = len(blocks)
            blocks.append(_Block([], []))
            continue
        blocks[-1].instructions.append(i)
        if i.opcode.startswith(("bra", "ret", "exit", "trap", "brx")):
            blocks.append(_Block([], []))
    for index, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and last.opcode.startswith("brx"):
            raise ValueError(f"PTX line {last.line}: an indirect branch")
        if last is not None and last.opcode.startswith("bra"):
            block.after.append(labels[last.operands[0]])
        ends = last is not None and last.opcode.startswith(("bra", "ret", "exit", "trap"))
        if index + 1 < len(blocks) and (not ends or last.predicated):
            block.after.append(index + 1)
    return blocks


def _split(text: str) -> list[str]:
    """Operands, split at commas outside brackets and braces."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def _states(blocks: list[_Block], symbols: State) -> list[State]:
    """What is known at the start of each block, whatever way control came.

    The largest solution: a block starts without values and is lowered to what each block before it
    leaves, until nothing changes.
    """
    states: list[State] = [dict(symbols), *({} for _ in blocks[1:])]
    waiting = [0]
    reached = {0}
    while waiting:
        index = waiting.pop()
        state = dict(states[index])
        for i in blocks[index].instructions:
            _step(i, state)
        for after in blocks[index].after:
            before = states[after]
            merged = {r: min(e, before.get(r, e)) for r, e in state.items()} | {
                r: e for r, e in before.items() if r not in state
            }
            if merged != before or after not in reached:
                states[after] = merged
                reached.add(after)
                waiting.append(after)
    return states


def _step(i: _Instruction, state: State) -> None:
    """What is known after an instruction; one under a predicate may leave the old value."""
    if not i.operands:
        return
    for target in _REGISTER.findall(i.operands[0].split("|")[0].split("[")[0]):
        exponent = _result(i, state)
        state[target] = min(exponent, state.get(target, exponent)) if i.predicated else exponent


def _of(operand: str, known: State) -> int:
    if re.fullmatch(r"-?\d+", operand):
        value = int(operand)
        return _EXACT if value == 0 else min(_EXACT, (value & -value).bit_length() - 1)
    return known.get(operand, 0)


def _of_sum(operand: str, known: State) -> int:
    """Of an address operand: a register, or one and an offset."""
    return min(_of(part.strip(), known) for part in operand.split("+"))


def _result(i: _Instruction, known: State) -> int:
    """Exponent of two that divides what the instruction computes; 0 for those not listed."""
    name, exponents = i.opcode.split(".")[0], [_of(o, known) for o in i.operands[1:]]
    if i.operands[0].startswith("{"):
        return 0
    match name:
        case "mov" | "cvt" | "cvta" | "neg":
            return exponents[0] if _integer(i.opcode) else 0
        case "add" | "sub" | "or" | "xor" | "min" | "max" | "rem":
            return min(exponents) if _integer(i.opcode) else 0
        case "selp":
            return min(exponents[:2])
        case "and":
            return max(exponents)
        case "mul" | "mad" if ".lo" in i.opcode or ".wide" in i.opcode:
            product = min(_EXACT, exponents[0] + exponents[1])
            return product if name == "mul" else min(product, exponents[2])
        case "shl" | "shr" if i.operands[2].isdigit():
            by = int(i.operands[2])
            return min(_EXACT, exponents[0] + by) if name == "shl" else max(0, exponents[0] - by)
        case "shfl":
            return exponents[0]
    return 0


def _integer(opcode: str) -> bool:
    return not any(part.startswith(("f", "bf", "e4", "e5")) for part in opcode.split(".")[1:])
