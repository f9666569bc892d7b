"""`make gpu-test` on stand-ins: what fails and what hangs is on the page, and everything after it
as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu import run as command
from tests.gpu.probes import NOT_RUN, PROBES, Probe, answer, main
from tests.gpu.steps import Step, pytest_lines, run, run_probes

ROOT, LIMIT_S = Path(__file__).parents[2], 60.0


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# Behaves as `probes.main`: a probe that fails ends the process.
MADE_UP = """
import json, os, sys, time
for name in sys.argv[1:]:
    print(json.dumps({"probe": name}), flush=True)
    if name == "hangs":
        time.sleep(600)
    if name == "crashes":
        print("Segmentation fault", flush=True)
        os._exit(3)
    status = "failed" if name == "fails" else "ok"
    print(json.dumps({"probe": name, "status": status, "found": "a | b"}), flush=True)
    if name == "fails":
        sys.exit(1)
"""
ANSWERS = {
    "passes": ("ok", "a | b"),
    "fails": ("failed", "a | b"),
    "hangs": ("stopped", "hangs: no answer within 1 s"),
    "crashes": ("failed", "the process ended: Segmentation fault"),
    "passes, too": ("ok", "a | b"),
}


def test_probes_that_fail_hang_or_crash_are_reported_and_the_others_answered() -> None:
    limits = {name: 1.0 if name == "hangs" else LIMIT_S for name in ANSWERS}
    found = run_probes(python(MADE_UP), limits, 10 * LIMIT_S)
    assert {one.name: (one.status, one.found) for one in found} == ANSWERS


def test_a_process_that_never_starts_is_a_failure_of_each_probe() -> None:
    found = run_probes(python("print('no torch')"), {"a": LIMIT_S, "b": LIMIT_S}, LIMIT_S)
    assert [(one.name, one.status, one.found) for one in found] == [
        (name, "failed", "the process ended: no torch") for name in "ab"
    ]
    assert [one.status for one in run_probes(python(""), {"a": LIMIT_S}, 0.0)] == ["skipped"]


def test_the_page_has_every_step_whatever_becomes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    page, table = tmp_path / "page.md", tmp_path / "kernels.md"
    before_the_last = f"assert 'hangs' in open({str(page)!r}).read()"
    table_step = python(f"open({str(table)!r}, 'w').write('# Kernels\\n\\n0.91 of the copy rate')")
    tests = "print('FAILED tests/a.py::test_b[c]\\n= 1 failed, 2 passed in 3.00s =')"
    steps = [
        Step("tests", python(f"{tests}; raise SystemExit(1)"), LIMIT_S),
        Step("hangs", python("import time; print('waits', flush=True); time.sleep(600)"), 1.0),
        Step("kernels", table_step, LIMIT_S, table),
        Step("the page is written before it ends", python(before_the_last), LIMIT_S),
        Step("memcheck", ["no such program"], LIMIT_S, missing="compute-sanitizer not found"),
    ]
    monkeypatch.setattr(command, "PROBES", {})
    assert command.carry_out(steps, True, "cpu", LIMIT_S, page, "make gpu-test") == 1
    text = page.read_text()
    for expected in (
        f"| torch | {torch.__version__}",
        "Failed or stopped: tests, hangs.",
        "| tests | failed |",
        "1 failed, 2 passed in 3.00s",
        "- `FAILED tests/a.py::test_b[c]`",
        "not done within 1 s",
        "0.91 of the copy rate",
        "| the page is written before it ends | ok |",
        "| memcheck | skipped | 0 | compute-sanitizer not found |",
    ):
        assert expected in text
    assert text.strip() in capfd.readouterr().out


def test_steps_for_which_no_time_is_left_are_named() -> None:
    outcome = run(Step("late", python("raise SystemExit(1)"), LIMIT_S), 0.0)
    assert (outcome.status, outcome.found) == ("skipped", "no time was left")


def test_what_pytest_printed() -> None:
    lines = [
        "FAILED tests/a.py::test - x",
        "===== 1 failed, 3 passed, 2 skipped in 71.20s (0:01:11) =====",
    ]
    assert pytest_lines(lines) == (
        "1 failed, 3 passed, 2 skipped in 71.20s (0:01:11)",
        ("FAILED tests/a.py::test - x",),
    )
    assert pytest_lines(["11 skipped in 0.07s"])[0] == "11 skipped in 0.07s"
    assert pytest_lines(["a line", "5 rows in all"]) == ("", ())
    assert pytest_lines(["FAILED x"] * 40)[1][-1] == "and 10 more"


def test_a_process_answers_until_a_probe_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(device: str) -> str:
        raise ValueError(f"on\n{device}")

    probes = {
        "passes": Probe(lambda device: device),
        "needs a GPU": Probe(fails, needs_cuda=True),
        "fails": Probe(fails),
    }
    with pytest.raises(SystemExit):
        main(probes, ["cpu", *probes, "passes"])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = {
        "passes": ("ok", "cpu"),
        "needs a GPU": ("not run", NOT_RUN),
        "fails": ("failed", "ValueError: on cpu"),
    }
    assert [one["probe"] for one in told] == [name for name in probes for _ in range(2)]
    assert {
        one["probe"]: (one["status"], one["found"]) for one in told if "status" in one
    } == expected


@pytest.mark.parametrize("name", PROBES)
def test_each_probe_answers_on_the_cpu(name: str) -> None:
    try:
        status, found = answer(PROBES[name], "cpu")
    finally:
        if dist.is_initialized():  # by the probe
            dist.destroy_process_group()
    assert (status, found) == ("not run", NOT_RUN) if PROBES[name].needs_cuda else status == "ok", (
        found
    )


def test_the_limits_add_up_to_twenty_minutes(tmp_path: Path) -> None:
    steps = command.quick_steps(tmp_path)
    assert command._PROBES_S + sum(step.limit for step in steps) <= 20 * 60
    assert all(
        (ROOT / word).exists()
        for step in steps
        for word in step.command
        if word.startswith(("tests/", "benchmarks/"))
    )


@pytest.mark.slow
def test_the_whole_command_on_the_cpu(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert command.main(["--stand-in", "--page", str(page)]) == 0
    text = page.read_text()
    assert "Nothing failed." in text
    assert all(name in text for name in PROBES)
    assert "| FSDP2, eager |" in text
