"""The notebook runs from top to bottom in a fresh kernel, and every cell shows its intended
output.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.xdist_group("tour")  # one worker of `pytest -n` runs it
NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def is_quiet(cell):
    return "quiet" in cell.metadata.get("tags", [])


def text_of(cell):
    """Return the output of a cell and the value of its last line."""
    parts = [
        out.text if out.output_type == "stream" else out.get("data", {}).get("text/plain", "")
        for out in cell.outputs
    ]
    return "\n".join(parts)


@pytest.fixture(scope="module")
def source():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def ran(source, tmp_path_factory):
    """The notebook after it has run; an error in a cell is raised here."""
    notebook = nbformat.from_dict(source.copy())
    where = {"metadata": {"path": str(tmp_path_factory.mktemp("tour"))}}
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3", resources=where).execute()
    return notebook


def cell_with(ran, text):
    (cell,) = [cell for cell in code_cells(ran) if text in cell.source]
    return cell


def test_it_is_valid_and_its_outputs_are_stripped(source):
    nbformat.validate(source)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_cells(source))


def test_every_cell_shows_something(ran):
    missing = [cell.source for cell in code_cells(ran) if not cell.outputs and not is_quiet(cell)]
    assert missing == []
    assert [cell.source for cell in code_cells(ran) if cell.outputs and is_quiet(cell)] == []


def test_no_warnings(ran):
    assert [
        out.text for cell in code_cells(ran) for out in cell.outputs if out.get("name") == "stderr"
    ] == []


def test_pictures_are_drawn(ran):
    for cell in code_cells(ran):
        asked = len(re.findall(r"^display\(|^plt\.show\(", cell.source, re.MULTILINE))
        shown = [
            out.data["image/png"] for out in cell.outputs if "image/png" in out.get("data", {})
        ]
        assert len(shown) == asked
        assert all(len(image) > 1000 for image in shown)
    assert sum("display(" in cell.source for cell in code_cells(ran)) > 2


@pytest.mark.parametrize(
    ("function", "ranks"),
    [("where_am_i", 8), ("parts", 4), ("gradients", 4), ("meet_all", 4), ("train", 4)],
)
def test_output_is_prefixed_with_the_rank(ran, function, ranks):
    text = text_of(cell_with(ran, f"def {function}("))
    assert set(re.findall(r"^\[rank (\d+)\]", text, re.MULTILINE)) == {
        str(rank) for rank in range(ranks)
    }


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("def layers(", "P('dp', None, unreduced={'tp'})\nP('dp', None)\n{'all_reduce': (1, 256)}"),
        ("def forbidden(", "implicit communication, which implicit_comm('forbid') refuses"),
        ("def matmul(", "local [2, 3], True)"),
        ("def meet_all(", "tensor([10., 20., 30., 40.])"),
        (
            "def mean_loss(",
            "varies over 'dp', and out_specs P() say that it is the same on every rank",
        ),
    ],
)
def test_outputs_of_cells(ran, cell, text):
    assert text in text_of(cell_with(ran, cell))


def test_gradients_equal_one_process(ran):
    text = text_of(cell_with(ran, "def gradients("))
    differences = [float(found) for found in re.findall(r"from one process: (\S+)", text)]
    assert len(differences) == 4
    assert max(differences) < 1e-5


def test_training_equals_one_process(ran):
    cells = [
        cell_with(ran, text)
        for text in ("def train(", "def plain_loss(", "def train_by_operators(")
    ]
    losses = [
        float(found) for cell in cells for found in re.findall(r"last loss ([\d.]+)", text_of(cell))
    ]
    assert len(losses) == 4 + 1 + 1
    assert max(losses) - min(losses) < 1e-5
    assert max(losses) < 0.05
