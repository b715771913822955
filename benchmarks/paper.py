"""The paper's experiments as command lines of doge-fast.

    python -m benchmarks.paper universal --data corpus --domains code prose verse
    python -m benchmarks.paper ood --data corpus --domains code prose verse --size tiny --run
    python -m benchmarks.paper wiki40b --size paper

They are printed, in an order in which each finds what it reads. With --run they are run one after
the other. A complete run is left as it is and a killed one goes on, so the same command is repeated
until all are there. Options that are not known here (--device cpu, --cache-dir DIR) go to every
verb that trains. Models of one seed begin alike and see their data in the same order.

Source: DoGE, experimental setup, appendix model-archs, and the tables that are named below.
"""

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from doge_fast import cli

Words = tuple[str, ...]

WIKI40B = "google/wiki40b"
LANGUAGES, TARGET_LANGUAGES = ("en", "de", "fr", "es", "ru"), ("ca", "nl")
SLIMPAJAMA = ("ArXiv", "Book", "C4", "CommonCrawl", "Github", "StackExchange", "Wikipedia")
# Peak and end of the learning rate where it is not that of the size.
RATES = {"684M": (1.5e-4, 5e-5)}


@dataclass(frozen=True)
class ExperimentSize:
    """How large the runs of an experiment are; by default some minutes each on two cores.

    A step of a proxy has `sequences` blocks of every domain, one of another model `batch` in all.
    """

    proxy: str = "mini"
    proxies: Words = ("tiny", "mini", "small")
    bases: Words = ("mini",)
    proxy_steps: int = 1500
    base_steps: int = 1500
    sequences: int = 4
    batch: int = 28
    doremi_steps: tuple[int, ...] = (1500, 3000)
    rates: tuple[float, float] = (1e-3, 2e-4)
    options: Words = ()
    proxy_options: Words = ()


# A run of tiny takes a minute or two on one core.
SIZES = {
    "small": ExperimentSize(),
    "tiny": ExperimentSize(
        proxy="tiny",
        bases=("tiny",),
        proxy_steps=600,
        base_steps=800,
        batch=14,
        doremi_steps=(800,),
        options=("--vocab-size", "2048"),
    ),
    "paper": ExperimentSize(
        proxy="82M",
        proxies=("60M", "82M", "124M"),
        bases=("124M", "210M", "684M"),
        proxy_steps=10_000,
        base_steps=10_000,
        # 126 sequences of seven domains; base models see 128.
        sequences=18,
        batch=128,
        doremi_steps=(10_000, 50_000),
        rates=(5e-4, 1e-4),
        # All held-out blocks.
        options=("--block-size", "512", "--dtype", "bfloat16", "--eval-blocks", "1000000"),
        proxy_options=("--mu", "0.01", "--domain-max-grad-norm", "0"),
    ),
}


