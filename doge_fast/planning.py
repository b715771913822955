"""`doge-fast plan`: the formulas of `doge_fast.scale` for a model, domains and GPUs.

Predictions from data sheets. Nothing of it has run on these machines: of the formulas the tests
hold memory and bytes against what is allocated and sent; times are these over assumed shares of the
peaks, with nothing hidden behind anything else.
"""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from doge_fast import scale
from doge_fast.pipeline import tables
from doge_fast.pipeline.config import PlanConfig
from doge_fast.pipeline.config.ranges import check as check_ranges
from doge_fast.pipeline.sizes import SIZES, num_parameters


class Gpu(NamedTuple):
    """Peaks of a GPU; of links one direction, for each GPU."""

    memory: float
    bfloat16_flops: float
    """Dense."""
    float32_flops: float
    """Without tensor cores: the products of rows are exact."""
    memory_bandwidth: float
    link_inside: float
    """Between the GPUs of a node: half of what NVLink's data sheet counts, both directions."""
    link_between: float
    """Between nodes: a network card of its own for each GPU."""


# Sources: NVIDIA's data sheets and white papers of A100, H100, H200 and B200, as collected at
# https://glennklockwood.com/garden/processors (A100 80 GB SXM4, H100 SXM5, HGX B200 at 1000 W);
# H200: H100 with 141 GB at 4.8 TB/s. Links between nodes: those of the DGX systems, eight cards of
# 200 Gb/s (A100, ConnectX-6) or 400 Gb/s (others, ConnectX-7). B200: 1440 GB in a DGX of eight.
GPUS = {
    "a100": Gpu(80e9, 312e12, 19.5e12, 2.04e12, 300e9, 25e9),
    "h100": Gpu(80e9, 989e12, 67e12, 3.35e12, 450e9, 50e9),
    "h200": Gpu(141e9, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    "b200": Gpu(180e9, 2250e12, 80e12, 8e12, 900e9, 50e9),
}
GPUS_OF_A_NODE = 8
# Share of the memory that is planned with: the rest is the framework's, and holes between blocks.
MOST_OF_MEMORY = 0.9
# Bytes of an element of a product.
BFLOAT16 = 2
# An overhead that is worth no further change.
CHEAP = 0.1
# Looked through for a way that is possible, and for a cheap one.
FEWER_ROWS = (256, 128, 64, 32, 16, 8, 4, 2)


class Way(NamedTuple):
    """A way to train on some GPUs, and what it needs of each."""

    name: str
    memory: dict[str, float]
    """{what: bytes}."""
    passes: int
    tokens: float
    """Of a pass."""
    sent: float
    """Bytes in a step."""
    seconds: dict[str, float]
    """{what: of a step}."""
    plain: float
    """Seconds of a plain step with the same wrapper."""
    verdict: str
    """yes, or what is in its way."""

    @property
    def num_bytes(self) -> float:
        """Of all memory."""
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.seconds.values())

    @property
    def overhead(self) -> float:
        """What a step takes longer, as a share of a plain one."""
        return self.step / self.plain - 1


class Model(NamedTuple):
    """What the formulas ask of a GPT-2."""

    num_layers: int
    width: int
    num_params: int


def plan(config: PlanConfig) -> list[str]:
    """What `doge-fast plan` prints: a table, and for each number of GPUs what to choose.

    Raises:
        ValueError: a setting is out of its range.
    """
    _check(config)
    model = _model_of(config)
    found = {num: _ways(config, model, num) for num in config.gpus}
    table = _overview(found)
    title = (
        f"{config.model}, {model.num_params / 1e6:,.0f} million parameters; {_num_rows(config)} of "
        f"{config.domains} domains and {config.tokens:,} tokens a step; rows in {config.rows}; "
        f"{config.mode}; {config.gpu}"
    )
    if len(found) == 1:
        ((num, ways),) = found.items()
        table, title = _detailed(ways), f"{title} x {num:,}"
    lines = [title, *(_advice(config, model, num) for num in found)]
    width = tables.terminal_width()
    first, *advice = (textwrap.fill(line, width, subsequent_indent="  ") for line in lines)
    return [first, "", table, "", *advice]


def _check(config: PlanConfig) -> None:
    check_ranges(config)
    if not config.gpus:
        raise ValueError("gpus must be one number or more.")
    if config.domains_per_step is not None and config.domains_per_step > config.domains:
        raise ValueError(
            f"domains_per_step must be at most domains ({config.domains}); got "
            f"{config.domains_per_step}."
        )


