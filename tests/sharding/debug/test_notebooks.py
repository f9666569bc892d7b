"""Notebooks display figures, and results that have a picture, as IPython formats them."""

from __future__ import annotations

import base64
import pickle
import re
import sys
from typing import Any

import pytest

import shardmesh as sm
from shardmesh import P

pytest.importorskip("matplotlib")
formatters = pytest.importorskip("IPython.core.formatters")

MESH = sm.AbstractMesh((2, 2), ("dp", "tp"))
LAYOUT = sm.Layout.of(MESH, P("dp"), (5, 8))
PNG = b"\x89PNG\r\n"


def displayed(value: Any) -> dict[str, Any]:
    """Return what a notebook gets for a value of a cell, by mime type."""
    data, _ = formatters.DisplayFormatter().format(value)
    return data


def evaluated() -> Any:
    weight = sm.Layout.of(MESH, P(None, "tp"), (8, 8))
    return sm.debug.eval_shape(lambda x, w: (x @ w).redistribute(P()), LAYOUT, weight)


def timeline() -> Any:
    graph = sm.jit(lambda x: x.redistribute(P()).relu()).lower(LAYOUT).compile()
    return sm.debug.timeline(graph)


def schedule() -> Any:
    return sm.parallel.make_schedule("1f1b", 2, 3)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: sm.debug.explain(LAYOUT, P("tp", "dp")),
            "-&gt; P(&#x27;tp&#x27;, &#x27;dp&#x27;)",
        ),
        (evaluated, "received in total"),
        (lambda: evaluated().report, "redistribute"),
        (timeline, "rank 0, predicted"),
        (schedule, ""),
        (lambda: schedule().simulate(), ""),
    ],
    ids=["plan", "eval_shape", "report", "timeline", "schedule", "simulation"],
)
def test_results_are_displayed_as_text_and_picture(make, text):
    value = make()
    data = displayed(value)
    assert data["text/plain"] == repr(value)
    assert text in data["text/html"]
    assert ("<pre>" in data["text/html"]) == bool(text)
    (image,) = re.findall(r'<img src="data:image/png;base64,([^"]+)"', data["text/html"])
    assert base64.b64decode(image).startswith(PNG)


def test_figures_are_displayed():
    figure = sm.debug.visualize(LAYOUT, style="picture")
    data, metadata = formatters.DisplayFormatter().format(figure)
    assert data["image/png"].startswith(PNG)
    width, height = figure.get_size_inches()
    assert metadata["image/png"] == {"width": int(72 * width), "height": int(72 * height)}
    assert type(pickle.loads(pickle.dumps(figure))) is type(figure)


def test_results_without_a_picture_are_text():
    mesh = sm.AbstractMesh((80,), ("dp",))
    many_ranks = sm.debug.explain(sm.Layout.of(mesh, P("dp"), (160,)), P())
    with sm.debug.comm_report() as nothing_sent:
        pass
    long_schedule = sm.parallel.make_schedule("1f1b", 8, 100)
    invalid = sm.parallel.Schedule([["0B0", "0F0"]])
    for value in many_ranks, nothing_sent, long_schedule, long_schedule.simulate(), invalid:
        assert displayed(value) == {"text/plain": repr(value)}


def test_without_matplotlib_they_are_text(monkeypatch):
    plan = sm.debug.explain(LAYOUT, P())
    monkeypatch.setitem(sys.modules, "shardmesh.mesh.notebook_figure", None)
    assert displayed(plan) == {"text/plain": repr(plan)}