class Commands:
    """Command lines, each once: {words: the directory of the run}."""

    def __init__(self, args: argparse.Namespace, more: Sequence[str]) -> None:
        self.size, self.out, self.domains = SIZES[args.size], args.out, tuple(args.domains)
        self.options = ("--data", args.data, *self.size.options, *args.corpus, *more)
        self.runs: dict[Words, str] = {}
        self.seed = 0

    def train(self, verb: str, name: str, *own: Any, **told: Any) -> str:
        """The directory of a run of this seed; `told` has model, steps and domains."""
        model, domains = told["model"], told.get("domains", self.domains)
        peak, end = RATES.get(model, self.size.rates)
        words = ("--domains", *domains, "--model", model, "--steps", told["steps"])
        words += ("--learning-rate", peak, "--min-learning-rate", end, "--seed", self.seed)
        # A domain may be called anything; a directory may not.
        run = f"{self.out}/runs/{plain(f'{verb}-{name}-seed{self.seed}')}"
        return self.runs.setdefault((verb, *map(str, (*words, *own, *self.options))), run)

    def proxy(self, name: str = "doge", *own: Any, **told: Any) -> str:
        """Learn weights."""
        size = self.size
        told = {"model": size.proxy, "steps": size.proxy_steps} | told
        own = (
            "--score",
            "paper",
            "--sequences-per-domain",
            size.sequences,
            *size.proxy_options,
            *own,
        )
        return self.train("proxy", name, *own, **told)

    def base(self, name: str, weights: str, *own: Any, **told: Any) -> str:
        """Train at weights."""
        told = {"model": self.size.bases[0], "steps": self.size.base_steps} | told
        own = ("--weights", weights, "--batch-size", self.size.batch, *own)
        return self.train("base", name, *own, **told)

    def doremi(self, steps: int, variant: str = "doremi") -> tuple[str, str]:
        """A reference, and weights by excess loss over it."""
        told = {"model": self.size.proxy, "steps": steps}
        reference = self.base(f"reference-{steps}", "uniform", **told)
        own = ("--reference", reference, "--variant", variant, "--batch-size", self.size.batch)
        return reference, self.train("doremi", f"{steps}-{variant}", *own, **told)

    def finetune(self, name: str, base: str, target: str) -> None:
        """Go on with a base model on the target alone, for a tenth of its steps."""
        model, rate = f"{base}/model", self.size.rates[0] / 5
        own = ("--pretrained", "--tokenizer", model, "--learning-rate", rate)
        told = {"model": model, "steps": self.size.base_steps // 10, "domains": (target,)}
        self.base(f"tuned-{name}", "uniform", *own, "--min-learning-rate", rate / 5, **told)


def plain(name: str) -> str:
    """As a part of a path."""
    return re.sub(r"[^\w.-]+", "-", name)


# Each adds the runs of one seed, and returns those that a report compares.
def universal(to: Commands) -> list[str]:
    """tab:universal_ppl, tab:124M_ppl, tab:dw; the report is of the first size."""
    learned, runs = {"doge": to.proxy()}, list[str]()
    for steps in to.size.doremi_steps:
        reference, learned[f"doremi-{steps}"] = to.doremi(steps)
        runs.append(reference)
    weights = {"uniform": "uniform", "natural": "natural", **learned}
    for model in to.size.bases:
        bases = [to.base(f"{name}-{model}", told, model=model) for name, told in weights.items()]
        runs += bases if model == to.size.bases[0] else []
    return [*learned.values(), *runs]


def doremi(to: Commands) -> list[str]:
    """Both readings of DoReMi beside DoGE; tab:robust's last row."""
    steps = to.size.doremi_steps[0]
    (reference, paper), (_, doge) = to.doremi(steps), to.doremi(steps, "doge")
    weights = {"doge": to.proxy(), "doremi": paper, "doremi-doge": doge}
    bases = [to.base(name, told) for name, told in {"uniform": "uniform", **weights}.items()]
    return [reference, *weights.values(), *bases]


def ood(to: Commands, target: str) -> list[str]:
    """tab:ppl-ood, tab:ood-dw; of languages tab:ood-wiki-dw, fig:dw_ood."""
    others = tuple(name for name in to.domains if name != target)
    proxy = to.proxy(f"for-{target}", "--target", target, domains=others)
    weights = {f"uniform-without-{target}": "uniform", f"doge-for-{target}": proxy}
    runs = [proxy]
    for name, told in weights.items():
        runs.append(to.base(name, told, "--targets", target, domains=others))
        to.finetune(name, runs[-1], target)
    # The oracle.
    to.base(f"uniform-with-{target}", "uniform", domains=(*others, target))
    return runs


def scales(to: Commands) -> list[str]:
    """tab:robust."""
    return [to.proxy(model, model=model) for model in to.size.proxies]


def selection(to: Commands) -> list[str]:
    """tab:cc-dw, tab:cc-ppl."""
    size, names = to.size, ("low10", "low30", "low50", "high30", "high10")
    # The first tenth of a training, whose rate has hardly begun to fall.
    own = ("--min-learning-rate", size.rates[0], "--batch-size", size.sequences * len(to.domains))
    own += ("--strategies", *names)
    scored = to.train("select", "scores", *own, model=size.proxy, steps=size.proxy_steps // 10)
    weights = {"full": to.proxy("full")}
    for name in names:
        weights[name] = to.proxy(name, "--selection", f"{scored}/selection-{name}.json")
    bases = [to.base(name, told) for name, told in {"uniform": "uniform", **weights}.items()]
    return [*weights.values(), *bases]


def curriculum(to: Commands) -> list[str]:
    """fig:curriculum_dw, fig:curriculum_ppl; models of several stages are in no report."""
    proxy = to.proxy()
    for number in (2, 3, 10):
        to.base(f"stages-{number}", proxy, "--stages", number)
    return [proxy, to.base("uniform", "uniform"), to.base("doge", proxy)]


def proxy_vs_base(to: Commands) -> list[str]:
    """fig:proxy: base models of the proxy's size, with as many tokens."""
    size, proxy = to.size, to.proxy()
    steps = round(size.proxy_steps * size.sequences * len(to.domains) / size.batch)
    told = {"model": size.proxy, "steps": steps}
    return [proxy, to.base("uniform", "uniform", **told), to.base("doge", proxy, **told)]


_EACH = (universal, doremi, ood, scales, selection, curriculum, proxy_vs_base)
EXPERIMENTS: dict[str, Callable[..., list[str]]] = {each.__name__: each for each in _EACH}
EXPERIMENTS["wiki40b"] = ood


def commands(args: argparse.Namespace, more: Sequence[str]) -> list[Words]:
    """The command lines of an experiment; its reports, of each target one, come last."""
    to, compared = Commands(args, more), dict[str, list[str]]()
    for to.seed in args.seeds:
        for target in args.targets or ("",):
            runs = EXPERIMENTS[args.name](to, *filter(None, [target]))
            compared.setdefault(plain(f"report-{target}").strip("-"), []).extend(runs)
    return [(*words, "--out", run) for words, run in to.runs.items()] + [
        ("report", *dict.fromkeys(runs), "--out", f"{args.out}/{page}.html")
        for page, runs in compared.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the command lines, or run them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--data", help="as for doge-fast; of the paper's size its Hub data")
    parser.add_argument("--domains", nargs="+", help="of the data: those to train on")
    parser.add_argument("--targets", nargs="+", help="ood: all domains; wiki40b: ca nl")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--out")
    parser.add_argument("--run", action="store_true")
    args, more = parser.parse_known_args(arguments)
    args.out, args.corpus = args.out or f"experiments/{args.name}", ()
    if args.size == "paper" and args.data is None:
        args.data = "DKYoon/SlimPajama-6B"
        args.domains = [f"RedPajama{name}" for name in SLIMPAJAMA]
        args.corpus = ("--tokenizer", "gpt2", "--domain-column", "meta.redpajama_set_name")
        if args.name == "wiki40b":
            args.data, args.domains, args.corpus = WIKI40B, LANGUAGES, ("--vocab-size", "52000")
    if args.data is None or not args.domains:
        parser.error("--data and --domains say which text there is.")
    all_of_them = {"ood": args.domains, "wiki40b": TARGET_LANGUAGES}
    args.targets = (args.targets or all_of_them[args.name]) if args.name in all_of_them else ()
    lines = commands(args, more)
    if not args.run:
        print("\n".join(shlex.join(("doge-fast", *line)) for line in lines))
        return 0
    worst = 0
    for line in lines:
        # After Ctrl-C or another signal nothing follows, after a failure what does without it.
        if (code := cli.main(line)) > 128:
            return code
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