def _model_of(config: PlanConfig) -> Model:
    if config.model in SIZES:
        num_layers, _, width = SIZES[config.model]
    elif shape := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", config.model):
        num_layers, width = map(int, shape.groups())
    else:
        raise ValueError(
            f"model must be a size of the family ({', '.join(SIZES)}) or LAYERSxWIDTH, as "
            f"32x4096; got {config.model!r}."
        )
    positions = config.sequence_length
    return Model(num_layers, width, num_parameters(num_layers, width, config.vocab_size, positions))


def _num_rows(config: PlanConfig) -> int:
    return config.domains_per_step or config.domains


def _ways(config: PlanConfig, model: Model, num_ranks: int) -> list[Way]:
    """Data parallel; and in shards, where all ranks run all domains."""
    num_params, num_rows = model.num_params, _num_rows(config)
    itemsize = _itemsize(config)
    own = scale.most_rows(num_rows, num_ranks)
    is_stacked = config.mode == "stacked"
    waiting = 0 if is_stacked else scale.FLOAT32 * num_params
    ways = [
        _way(
            "DDP" if num_ranks > 1 else "one process",
            config,
            model,
            num_ranks,
            {
                **scale.training_bytes(num_params),
                "waiting gradient": waiting,
                "rows": scale.rows_bytes(num_params, own, itemsize),
                "exchange": scale.exchanged_bytes(num_params, num_rows, num_ranks, itemsize),
                "kept parameters": 0,
            },
            passes=1 if is_stacked else own,
            sent=scale.data_parallel_bytes(num_params, num_rows, num_ranks, itemsize),
            plain_sent=scale.ddp_bytes(num_params, num_ranks),
            pieces=scale.num_pieces(num_rows, num_ranks) if num_ranks > 1 else num_rows,
            # Written, and read and written once more to be sent.
            written=own * num_params * (3 if num_ranks > 1 else 1),
        )
    ]
    if num_ranks > 1 and not is_stacked:
        shards = {
            **scale.training_bytes(num_params, num_ranks),
            "waiting gradient": scale.FLOAT32 * num_params / num_ranks,
            "rows": scale.rows_bytes(num_params, num_rows, itemsize) / num_ranks,
            "exchange": 0,
            "kept parameters": scale.FLOAT32 * num_params,
        }
        way = _way(
            "FSDP2",
            config,
            model,
            num_ranks,
            shards,
            passes=num_rows,
            sent=scale.sharded_bytes(num_params, num_rows, num_ranks, num_rows, are_kept=True),
            plain_sent=scale.sharded_bytes(num_params, 0, num_ranks, 1, are_kept=False),
            pieces=num_rows,
            written=num_params * num_rows / num_ranks,
        )
        ways.append(way)
    return ways


def _way(
    name: str,
    config: PlanConfig,
    model: Model,
    num_ranks: int,
    memory: dict[str, float],
    *,
    passes: int,
    sent: float,
    plain_sent: float,
    pieces: int,
    written: float,
) -> Way:
    """What all ways have in common: activations, times, and whether it can be.

    Args:
        name: as it is shown.
        config: what was asked.
        model: of the proxy.
        num_ranks: GPUs.
        memory: of what has the model's size.
        passes: forward and backward, of a rank in a step.
        sent: bytes in a step.
        plain_sent: bytes in a plain step.
        pieces: rows that a rank multiplies, of its share of the columns.
        written: elements of rows that a rank writes.
    """
    gpu, length = GPUS[config.gpu], config.sequence_length
    link = gpu.link_inside if num_ranks <= GPUS_OF_A_NODE else gpu.link_between
    num_layers, width, num_params = model
    layers = num_layers * scale.layer_bytes(width, 4 * width, BFLOAT16)
    head = config.vocab_size * scale.logit_bytes(BFLOAT16)
    own = scale.most_rows(_num_rows(config), num_ranks)
    together = config.micro_batch * length * (own if config.mode == "stacked" else 1)
    memory = memory | {
        "Gram matrices": scale.gathered_gram_bytes(_num_rows(config), num_ranks),
        "activations": together * (layers + head),
    }
    columns = num_params / num_ranks
    moved = scale.passes_bytes(
        columns, pieces, _itemsize(config), written=written, selection=config.selection
    )
    # Two operations for each product, and half of the pairs of rows are the others again.
    products = pieces**2 * columns * config.selection / gpu.float32_flops
    of_rank = config.tokens / num_ranks
    work = scale.flops(num_layers, width, config.vocab_size, length, of_rank)
    seconds = {
        "computing": work / (config.utilisation * gpu.bfloat16_flops),
        "sending": sent / (config.bandwidth * link),
        "passes over rows": max(moved / (config.bandwidth * gpu.memory_bandwidth), products),
    }
    plain = seconds["computing"] + plain_sent / (config.bandwidth * link)
    shortest = length * (own if config.mode == "stacked" else 1)
    verdict = "yes"
    if of_rank / passes < shortest:
        verdict = "too short"
    elif sum(memory.values()) > MOST_OF_MEMORY * gpu.memory:
        verdict = "too large"
    return Way(name, memory, passes, of_rank / passes, sent, seconds, plain, verdict)


