"""The script for GPUs, here on the CPU with tiny problems, and what comes of its record."""

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks import cases, optimizer_step, protocol
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import bars, checks, job, report, sanitizer, session, times
from benchmarks.gpu import ranks as ranks_part
from benchmarks.gpu.__main__ import ScriptSection
from benchmarks.gpu.session import Row, Session
from doge_fast.kernels import segment_sum
from doge_fast.kernels.segment_sum import pick
from tests.processes import printed_by, shell_script

ROOT = Path(__file__).resolve().parents[2]
CPU = Session(torch.device("cpu"), quick=True)
SECTIONS = [name for part in gpu.PARTS.values() for name in part]
# Where there is no compiler nothing is missing.
QUICK = ["--device", "cpu", "--quick", "--commit", "abc"]


def record_in(folder: Path) -> tuple[Row, str]:
    """The only record of a folder, and its page."""
    (path,) = folder.glob("gpu-*.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


@pytest.mark.exhaustive
def test_every_part_runs_and_is_right(tmp_path, capsys):
    pytest.importorskip("datasets", reason="the pipeline's packages are not installed")
    (tmp_path / "corpus").mkdir()
    for name in ("code", "prose"):
        lines = [json.dumps({"text": f"{name} number {i} of many words " * 20}) for i in range(60)]
        (tmp_path / "corpus" / f"{name}.jsonl").write_text("\n".join(lines))
    code = gpu.main([*QUICK, "--out", str(tmp_path), "--corpus", str(tmp_path / "corpus")])
    record, text = record_in(tmp_path)
    # Triton's interpreter may be on, and its time means nothing.
    assert set(record["implementations"]) <= {"cpp", "torch"}
    failures = {name: each.get("failure") for name, each in record["sections"].items()}
    assert failures == dict.fromkeys(SECTIONS)
    assert not any(section["cut"] for section in record["sections"].values())
    assert code == 0
    assert all(f"## {name}\n" in text for name in SECTIONS)
    assert "Everything checked was right." in text
    assert f"torch {torch.__version__}" in text
    assert "commit abc" in text
    printed = capsys.readouterr().out
    assert all(f"\n{name}: " in printed for name in SECTIONS)
    assert "not judged" in printed
    # What does not run here says why.
    for reason in ("CUDA graphs need a GPU", "compute-sanitizer watches GPUs"):
        assert reason in printed
    plain, doge = record["sections"]["job"]["rows"]
    assert (plain["run"], doge["run"]) == ("base", "proxy")
    assert doge["ratio"] == pytest.approx(doge["step_ms"] / plain["step_ms"], rel=1e-3)
    assert doge["weights"].keys() == {"code", "prose"}
    assert "doge-fast proxy --data" in text
    for row in record["sections"]["profile"]["rows"]:
        phases = {each["name"] for each in row["profile"]["phases"]}
        assert {"gram", "reweight", "weighted_sum"} <= phases
    assert "doge-fast profile --domains=7" in text
    assert "of bandwidth" in text
    # No word of a file that is gone.
    assert "profile.json" not in text + printed
    assert " MB beside a plain one\n" in printed
    # Several GPUs: here processes of a CPU.
    *weights, timed = record["sections"]["ranks"]["rows"]
    assert [row["operator"] for row in weights] == ["weights of ddp", "weights of fsdp2"]
    assert {row["implementation"] for row in weights} == {"2 ranks"}
    assert timed["ratio"] > 0
    assert "\n3 checks held.\n" in text
    assert "| tiny | 7 | ddp, 2 ranks |" in text
    assert "  tiny ddp, 2 ranks K=7: " in printed


def test_short_and_long_segments_are_checked(monkeypatch):
    """A segment that is one program, and one that several share: two launches."""
    spy = mock.Mock(wraps=segment_sum)
    monkeypatch.setattr(checks, "segment_sum", spy)
    monkeypatch.setattr(checks, "NUM_ROWS", ())
    rows = list(checks.correctness(CPU))
    assert all(row["correct"] for row in rows)
    shares = set()
    for call in spy.call_args_list:
        values, out = call.args
        shares.add(pick(len(values), len(out), out.shape[-1], torch.float32).num_shares)
    assert min(shares) == 1 < max(shares)


def test_memory_is_given_back_after_each_size(monkeypatch):
    released: list[torch.device] = []
    monkeypatch.setattr(optimizer_step, "measure", lambda *args, **options: {})
    monkeypatch.setattr(protocol, "release", released.append)
    # Not quick, but nothing is measured.
    rows = list(times.first_steps(Session(torch.device("cpu"), quick=False)))
    assert len(released) == len(rows) > 1


def test_something_wrong_is_the_exit_code(tmp_path, monkeypatch):
    right = cases.gram
    monkeypatch.setattr(cases, "gram", lambda *args, **options: right(*args, **options) + 1)
    assert gpu.main([*QUICK, "--out", str(tmp_path), "correctness"]) == bars.WRONG
    record, text = record_in(tmp_path)
    assert not record["correct"]
    assert list(tmp_path.glob("gpu-*-abc-correctness.json"))
    assert "NOT RIGHT" in text
    assert "| gram | torch | float32 | 7 | matrix | off by" in text


REASON = "The compiler failed: launch.cuh: error: STABLE_TORCH_ERROR_CODE_CHECK was not declared."


def test_what_should_run_where(monkeypatch):
    for hip, expected in ((None, ("cuda", "triton")), ("6.2", ("triton",))):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert session.expected(torch.device("cuda")) == expected
    monkeypatch.setenv("CXX", sys.executable)
    assert session.expected(torch.device("cpu")) == ("cpp",)
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    assert session.expected(torch.device("cpu")) == ()


def test_what_should_be_there_and_is_not_is_said_and_fails(tmp_path, monkeypatch, capsys):
    reasons = {"cpp": REASON, "cuda": "no GPU", "triton": "no GPU", "torch": None}
    monkeypatch.setattr(session, "implementations", lambda device: reasons)
    monkeypatch.setattr(session, "expected", lambda device: ("cpp",))
    monkeypatch.setitem(gpu.PARTS, "correctness", {"determinism": ScriptSection(right_rows)})
    assert gpu.main([*QUICK, "--out", str(tmp_path), "correctness"]) == bars.WRONG
    record, text = record_in(tmp_path)
    # Every row was right: what is missing has none.
    assert bars.is_correct(record["sections"])
    assert record["missing"] == {"cpp": REASON}
    line = f"cpp should run on this device and cannot. {REASON}"
    assert f"Missing: {line}" in text
    printed = capsys.readouterr().out
    # Before anything runs, and among the verdicts.
    assert printed.count(f"MISSING      {line}\n") == 2
    assert printed.index("MISSING") < printed.index("determinism:") < printed.rindex("MISSING")


def right_rows(session: Session) -> Iterator[Row]:
    yield {"correct": True}


def failing(session: Session) -> Iterator[Row]:
    yield {"correct": True}
    raise RuntimeError("the second kernel failed")


def endless(session: Session) -> Iterator[Row]:
    while True:
        yield {"correct": True}


def test_a_failing_section_is_recorded_and_a_slow_one_is_cut():
    failed = gpu.run_section(failing, CPU, 60.0)
    assert failed["rows"] == [{"correct": True}]
    assert failed["failure"] == "RuntimeError: the second kernel failed"
    assert "FAILED: RuntimeError" in report.how_it_went(failed)
    cut = gpu.run_section(endless, CPU, 0.05)
    assert cut["cut"]
    assert "failure" not in cut
    assert cut["seconds"] < 5
    assert "CUT FOR TIME" in report.how_it_went(cut)
    # The clock ended after the last row: nothing is missing.
    assert not gpu.run_section(right_rows, CPU, 0.0)["cut"]
    assert not bars.is_correct({"correctness": failed})
    # A check that did not end is one that is missing; a table may be shorter.
    assert not bars.is_correct({"correctness": cut})
    assert bars.is_correct({"steps": cut})
    assert not bars.is_correct({"steps": failed})
    assert not bars.is_correct({"steps": {"rows": [], "cut": True}})
    wrong = {"rows": [{"correct": True}, {"correct": False}], "cut": False}
    assert not bars.is_correct({"determinism": wrong})
    assert not bars.is_correct({"operators": wrong})


def test_no_section_starves(monkeypatch):
    sections = {name: ScriptSection(endless, share) for name, share in (("a", 3.0), ("b", 1.0))}
    monkeypatch.setitem(gpu.PARTS, "endless", sections)
    found = gpu.run_part("endless", CPU, 0.4 / 60)
    assert all(each["cut"] and each["rows"] for each in found.values())


def operator_row(**changes: Any) -> Row:
    row = {"operator": "gram", "label": "", "shape": "matrix", "rows": 7, "columns": 124_000_000}
    row |= {"dtype": "float32", "implementation": "cuda", "ms": 2.0, "fraction": [0.9, 0.9, 0.9]}
    return row | changes


def step_row(mode: str, domains: int, ratio: float | None, model: str = "82M") -> Row:
    row = {"model": model, "mode": mode, "domains": domains}
    if ratio is None:
        return row | {"skipped": "out of memory"}
    return row | {"ratio": ratio, "host_synchronisations": "none"}


def verdicts(rows: dict[str, list[Row]], *, on_gpu: bool = True) -> dict[str, tuple[Any, str]]:
    sections = {name: {"rows": each} for name, each in rows.items()}
    found = bars.bars(sections, on_gpu=on_gpu)
    return {each["bar"]: (each["value"], each["verdict"]) for each in found}


def test_bars_speak_of_the_better_implementation_in_the_worse_shape():
    rows = [
        operator_row(),
        operator_row(implementation="triton", fraction=[0.7, 0.7, 0.7]),
        operator_row(shape="blocks", fraction=[0.88, 0.8, 0.9]),
        # Too small to be asked.
        operator_row(columns=1_000_000, shape="bias", fraction=[0.1, 0.1, 0.1]),
        # Where arithmetic is the longer roof, memory's share is what is asked.
        operator_row(rows=22, dtype="bfloat16", fraction=[0.99, 0.99, 0.99], of_bandwidth=0.6),
    ]
    found = verdicts({"operators": rows})
    assert list(found.values()) == [
        (0.88, "met"),
        (None, "not measured"),
        (0.6, "MISSED"),
        *[(None, "not measured")] * 3,
    ]
    assert "gram, bfloat16, K = 22, N >= 82M" in list(found)[2]


def test_bars_of_steps_are_of_the_worst_size():
    rows = [
        step_row("sequential", 7, 1.02),
        step_row("sequential", 7, 1.06, "124M"),
        step_row("stacked", 7, 1.01),
        step_row("stacked", 7, 1.029, "124M"),
        step_row("sequential", 50, 1.9),
        step_row("stacked", 22, 1.0),
        step_row("stacked", 22, None, "124M"),
    ]
    # One that finds no room is not asked.
    sizes = [step_row("stacked", 7, 1.02, "210M"), step_row("stacked", 7, None, "684M")]
    sizes[0]["host_synchronisations"] = "called a synchronizing operation"
    found = verdicts({"steps": rows, "graphs": [{"largest_difference": 0.0}]})
    assert list(found.values()) == [
        (0.0, "met"),
        (1.06, "MISSED"),
        (1.029, "met"),
        (1.0, "met"),
        (None, "not measured"),
        ("none", "met"),
    ]
    # Where a parameter is not a number, whichever GPU has it.
    graphs = [{"largest_difference": each} for each in (0.0, math.nan)]
    assert list(verdicts({"graphs": graphs}).values()) == [(math.inf, "MISSED")]
    # What no size has room for is not judged.
    crowded = [step_row("stacked", 50, None), step_row("stacked", 50, None, "124M")]
    assert list(verdicts({"steps": [*rows, *crowded]}).values())[3] == (None, "skipped")
    sizes += [step_row("sequential", 7, 1.0, "210M"), step_row("sequential", 7, None, "684M")]
    of_all = verdicts({"steps": rows[:4], "sizes": sizes})
    assert list(of_all.values())[:2] == [(1.06, "MISSED"), (1.029, "met")]
    assert list(of_all.values())[-1] == ("called a synchronizing operation", "MISSED")


@pytest.mark.parametrize(
    ("correct", "ratio", "on_gpu", "code"),
    [
        (True, 1.0, True, bars.BARS_MISSED),
        (True, None, False, bars.ALL_WELL),
        (False, None, True, bars.WRONG),
    ],
)
def test_a_missed_bar_fails_on_a_gpu_alone(correct, ratio, on_gpu, code):
    sections = {"steps": {"rows": [step_row("stacked", 7, ratio)]}}
    record = {"correct": correct, "bars": bars.bars(sections, on_gpu=on_gpu)}
    # Of four modes and numbers of domains, three were not measured.
    assert bars.exit_code(record) == code
    met = {"correct": True, "bars": [{"verdict": "met"}]}
    assert bars.exit_code(met) == 0
    assert bars.exit_code(met | {"bars": [{"verdict": "MISSED"}]}) == bars.BARS_MISSED


# A stand-in for compute-sanitizer: what it was told, then the program, then a summary.
SANITIZER = """
echo "$@" > {told}
echo "caching $PYTORCH_NO_CUDA_MEMORY_CACHING" >> {told}
while [ "$1" != "{python}" ]; do shift; done
"$@" || exit $?
echo "========= ERROR SUMMARY: {errors} errors"
exit {code}
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("errors", "code"), [(0, 0), (2, sanitizer.FOUND)])
def test_what_compute_sanitizer_finds(tmp_path, errors, code):
    told = tmp_path / "told"
    words = {"told": told, "python": sys.executable, "errors": errors, "code": code}
    script = shell_script(tmp_path / "compute-sanitizer", SANITIZER.format(**words))
    row = sanitizer.watched(str(script), "racecheck", torch.device("cpu"))
    assert row["correct"] == (errors == 0), row
    launches = re.search(r"(\d+) launches, 0 with wrong results", row["said"])
    assert int(launches[1]) > 50
    assert f"ERROR SUMMARY: {errors} errors" in row["said"]
    assert ("problem" in row) == bool(errors)
    assert told.read_text().startswith(f"--tool racecheck --error-exitcode {sanitizer.FOUND}")
    # Otherwise tensors share allocations, and a read past the end of one is not seen.
    assert "caching 1" in told.read_text()


def test_a_sanitizer_that_breaks_is_not_right(tmp_path):
    for code in (3, 0):
        script = shell_script(tmp_path / "compute-sanitizer", f"exit {code}")
        row = sanitizer.watched(str(script), "memcheck", torch.device("cpu"))
        assert not row["correct"]
        assert f"code {code}" in row["problem"]


@pytest.mark.parametrize("seconds", [1.0, -1.0])
def test_slow_sanitizers_share_the_time_and_are_skipped(seconds, tmp_path, monkeypatch):
    script = shell_script(tmp_path / "compute-sanitizer", "exec sleep 60")
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: str(script))

    def rows(session: Session) -> Iterator[Row]:
        on_gpu = Session(torch.device("cuda"), quick=True, end_s=session.end_s)
        return sanitizer.sanitizer(on_gpu)

    found = gpu.run_section(rows, CPU, seconds)
    assert [row["implementation"] for row in found["rows"]] == list(sanitizer.TOOLS)
    assert all("not finished" in row["skipped"] for row in found["rows"])
    assert bars.is_correct({"sanitizer": found})
    assert "CUT" not in report.how_it_went(found)


def test_what_a_slow_program_has_started_ends_with_it(tmp_path):
    life = tmp_path / "life"
    loop = f"(while :; do echo . >> {life}; sleep 0.05; done) & wait"
    code, _ = session.run_command([str(shell_script(tmp_path / "tool", loop))], 1.0)
    assert code is None
    end = life.read_text()
    time.sleep(0.3)
    assert life.read_text() == end != ""


def test_a_sanitizer_is_found_on_path_or_beside_nvcc(tmp_path, monkeypatch):
    shell_script(tmp_path / "toolkit/bin/nvcc", "echo release 13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("PATH", str(tmp_path / "path") + os.pathsep + os.environ["PATH"])
    for folder in ("toolkit/bin", "path"):
        tool = shell_script(tmp_path / folder / "compute-sanitizer", "")
        assert sanitizer.find_sanitizer() == str(tool)


def test_a_job_that_fails_says_so(tmp_path, monkeypatch):
    words = [sys.executable, "-c", "raise SystemExit('no such corpus')"]
    monkeypatch.setattr(job, "command", lambda *_: words)
    row = job.run("proxy", CPU, tmp_path, 2, 1, tmp_path)
    assert not row["correct"]
    assert row["problem"] == "code 1"
    assert row["lines"] == ["no such corpus"]
    # As torch says it, and as the command does.
    for said in ("CUDA out of memory", "There is not enough memory: Tried to allocate 13 GiB"):
        words[-1] = f"raise SystemExit('{said}')"
        row = job.run("base", CPU, tmp_path, 2, 1, tmp_path)
        assert row["skipped"] == "out of memory"
        # Nothing is wrong.
        assert bars.is_correct({"job": {"rows": [row], "cut": False}})
    words[-1] = "import time; time.sleep(60)"
    monkeypatch.setattr(job, "SECONDS", 0.2)
    row = job.run("base", CPU, tmp_path, 2, 1, tmp_path)
    assert row["skipped"] == "not finished within 0.2 s"
    assert bars.is_correct({"job": {"rows": [row], "cut": False}})
    (skipped,) = job.job(Session(torch.device("cpu"), True, tmp_path / "none"))
    assert "no corpus at" in skipped["skipped"]
    monkeypatch.setattr(job, "_missing", lambda: "ModuleNotFoundError: No module named 'datasets'")
    (skipped,) = job.job(Session(torch.device("cpu"), True, tmp_path))
    assert "No module named 'datasets'" in skipped["skipped"]


@pytest.mark.parametrize(("own", "of_row", "peak"), [(5, 0, None), (5, 3, 3), (7, 0, 7), (7, 9, 9)])
def test_a_section_says_the_peak_of_who_took_memory(own, of_row, peak, monkeypatch):
    """This process, which held 5 bytes before, or the one that a row is of."""
    said = {"reset_peak_memory_stats": None, "memory_allocated": 5, "max_memory_allocated": own}
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    row = {"correct": True} | ({"peak_bytes": of_row} if of_row else {})
    on_gpu = Session(torch.device("cuda"), quick=True)
    found = gpu.run_section(lambda _: iter([row]), on_gpu, 60.0)
    assert found["peak_bytes"] == peak
    assert ("memory not measured" in report.how_it_went(found)) == (peak is None)


def test_a_command_says_the_peak_of_its_own_memory():
    on_gpu = "import torch; torch.cuda.max_memory_allocated = lambda: 5_000"
    row = job.ended([sys.executable, "-c", on_gpu + job.PROGRAM, "--version"], 300.0)
    assert row["peak_bytes"] == 5_000
    assert row["command"] == "doge-fast --version"
    assert len(row["lines"]) == 1


@pytest.mark.parametrize(("gigabytes", "sequences"), [(80, 18), (40, 9), (24, 4), (2, 2)])
def test_the_job_takes_as_many_tokens_as_there_is_room_for(gigabytes, sequences, monkeypatch):
    monkeypatch.setattr(Session, "free_bytes", lambda _: gigabytes << 30)
    whole = Session(torch.device("cpu"), quick=False)
    assert job.sequences_of(whole, 7) == sequences
    words = {
        stage: job.command(stage, whole, ROOT, 7, sequences, ROOT) for stage in ("base", "proxy")
    }
    # As many on both sides.
    assert words["base"][-1] == str(7 * sequences)
    assert words["proxy"][-1] == str(sequences)


def test_without_a_gpu_it_says_what_to_do(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "sees no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["speed"])
    assert "there is no part speed; the parts are correctness, steps" in capsys.readouterr().err


def test_the_shell_script_takes_the_python_of_the_checkout_or_the_one_it_is_told(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    script = shutil.copy(ROOT / "benchmarks" / "gpu.sh", tmp_path / "benchmarks")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    for python in ("bin/python3", ".venv/bin/python", "own"):
        # By its whole path, since the caller may stand elsewhere.
        program = shell_script(tmp_path / python, f'echo "{python} $*"')
        chosen = {"PYTHON": str(program)} if python == "own" else {}
        printed = printed_by("bash", script, "--help", env=environment | {"PATH": path} | chosen)
        assert printed == f"{python} -P -m benchmarks.gpu --help\n"


def test_as_many_ranks_as_gpus(monkeypatch):
    started: list[list[str]] = []

    def launched(words: list[str], out: Path) -> Iterator[Row]:
        started.append(words)
        yield {"correct": True}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(ranks_part, "launched", launched)
    assert list(ranks_part.ranks(Session(torch.device("cuda"), quick=False))) == [{"correct": True}]
    (words,) = started
    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert words[words.index("--device") + 1] == "cuda"
    assert "--quick" not in words
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rows = list(ranks_part.ranks(Session(torch.device("cuda"), quick=True)))
    assert rows == [{"skipped": "needs two GPUs"}]


def checked(near: float, far: float) -> Row:
    """Of two ranks, whose weights are off by so much from those of one process."""
    alone = torch.full((2, 3), 0.5, dtype=torch.float64)
    off: Tensor = torch.tensor([near, far])[dist.get_rank()].double()
    return ranks_part.check("ddp", alone, alone + off)


@pytest.mark.parametrize(
    ("near", "far", "problem"),
    [
        (0.0, 0.0, None),
        (1e-12, 1e-12, None),
        (0.0, 1e-12, "other weights on other ranks"),
        (1e-6, 1e-6, "off by 1.0e-06"),
        (float("nan"), float("nan"), "other weights on other ranks"),
    ],
)
def test_what_is_right(ranks, near, far, problem):
    for row in ranks.run(2, checked, near, far):
        assert row["correct"] == (problem is None)
        assert row.get("problem") == problem


# As torchrun, whose ranks are in sessions of their own: asked to end, it ends them.
HANGS = """
import signal, subprocess, sys, time
lives = "import sys, time\\nwhile True: open(sys.argv[1], 'a').write('.'); time.sleep(0.05)"
child = subprocess.Popen([sys.executable, "-c", lives, sys.argv[1]], start_new_session=True)

def end(*_):
    child.kill()
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
while True:
    time.sleep(0.1)
"""


def test_ranks_that_fail_say_so_and_those_that_hang_are_ended_all_of_them(tmp_path):
    words = [sys.executable, "-c", "raise SystemExit('no NCCL')"]
    (row,) = ranks_part.launched(words, tmp_path / "rows.json")
    assert (row["correct"], row["problem"], row["lines"]) == (False, "code 1", ["no NCCL"])
    life = tmp_path / "life"
    life.touch()
    (row,) = ranks_part.launched(
        [sys.executable, "-c", HANGS, str(life)], tmp_path / "none", seconds=2.0
    )
    assert row["problem"] == "not finished within 2 s"
    end = life.read_text()
    time.sleep(0.3)
    assert life.read_text() == end != ""
