"""`Tuning.measure`: the best forms run, and what runs out of memory is dropped."""

from __future__ import annotations

import json
import signal
from functools import partial
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh.__main__ import main
from shardmesh.mesh.launch.local_processes import LaunchError
from shardmesh.sharding.tune.measure import measure_program, time_steps
from shardmesh.sharding.tune.program import hugging_face_build
from tests.sharding.tune import tiny

tune = partial(sm.tune, check=0)  # programs are evaluated in test_program_costs.py

BUILD = hugging_face_build("llama")


@pytest.fixture(scope="module")
def tuning() -> Any:
    fix = {"tp": 2, "pp": 1, "recompute": "none"}
    return tune(tiny.model(), tiny.ids(), devices=4, node=4, fix=fix, build=BUILD)


class Launcher:
    """Stands for processes: each program in turn takes these seconds, or raises."""

    def __init__(self, *results: float | Exception) -> None:
        self.results = list(results)
        self.programs: list[str] = []

    def __call__(self, function: Any, count: int, args: Any) -> list[Any]:
        text, device, steps, _ = args
        assert function is time_steps
        assert (device, steps) == ("cpu", 3)
        self.programs.append(text)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return [(result / (rank + 1), None) for rank in range(count)]


def out_of_memory() -> LaunchError:
    trace = "Traceback ...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    return LaunchError("launch: rank 1 of 4 raised OutOfMemoryError", 1, tb=trace)


def test_the_fastest_measured_form_is_first(tuning):
    launcher = Launcher(0.3, 0.1, 0.2)
    forms = [candidate.form for candidate in tuning.candidates]
    measured = tuning.measure(3, device="cpu", launcher=launcher)
    assert [x.form for x in measured.candidates] == [forms[1], forms[2], forms[0], *forms[3:]]
    assert [x.measured.seconds for x in measured.candidates[:3]] == [0.1, 0.2, 0.3]
    assert all(x.measured is None for x in measured.candidates[3:])
    assert measured.program == launcher.programs[1]
    assert not measured.reasons  # those of `tuning` explain another form
    assert json.loads(measured.json())["candidates"][0]["measured_seconds"] == 0.1
    assert "measured" in str(measured)
    assert "100 ms" in str(measured)
    assert "measured" not in str(tuning)


def test_reasons_stay_with_the_form_that_they_explain(tuning):
    assert tuning.reasons
    measured = tuning.measure(2, device="cpu", launcher=Launcher(0.1, 0.2))
    assert measured.best.form == tuning.best.form
    assert measured.reasons == tuning.reasons


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (out_of_memory(), "out of memory"),
        (LaunchError("rank 2 was killed", 2, signal=signal.SIGKILL), "out of memory"),
        (LaunchError("...", 1, tb="Traceback\nKeyError: 'x'"), "rank 1 failed: KeyError: 'x'"),
    ],
)
def test_what_does_not_run_is_dropped(tuning, error, reason):
    measured = tuning.measure(2, device="cpu", launcher=Launcher(error, 0.2))
    assert measured.best.form == tuning.candidates[1].form
    assert measured.reasons == (f"{tuning.best.form}: {reason}",)
    assert tuning.best.form not in [candidate.form for candidate in measured.candidates]


def test_no_form_runs(tuning):
    with pytest.raises(ValueError, match=r"no form runs here: .*: out of memory"):
        tuning.measure(1, device="cpu", launcher=Launcher(out_of_memory()))


def test_the_default_device(tuning, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tuning.measure(1, launcher=Launcher(0.1)).best.measured.seconds == 0.1  # on "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="for 4 devices, and this machine has 1"):
        tuning.measure(1)


def test_programs_without_a_model():
    tuning = tune(tiny.model(), tiny.ids(), devices=2, fix={"pp": 1, "tp": 1})
    with pytest.raises(ValueError, match="pass build= to tune"):
        tuning.measure(1, device="cpu")


def test_too_few_devices():
    present = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"this machine has {present}; tune for those"):
        measure_program("", present + 1, device="cuda", steps=1)


@pytest.mark.slow
def test_on_processes(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny.config(num_hidden_layers=2).to_dict()))
    options = ["--devices", "2", "--batch", "8", "--seq", "16", "--fix", "pp=1", "--top", "1"]
    options += ["--check", "0"]
    assert main(["tune", str(path), *options, "--measure", "2", "--on", "cpu", "--json"]) == 0
    ran = json.loads(capsys.readouterr().out)["candidates"]
    assert len(ran) == 2
    assert 0 < ran[0]["measured_seconds"] <= ran[1]["measured_seconds"]
