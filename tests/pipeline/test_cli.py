"""The command line says what the dataclasses say, and refuses in one sentence."""

import io
import logging
import math
import re
import shlex
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from tqdm import tqdm  # type: ignore[import-untyped]

import doge_fast
from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    EvaluateConfig,
    ModelConfig,
    ProxyConfig,
    ReportConfig,
    TemperatureConfig,
    TrainingConfig,
    WeightsShowConfig,
)
from doge_fast.pipeline.config.ranges import check_paths
from doge_fast.pipeline.run import Run
from tests.pipeline.stages import words_of
from tests.processes import ended


def test_the_verbs_run_one_after_the_other(proxy, base, capsys):
    learned, trained = proxy(), base()
    words = ["--target", "verse", "--sequences-per-domain", "2"]
    assert cli.main(["proxy", *words_of(learned), *words]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{learned.out.name}, for verse: most goes to ")
    assert told.endswith(f"weights: {learned.out / 'weights.json'}\n")
    assert records.read_weights(learned.out)["target"] == {"verse": 1.0}
    words = ["--weights", str(learned.out), "--targets", "verse", "--batch-size", "8"]
    assert cli.main(["base", *words_of(trained), *words]) == 0
    told = capsys.readouterr().out.splitlines()
    assert Run(trained.out).weights == Run(learned.out).weights
    assert set(Run(trained.out).metrics("train")[-1]["tokens"]) == {"code", "prose", "table"}
    assert "verse" in Run(trained.out).metrics("eval")[-1]["loss"]
    assert told[1] == f"model: {trained.out / 'model'}"
    assert told[2].endswith(f"doge-fast evaluate {trained.out}")
    assert cli.main(["evaluate", str(trained.out), "--device", "cpu"]) == 0
    measured = records.read_json(trained.out / records.EVALUATION)
    average, aim = measured["average_perplexity"], measured["perplexity"]["verse"]
    shown = capsys.readouterr().out
    assert re.search(
        rf"the target verse +{aim:.2f}\nthe 3 training domains +{average:.2f}\n$", shown
    )
    # On 8 of the held-out blocks of each.
    found = re.fullmatch(r".*: (\S+) on the target verse, (\S+) on the 3 training .*", told[0])
    assert list(map(float, found.groups())) == pytest.approx([aim, average], rel=0.1)


PROXY_X, HERE, HOME = ProxyConfig(Path("x")), Path("a"), Path.home()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "proxy --data DIR --target ca --out runs/x --model mini --steps 300 --mu 0.05",
            ProxyConfig(
                *(Path("runs/x"), CorpusConfig("DIR"), ModelConfig("mini")),
                *(TrainingConfig(steps=300), ("ca",)),
                mu=0.05,
            ),
        ),
        ("report a b", ReportConfig(runs=(HERE, Path("b")))),
        ("evaluate a --domains x y", EvaluateConfig(run=HERE, domains=("x", "y"))),
        (
            "base --out 'x y' --pretrained --weights 'a b=1' --stages=3",
            BaseConfig(Path("x y"), model=ModelConfig(pretrained=True), weights="a b=1", stages=3),
        ),
        # Numbers in thousands and billions.
        (
            "proxy --out x --max-tokens-per-domain 10k",
            replace(PROXY_X, corpus=CorpusConfig(max_tokens_per_domain=10_000)),
        ),
        ("proxy --out x --steps 1.5e3", replace(PROXY_X, training=TrainingConfig(steps=1500))),
        ("weights show a --budget-tokens 1.5b", WeightsShowConfig((HERE,), budget_tokens=1.5e9)),
        ("proxy --out x --mu 2 --mu None", PROXY_X),
        ("report ~/a --out=~/b", ReportConfig((HOME / "a",), out=HOME / "b")),
    ],
)
def test_flags_are_the_fields(words, expected):
    assert cli.parse(shlex.split(words)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 2**32}, "seed"),
        ({"steps": 2.5}, "steps"),
        ({"steps": True}, "steps"),
        ({"mu": 10**400}, "mu"),
        ({"mu": math.nan}, "mu"),
        ({"learning_rate": "1e-3"}, "learning_rate"),
        ({"validation_fraction": 0.0}, "validation_fraction"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"smoothing": 1.0}, "smoothing"),
        ({"mode": "fast"}, "mode"),
        ({"warmup_steps": 8}, "warmup_steps"),
        # A word is several letters.
        ({"target": "verse"}, "target"),
        ({"data": Path("folder")}, "data"),
        ({"stepz": 3}, "stepz"),
    ],
)
def test_what_cannot_be_is_named_when_it_is_made(proxy, changes, message):
    with pytest.raises(ValueError, match=rf"\b{message}\b"):
        proxy(**changes)


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_option_is_explained(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main([*verb.split(), "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"usage: doge-fast {verb}" in printed
    assert all(example in printed for example in getattr(cli.VERBS[verb].config, "examples", ()))
    # A sentence below or beside it.
    # In a box, of blanks where the stream has no letters for it.
    inside = re.sub(r"^[│ ] (.*?)[│ ]*$", r"\1", printed, flags=re.M)
    options = re.findall(r"^(?:--[\w.-]+|FILE|RUN)\b.*(?:\n {15,}.*)*", inside, re.M)
    assert options
    assert all(re.search(r"  [\w\"-]+.* [a-z]{2}", option) for option in options), printed
    assert "(default: )" not in printed


def test_help_has_no_line_breaks_of_the_source(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    for verb, words in (("proxy", "a larger mu makes slower"), ("select", "(default: 1000)")):
        assert cli.main([verb, "--help"]) == 0
        assert words in capsys.readouterr().out


def test_a_users_folder_is_expanded_wherever_a_path_may_stand(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    corpus, model = CorpusConfig(data="~/a", tokenizer="~/b"), ModelConfig("~/c")
    base = BaseConfig(Path("x"), corpus, model, weights="~/d.json")
    search = TemperatureConfig(Path("x"), model="~/f")
    paths = [base.corpus.data, base.corpus.tokenizer, base.model.model, base.weights, search.model]
    paths += [EvaluateConfig(Path("x"), data="~/e", out=Path("y")).data]
    assert paths == [str(tmp_path / each) for each in ("a", "b", "c", "d.json", "f", "e")]
    typed = cli.parse(["base", "--out", "x", "--weights=~/d.json"])
    assert typed.weights == str(tmp_path / "d.json")


def test_runs_may_lie_in_a_folder_named_like_data_that_is_no_folder():
    for data in ("installed", "owner/name"):
        check_paths(ProxyConfig(Path(data, "proxy"), corpus=CorpusConfig(data)))


def test_the_version_and_what_there_is(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"doge-fast {doge_fast.__version__}\n"
    for words in ([], ["--help"]):
        assert cli.main(words) == 0
        told = capsys.readouterr().out
        for name in cli.VERBS:
            assert re.search(rf"^{name}  +\w", told, re.M), name
    assert cli.main(["weights"]) == 0
    told = capsys.readouterr().out
    assert "weights average" in told
    assert "proxy" not in told.split("what it does")[1].split("weights show")[0]


def test_fields_come_from_a_file_and_flags_win(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "out: runs/x\ncorpus: {data: DIR, domains: [a, b]}\ntraining: {<<: {seed: 3}, steps: 7}\n"
        "mu: null\ntarget: [ca]\n"
    )
    config = cli.parse(["proxy", "--config", str(file), "--steps", "9"])
    training = TrainingConfig(steps=9, seed=3)
    assert config == ProxyConfig(
        Path("runs/x"), CorpusConfig("DIR", ("a", "b")), training=training, target=("ca",)
    )
    file.write_text("run: runs/x\nblocks: 4\n")
    assert cli.parse(["evaluate", "--config", str(file)]) == EvaluateConfig(
        Path("runs/x"), blocks=4
    )
    assert cli.parse(["evaluate", "runs/y", "--config", str(file)]).run == Path("runs/y")


def test_a_file_means_what_is_typed(tmp_path):
    """To YAML 010 is eight, 1:30 is ninety and no is false; a dash begins no option."""
    file = tmp_path / "fields.yaml"
    file.write_text(
        'out: -x\ncorpus: {domains: [-a, no, "1:30"], cache_dir: ~/c}\n'
        "training: {seed: 010, compile: true}\ndry_run: false\nmu: ~\nselection: null\n"
    )
    config = cli.parse(["proxy", "--config", str(file)])
    assert config == ProxyConfig(
        Path("-x"),
        CorpusConfig(domains=("-a", "no", "1:30"), cache_dir=HOME / "c"),
        training=TrainingConfig(seed=10, compile=True),
    )


def test_a_file_says_numbers_and_lists_of_one_as_options_do(tmp_path):
    file = tmp_path / "fields.yaml"
    file.write_text(
        "out: x\ntarget: ca\ntraining: {steps: 10k, learning_rate: 1e-3, eval_every: 1e2}\n"
    )
    config = cli.parse(["proxy", "--config", str(file)])
    assert (config.target, config.training.steps) == (("ca",), 10_000)
    assert (config.training.learning_rate, config.training.eval_every) == (1e-3, 100)


def test_a_runs_own_record_can_be_fed_back(tmp_path):
    words = "proxy --data DIR --target ca --out runs/x --steps 300 --mu 0.05 --domains a b"
    config = cli.parse(words.split())
    file = tmp_path / "config.json"
    record = {"stage": "proxy", "config": config, "corpus": {}}
    records.write_json(file, record)
    assert cli.parse(["proxy", "--config", str(file)]) == config
    # Of a run that an earlier version made, with an option that there is no more.
    gone = {**records.plain(config), "gone": 1}
    assert records.check_shape(gone, ProxyConfig, "config") == config
    again = cli.parse(["proxy", "--config", str(file), "--out", "runs/y"])
    assert again == replace(config, out=Path("runs/y"))


@pytest.mark.parametrize("words", [["proxy", "--help"], ["weights", "show", "nowhere.json"]])
def test_quick_verbs_import_nothing_slow(words):
    """torch alone takes seconds."""
    program = (
        "import sys; from doge_fast import cli\n"
        f"try: cli.main({words})\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'numpy') if name in "
        "sys.modules], file=sys.stderr)"
    )
    assert ended(sys.executable, "-c", program).stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["--help"], ["proxy", "--help"], ["--version"]])
def test_an_installation_without_the_pipeline_has_help(words):
    absent = ["rich", "tqdm", "datasets", "transformers", "accelerate", "pyarrow", "filelock"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        f"from doge_fast import cli\nsys.exit(cli.main({words}))"
    )
    assert ended(sys.executable, "-c", program).returncode == 0


def test_an_interruption_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(config: ProxyConfig) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.VERBS, "proxy", cli.VERBS["proxy"]._replace(run=interrupted))
    assert cli.main(["proxy", "--out", str(tmp_path)]) == cli.failures.INTERRUPTED
    assert "No checkpoint has been written" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    assert cli.main(["proxy", "--out", str(tmp_path)]) == cli.failures.INTERRUPTED
    assert "goes on from the last checkpoint" in capsys.readouterr().err
    monkeypatch.setitem(cli.VERBS, "info", cli.VERBS["info"]._replace(run=interrupted))
    assert cli.main(["info"]) == cli.failures.INTERRUPTED
    assert capsys.readouterr().err.endswith("Interrupted.\n")


def test_what_is_said_has_a_line_of_its_own_below_a_bar(capsys):
    screen = io.StringIO()
    bar = tqdm(total=3, file=screen)
    # Another test may have had it on, and pytest has put its own function back.
    logging.captureWarnings(False)
    cli._log_visibly()
    with warnings.catch_warnings(action="always"):
        warnings.warn("told", stacklevel=1)
    # Nothing is left on its line.
    assert screen.getvalue().endswith("\r")
    bar.refresh()
    assert cli.main(["zzz"]) == cli.failures.USAGE
    assert screen.getvalue().endswith("\n")


@pytest.mark.parametrize(("package", "extra"), [("datasets", "pipeline"), ("lm_eval", "fewshot")])
def test_a_missing_extra_is_named(package, extra, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(cli.VERBS, "info", cli.VERBS["info"]._replace(loads=(package,)))
    monkeypatch.setattr(cli, "_load", lambda packages, _: cli.import_module(*packages))
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    assert cli.main(["info"]) == cli.failures.USAGE
    said = capsys.readouterr().err
    told = f"This verb needs {package}, which is not installed: pip install 'doge-fast[{extra}]'."
    assert told in said


def test_a_reader_that_has_enough_is_no_error():
    # One byte, then the pipe is closed: what follows may be written before or after that.
    command = f"set -o pipefail; {sys.executable} -m doge_fast export --list | head -c 1"
    done = ended("bash", "-c", command)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 1, "")


def test_a_terminal_without_the_letters_of_a_name_is_no_error(tmp_path, monkeypatch):
    records.write_weights(tmp_path / "w.json", {"domains": [{"name": "\u65e5", "weight": 1.0}]})
    for encoding, shown in {"ascii": "\\u65e5", "utf-8": "\u65e5"}.items():
        said = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(said, encoding=encoding))
        assert cli.main(["weights", "show", str(tmp_path / "w.json")]) == 0
        assert f"\n{shown} " in said.getvalue().decode(encoding)


def test_variables_of_a_launcher_that_are_empty_say_nothing(monkeypatch, capsys):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("doge-fast ")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_says_what_comes_before_it_loads(rank, monkeypatch, caplog):
    # The level is given back after the test.
    caplog.set_level(logging.INFO, "doge_fast")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(cli, "import_module", lambda _: cli._log.info("loaded"))
    cli._log_visibly()
    cli._load(["colorsys"], ProxyConfig(Path("runs/x")))
    first = "each of 4 blocks of 128 tokens of every domain; loading colorsys ..."
    told = [f"runs/x: proxy of 300 steps on installed, {first}", "loaded"]
    assert caplog.messages == (told if rank == 0 else [])
