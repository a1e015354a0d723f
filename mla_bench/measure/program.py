"""A compiled program as its text has it: computations, loops, and the compiler's own cycle estimates.

Reads the text of XLA's HLO, of `compiled.as_text()` or of XProf's graph viewer. Standard library only.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

# What the TPU compiler writes where it has no estimate is near 2⁶³.
_SENTINEL = 2**60

# What takes no time of its own: names for a part of memory, and copies that go on beside the schedule.
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id",
    "replica-id", "opt-barrier", "copy-start", "copy-done", "slice-start", "slice-done", "async-done",
    "async-update",
}  # fmt: skip
_ALLOCATES = 'custom_call_target="AllocateBuffer"'
# Below it an instruction that the compiler has no estimate for is a loop counter, not work.
_SMALL_BYTES = 4096

_ITEM_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
    "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
    r"\b(condition|body|calls|to_apply|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: its result's shape with layout, what it does, to what, and the rest."""

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Computations that it calls, by what for."""
        found = _CALLED.findall(self.attributes)
        return {role: tuple(re.findall(r"[\w.\-]+", names)) for role, names in found}

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Instructions whose results it takes."""
        # A shape may stand before each name, and comments within it.
        bare = re.sub(r"/\*.*?\*/|\{[^{}]*\}|\[[^\[\]]*\]", "", self.operands)
        return tuple(part.split()[-1].lstrip("%") for part in bare.split(",") if part.split())

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate; None where it has none, a sentinel included."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found and int(found[1]) < _SENTINEL else None

    @property
    def is_sentinel(self) -> bool:
        """Whether a number stands there that says that there is no estimate."""
        found = _CYCLES.search(self.attributes)
        return bool(found) and int(found[1]) >= _SENTINEL


@dataclass(frozen=True)
class Program:
    """Computations by name, each in its order of execution, and which of them the program begins with."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str


@dataclass(frozen=True)
class Cycles:
    """The compiler's estimates over a program's schedule, loops multiplied by their trip counts.

    Attributes:
      total: cycles of all instructions that have an estimate.
      missing: instructions without one, each counted once; a sort is the usual one.
      missing_bytes: what these read and write, as often as they run: their time is this over bandwidth.
      endless: loops whose trip count is not known, counted as one turn.
    """

    total: int = 0
    missing: frozenset[str] = frozenset()
    missing_bytes: int = 0
    endless: frozenset[str] = frozenset()

    def __add__(self, other: "Cycles") -> "Cycles":
        return Cycles(
            self.total + other.total,
            self.missing | other.missing,
            self.missing_bytes + other.missing_bytes,
            self.endless | other.endless,
        )

    def times(self, turns: int) -> "Cycles":
        """Of `turns` turns."""
        return Cycles(self.total * turns, self.missing, self.missing_bytes * turns, self.endless)


def parse_program(text: str) -> Program:
    """The program in the `text` of an HLO module.

    Raises:
      ValueError: there is no entry computation in it.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if (header := _HEADER.match(line)) and not line.startswith("HloModule"):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found[1], found[2]))
    if not entry:
        raise ValueError("this text is no HLO module: it has no ENTRY computation")
    return Program({name: tuple(lines) for name, lines in computations.items()}, entry)


def estimated_cycles(program: Program) -> Cycles:
    """The compiler's cycle estimates of `program`, of a conditional those of the branch with most."""
    return _cost(program, program.entry)


def instructions_in_loops(program: Program) -> frozenset[str]:
    """Names of the instructions that a loop runs, at any depth, those of fusions left out."""
    found: set[str] = set()
    reached: set[str] = set()

    def collect(computation: str) -> None:
        if computation in reached:
            return
        reached.add(computation)
        for instruction in program.computations.get(computation, ()):
            found.add(instruction.name)
            for inner in _entered(instruction):
                collect(inner)

    for computation in program.computations.values():
        for instruction in computation:
            if instruction.opcode == "while":
                for name in (*instruction.called.get("body", ()), *instruction.called.get("condition", ())):
                    collect(name)
    return frozenset(found)


def shape_bytes(shape: str) -> int:
    """Bytes of the elements of `shape`, a tuple's together, without padding; 0 for a token."""
    return sum(
        math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
        for kind, sizes in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape))
        if (bits := _bits(kind))
    )


def trip_count(program: Program, loop: Instruction) -> int | None:
    """How often a `while` runs: what the compiler noted, or else the bound in its condition.

    A loop of `jax.lax.scan` counts up from 0 by 1 to a constant, and that constant stands in its condition.
    None where there is no note, and not one such constant.
    """
    if noted := _TRIPS.search(loop.attributes):
        return int(noted[1])
    bounds = set(_bounds(program, loop.called["condition"][0])) if "condition" in loop.called else set()
    return bounds.pop() if len(bounds) == 1 else None


def _bounds(program: Program, computation: str) -> Iterator[int]:
    """Whole numbers that a condition compares with, wherever a fusion may have taken the comparison."""
    for instruction in program.computations.get(computation, ()):
        whole = instruction.shape.startswith(("s32[]", "u32[]", "s64[]"))
        if instruction.opcode == "constant" and whole and instruction.operands.lstrip("-").isdigit():
            yield int(instruction.operands)
        for name in instruction.called.get("calls", ()):
            yield from _bounds(program, name)


def _cost(program: Program, computation: str) -> Cycles:
    total, lines = Cycles(), program.computations.get(computation, ())
    shapes = {line.name: line.shape for line in lines}
    for line in lines:
        if line.opcode == "while":
            trips = trip_count(program, line)
            turn = sum((_cost(program, name) for name in _entered(line)), Cycles())
            endless = frozenset() if trips is not None else frozenset({line.name})
            total += turn.times(1 if trips is None else trips) + Cycles(endless=endless)
        elif line.opcode == "conditional":
            total += max((_cost(program, name) for name in _entered(line)), key=lambda cost: cost.total)
        elif line.cycles is not None:
            total += Cycles(line.cycles)
        elif inner := tuple(_entered(line)):
            total += sum((_cost(program, name) for name in inner), Cycles())
        elif not (line.opcode in _FREE or _ALLOCATES in line.attributes):
            moved = shape_bytes(line.shape) + sum(
                shape_bytes(shapes.get(name, "")) for name in line.operand_names
            )
            if line.is_sentinel or moved >= _SMALL_BYTES:
                total += Cycles(missing=frozenset({line.name}), missing_bytes=moved)
    return total


def _entered(line: Instruction) -> Iterator[str]:
    """Computations whose instructions run one by one when `line` does, unlike those of a fusion."""
    roles = {"fusion": (), "while": ("body", "condition")}.get(line.opcode)
    for role, names in line.called.items():
        # What a reduction or a sort applies is a part of it; what a call or an async start does is not.
        applied = role == "to_apply" and line.opcode != "call"
        if (roles is None and not applied) or (roles and role in roles):
            yield from names


def _instruction(name: str, rest: str) -> Instruction:
    """From `shape opcode(operands), attributes`."""
    shape, rest = _split(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, _, rest = rest.strip().partition("(")
    operands, attributes = _split(f"({rest}")
    return Instruction(name, shape, opcode, operands[1:-1], attributes.lstrip(", "))


def _split(text: str) -> tuple[str, str]:
    """The first parenthesis of `text` with all that it holds, and what follows it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: place + 1], text[place + 1 :]
    return text, ""


def _bits(kind: str) -> int:
    return _ITEM_BITS.get(kind, 8 if kind.startswith("f8") else 0)