def _itemsize(config: PlanConfig) -> int:
    return scale.FLOAT32 if config.rows == "float32" else BFLOAT16


def _detailed(ways: Sequence[Way]) -> str:
    """A column for each way."""
    rows = [(what, *(_size(way.memory[what]) for way in ways)) for what in ways[0].memory]
    rows = [row for row in rows if set(row[1:]) != {"-"}]
    rows += [
        ("memory of a GPU", *(_size(way.num_bytes) for way in ways)),
        ("sent in a step", *(_size(way.sent) for way in ways)),
        ("passes of a rank", *(str(way.passes) for way in ways)),
        ("tokens of a pass", *(f"{way.tokens:,.0f}" for way in ways)),
    ]
    rows += [(what, *(_time(way.seconds[what]) for way in ways)) for what in ways[0].seconds]
    rows += [
        ("a step", *(_time(way.step) for way in ways)),
        ("over plain", *(_share(way.overhead) for way in ways)),
        ("possible", *(way.verdict for way in ways)),
    ]
    return tables.text(tables.table_of(("", *(way.name for way in ways)), rows))


def _overview(found: dict[int, list[Way]]) -> str:
    """A line for each number of GPUs and way: memory of a GPU, tokens of a pass, over plain."""
    header = ("GPUs", "memory", "sent", "per pass", "a step", "over", "possible")
    rows = [
        (
            f"{num:,} {way.name}" if num > 1 else "1",
            _size(way.num_bytes),
            _size(way.sent),
            f"{way.tokens:,.0f}",
            _time(way.step),
            _share(way.overhead),
            way.verdict,
        )
        for num, ways in found.items()
        for way in ways
    ]
    return tables.text(tables.table_of(header, rows))


def _advice(config: PlanConfig, model: Model, num_ranks: int) -> str:
    """The fastest way that is possible, with the fewest changes; and a cheap one with more."""
    found: list[tuple[str, Way]] = []
    for words, changed in _changes(config):
        ways = [way for way in _ways(changed, model, num_ranks) if way.verdict == "yes"]
        if ways:
            found.append((words, min(ways, key=lambda way: way.step)))
    begin = f"{num_ranks:,} x {config.gpu}:"
    if not found:
        return (
            f"{begin} none is possible, with fewer domains a step neither. Take a smaller proxy, "
            "longer steps, or another number of GPUs."
        )
    cheap = [each for each in found if each[1].overhead <= CHEAP]
    chosen = [found[0]] if found[0] in cheap else [found[0], *cheap[:1]]
    memory = GPUS[config.gpu].memory
    told = " Or ".join(
        f"{way.name}{words and f' with {words}'}: {_size(way.num_bytes)} of {_size(memory)}, "
        f"{_time(way.step)} a step, {_share(way.overhead)} over plain training."
        for words, way in chosen
    )
    return f"{begin} choose {told}"


def _changes(config: PlanConfig) -> Iterator[tuple[str, PlanConfig]]:
    """As asked; with rows of 16 bits; then with fewer and fewer domains a step too."""
    yield "", config
    words = ""
    if config.rows != "bfloat16":
        config, words = dataclasses.replace(config, rows="bfloat16"), "--rows bfloat16"
        yield words, config
    fewer = f"{words} --domains-per-step".strip()
    for num in FEWER_ROWS:
        if num < _num_rows(config):
            yield f"{fewer} {num}", dataclasses.replace(config, domains_per_step=num)


def _size(num_bytes: float) -> str:
    """1.2 GB; of nothing a dash."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 1e3:,.1f} kB" if num_bytes else "-"


def _share(overhead: float) -> str:
    return f"{overhead:+.1%}" if overhead < 10 else f"{overhead:+,.0%}"


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"
