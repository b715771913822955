"""What the machine code of a kernel asks of a GPU, by arithmetic: no GPU need be there.

Registers and shared memory say how many blocks a multiprocessor runs at once; that, how many bytes
are on their way to it, and how long it idles while the last programs end. The machine code says how
long the products of a warp wait for each other.
"""

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

# Products of matrix units, what is read from shared memory, other arithmetic: cycles until a result
# can be used, about. Loads count nothing: how long memory takes is another question.
LATENCIES = {"HMMA": 25, "DMMA": 25, "LDS": 25, "LDG": 0, "LDGSTS": 0}
OTHER_LATENCY = 5


@dataclass(frozen=True)
class Gpu:
    """A GPU and what one of its multiprocessors holds."""

    multiprocessors: int
    shared_bytes: int
    registers: int = 65536
    warps: int = 64
    blocks: int = 32

    def blocks_of(self, registers: int, shared_bytes: int, num_threads: int) -> int:
        """Blocks of a kernel that a multiprocessor runs at once.

        Args:
            registers: of a thread.
            shared_bytes: of a block, without the 1024 that the system keeps for itself.
        """
        # Registers are handed out to warps, 256 at a time.
        of_warp = -(-registers * 32 // 256) * 256
        num_warps = num_threads // 32
        return min(
            self.blocks,
            self.warps // num_warps,
            self.registers // of_warp // num_warps,
            self.shared_bytes // (shared_bytes + 1024),
        )


# A100, H100 or H200.
GPUS = {"sm_80": Gpu(108, 164 << 10), "sm_90": Gpu(132, 228 << 10)}


def program_sizes(num_chunks: int, num_programs: int) -> list[int]:
    """Chunks of each program: ProgramChunks of csrc/cuda, chunks_from of gram/triton_.py."""

    def left_from(program: int) -> int:
        left = num_chunks - num_programs
        for _ in range(3):
            left = left * (num_programs - program) // num_programs
        return left + num_programs - program

    return [left_from(p) - left_from(p + 1) for p in range(num_programs)]


def equal_sizes(num_chunks: int, num_programs: int) -> list[int]:
    """Chunks of each program where program p has chunks p, p + P, p + 2 P, ..."""
    return [len(range(p, num_chunks, num_programs)) for p in range(num_programs)]


def lost_at_the_end(sizes: Sequence[int], places: int) -> float:
    """The part of a GPU's time in which places are empty.

    `places` programs run at once, the next one starts where one ends, and each runs as fast as it
    would with all places taken: in truth the last ones run faster, so that this is the most that
    can be lost.
    """
    ends = [0] * places
    for size in sizes:
        heapq.heapreplace(ends, ends[0] + size)
    return 1 - sum(sizes) / (places * max(ends))


@dataclass
class Block:
    """Instructions that follow each other without a branch: (address, text)."""

    instructions: list[tuple[int, str]]

    def count(self, pattern: str) -> int:
        return sum(bool(re.match(pattern, _name(text))) for _, text in self.instructions)


def blocks_of_code(instructions: Sequence[tuple[int, str]]) -> list[Block]:
    """A kernel's machine code, as nvdisasm writes it, cut at branches and at what they lead to."""
    targets = {
        int(target, 16)
        for _, text in instructions
        for target in re.findall(r"\b(?:BRA|BSSY)\b.*?0x([0-9a-f]+)", text)
    }
    blocks: list[Block] = [Block([])]
    for address, text in instructions:
        if address in targets and blocks[-1].instructions:
            blocks.append(Block([]))
        blocks[-1].instructions.append((address, text))
        if re.search(r"\b(BRA|EXIT|RET)\b", text):
            blocks.append(Block([]))
    return [block for block in blocks if block.instructions]


def chain_cycles(instructions: Sequence[tuple[int, str]], products_of_a_step: int) -> int:
    """Cycles that one warp takes for the products of a step, with nobody beside it.

    The warp issues an instruction a cycle, in order, as soon as what it reads is there. Code that
    is there twice, for two kinds of chunks, counts by half.
    """
    blocks = [block for block in blocks_of_code(instructions) if block.count("HMMA|DMMA")]
    products = sum(block.count("HMMA|DMMA") for block in blocks)
    return sum(map(_cycles, blocks)) * products_of_a_step // products


def _cycles(block: Block) -> int:
    ready: dict[int, int] = {}
    now = 0
    for _, text in block.instructions:
        name = _name(text)
        written, read = _registers(name, text)
        now = max([now, *(ready.get(register, 0) for register in read)])
        latency = LATENCIES.get(name.split(".")[0], OTHER_LATENCY)
        ready |= dict.fromkeys(written, now + latency)
        now += 1
    return now


def _name(text: str) -> str:
    named = re.match(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
    return named[1] if named else ""


def _registers(name: str, text: str) -> tuple[list[int], list[int]]:
    """Registers that an instruction writes, and those that it reads."""
    operands = [
        [int(number) for number in re.findall(r"\bR(\d+)\b", operand)]
        for operand in re.split(r",(?![^\[]*\])", text.partition(name)[2])
    ]
    kind = name.split(".")[0]
    sizes = [1] * len(operands)
    if kind == "HMMA":
        sizes[:4] = 4, 4, 2, 4
    elif kind == "DMMA":
        sizes[:4] = 4, 2, 2, 4
    elif kind in ("LDG", "LDS"):
        sizes[0] = 4 if ".128" in name else 2 if ".64" in name else 1
    elif ".WIDE" in name or ".64" in name or kind in ("DADD", "DMUL", "DFMA"):
        sizes = [2] * len(operands)
    every = [
        [register + i for register in numbers for i in range(size)]
        for numbers, size in zip(operands, sizes, strict=True)
    ]
    writes_nothing = kind in ("BRA", "EXIT", "BAR", "DEPBAR", "STG", "STS", "LDGSTS")
    num_written = 0 if writes_nothing else 1
    return list(chain(*every[:num_written])), list(chain(*every[num_written:]))
