"""The errors shown in docs/functional.md. (Its other examples run in test_pages.py.)"""

from __future__ import annotations

import doctest
import re

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.docs.pages import DOCS, blocks

PAGE = (DOCS / "functional.md").read_text()
SHOWN = re.findall(r"```python\n((?:(?!>>>|```).)*?)```\s+```text\n(.*?)```", PAGE, re.DOTALL)


def names():
    """Return the names defined by the first example of the page, and those of every page."""
    found = {"sm": sm, "P": sm.P, "torch": torch}
    for example in doctest.DocTestParser().get_examples(blocks(PAGE, "python")[0]):
        exec(example.source, found)
    return found


def test_every_shown_error_has_a_program():
    assert len(SHOWN) == len(blocks(PAGE, "text")) > 6
    assert len(SHOWN) == sum(">>>" not in block for block in blocks(PAGE, "python"))


@pytest.mark.parametrize(("program", "text"), SHOWN, ids=[text.split()[1] for _, text in SHOWN])
def test_error(program, text):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
        exec(compile(program, "train.py", "exec"), names())
    assert f"{raised.type.__name__}: {raised.value}".split() == text.split()


# -- the table of collectives ----------------------------------------------------------------------

TABLE = dict(re.findall(r"^\| `(.+?)`.*? \| (.*->.* \| .* \| .* \| .*) \|$", PAGE, re.MULTILINE))
PAIRS = [(0, 1), (1, 0)]


def ragged(x):
    here = int(sm.axis_index("a"))
    return sm.ragged_all_to_all(
        x, torch.zeros_like(x), [0, 1], [1, 1], [here, here], [1, 1], axis_name="a"
    )


CALLS = {  # by how the row begins, on a part of 2 elements
    "psum(": lambda x: sm.psum(x, "a"),
    "pmax(": lambda x: sm.pmax(x, "a"),
    "psum_scatter(": lambda x: sm.psum_scatter(x, "a", tiled=True),
    "all_gather(x": lambda x: sm.all_gather(x, "a", tiled=True),
    "all_gather(...": lambda x: sm.all_gather(x, "a", tiled=True, to="sharded"),
    "all_to_all(": lambda x: sm.all_to_all(x, "a", 0, 0),
    "ragged_all_to_all(": ragged,
    "ppermute(": lambda x: sm.ppermute(x, "a", PAIRS),
    "pshuffle(": lambda x: sm.pshuffle(x, "a", [1, 0]),
    "pbroadcast(": lambda x: sm.pbroadcast(x, "a", 1),
    'pcast(x, axis, to="sharded"': lambda x: sm.pcast(x, "a", to="sharded"),
    'pcast(x, axis, to="unreduced"': lambda x: sm.pcast(x, "a", to="unreduced"),
}
SPEC = {"S": P("a"), "R": P(), "U": P(unreduced="a")}
WORDS = {
    "permute": "point to point",
    "all_gather all_to_all": "counts, then all_to_all",
    "": "nothing",
}


def row(begins):
    (found,) = [cells for name, cells in TABLE.items() if name.startswith(begins)]
    return found.split(" | ")


def on_two_ranks(program):
    return sm.simulate(2)(lambda: program(sm.init_device_mesh("cpu", (2,), axis_names=("a",))))()[0]


def argument(mesh, letter):
    """Return a tensor of this type; each rank's part has 2 elements."""
    return {
        "S": sm.ones(4, mesh, P("a")),
        "R": sm.ones(2, mesh, P()),
        "U": sm.ones((2, 2), mesh, P("a")).sum(0),
    }[letter]


def test_every_row_is_tested():
    assert all(len([name for name in TABLE if name.startswith(begins)]) == 1 for begins in CALLS)
    assert len(TABLE) == len(CALLS)


@pytest.mark.parametrize("begins", CALLS)
def test_types_of_the_table(begins):
    takes, gives = row(begins)[0].split(" -> ")
    taken = set(re.findall(r"[SRU]", takes)) | ({"R"} if "S" in takes else set())

    def program(mesh):
        found = {}
        for letter in SPEC:
            for left in SPEC:
                try:
                    sm.shard_map(CALLS[begins], in_specs=SPEC[letter], out_specs=SPEC[left])(
                        argument(mesh, letter)
                    )
                except sm.errors.ShardingTypeError:
                    continue
                found.setdefault(letter, set()).add(left)
        return found

    # A part may be called one of several to be added, or put together.
    allowed = {"S": {"S", "U"}, "R": {"R", "S"}, "U": {"U"}}[gives]
    found = on_two_ranks(program)
    assert {letter: found.get(letter) for letter in taken} == dict.fromkeys(taken, allowed)
    assert "U" in taken or "U" not in found
    # `pcast` to "sharded" of what varies already changes nothing.
    assert "S" in taken or "S" not in found or gives == "S"


@pytest.mark.parametrize("begins", CALLS)
def test_communication_in_the_table(begins):
    _, forward, _, backward = row(begins)
    letter = "R" if begins.startswith("pcast") else "S"
    gives = row(begins)[0].split(" -> ")[1]

    def program(mesh):
        mapped = sm.shard_map(CALLS[begins], in_specs=SPEC[letter], out_specs=SPEC[gives])
        x = argument(mesh, letter).requires_grad_()
        mapped(x)
        with sm.debug.comm_budget() as one:
            y = mapped(x)
        with (
            sm.accumulate_grads(),
            sm.debug.comm_budget() as other,
        ):  # the reduction of what is replicated is not the collective's
            y.backward(torch.ones_like(y))
            moved = dict(other.by_op)
        return dict(one.by_op), moved

    def words(moved):
        text = " ".join(moved)
        return "two all_reduces" if moved.get("all_reduce", (0,))[0] == 2 else WORDS.get(text, text)

    assert [words(moved) for moved in on_two_ranks(program)] == [
        forward,
        backward.removesuffix(", back"),
    ]
