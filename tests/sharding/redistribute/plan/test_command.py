"""`python -m shardmesh plan`: its output, and errors for invalid arguments."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh.__main__ import main
from shardmesh.mesh.abstract_mesh import parse_mesh
from shardmesh.sharding.debug.plan_command import parse_dtype, parse_shape, parse_spec
from tests.sharding.strategies import AXES, mesh_shapes, ragged_specs, shapes

MESH = ("--mesh", "dp=2,tp=4", "--shape", "4096,4096")
MOVE = ("plan", *MESH, "P('dp','tp')", "P('tp','dp')")


def explained(src, dst, dtype=torch.float32, **options):
    mesh = sm.AbstractMesh((2, 4), ("dp", "tp"))
    return sm.debug.explain(sm.Layout.of(mesh, src, (4096, 4096), dtype), dst, **options)


def test_the_command_in_a_process_of_its_own():
    command = [sys.executable, "-m", "shardmesh", *MOVE, "--dtype", "bf16"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{explained(sm.P('dp', 'tp'), sm.P('tp', 'dp'), torch.bfloat16)}\n"


def test_without_arguments_it_prints_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    example = next(line for line in shown.splitlines() if "-m shardmesh plan" in line)
    assert """--dtype bf16 "P('dp','tp')" "P('tp','dp')\"""" in example


def test_the_example_of_the_help_runs(capsys):
    import shlex

    from shardmesh.sharding.debug.plan_command import EXAMPLE

    assert main(shlex.split(EXAMPLE)[3:]) == 0
    assert "all_to_all_v" in capsys.readouterr().out


def test_json(capsys):
    assert main([*MOVE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(explained(sm.P("dp", "tp"), sm.P("tp", "dp")).as_dict())
    )


@pytest.mark.parametrize(
    ("arguments", "topology"),
    [
        ((), sm.topology.Topology.default("cuda")),
        (("--device", "cpu"), sm.topology.Topology.default("cpu")),
        (("--node-size", "4"), sm.topology.Topology.default("cuda", node_size=4)),
        (("--crossing", "dp"), sm.topology.Topology.default("cuda", crossing=("dp",))),
        (
            ("--crossing", "dp,tp", "--device", "cpu"),
            sm.topology.Topology.default("cpu", crossing=("dp", "tp")),
        ),
    ],
)
def test_topology(arguments, topology, capsys):
    assert main(["plan", *MESH, *arguments, "P('dp')", "P()"]) == 0
    assert capsys.readouterr().out == f"{explained(sm.P('dp'), sm.P(), topology=topology)}\n"


def test_max_bytes(capsys):
    assert main([*MOVE, "--max-bytes", "20000000"]) == 0
    assert (
        capsys.readouterr().out
        == f"{explained(sm.P('dp', 'tp'), sm.P('tp', 'dp'), max_bytes=20_000_000)}\n"
    )


@pytest.mark.parametrize("transport", ["int8", "fp8"])
def test_transport(transport, capsys):
    assert main([*MOVE, "--transport", transport]) == 0
    shown = capsys.readouterr().out
    assert shown == f"{explained(sm.P('dp', 'tp'), sm.P('tp', 'dp'), transport=transport)}\n"
    assert f"all_to_all_v as {transport}" in shown


def test_picture(tmp_path, capsys):
    assert main([*MOVE, "--picture", str(tmp_path / "plan.svg")]) == 0
    assert "</svg>" in (tmp_path / "plan.svg").read_text()
    assert "all_to_all_v" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", *MESH, "P('dp')"], ["required: TO"]),
        (["plan", "--shape", "4", "P()", "P()"], ["required: --mesh"]),
        (["plan", "--mesh", "dp2", "--shape", "4", "P()", "P()"], ["--mesh", "'dp2'", "dp=2,tp=4"]),
        (["plan", "--mesh", "dp=0", "--shape", "4", "P()", "P()"], ["--mesh", "positive"]),
        (["plan", "--mesh", "dp=2,dp=2", "--shape", "4", "P()", "P()"], ["'dp' is used twice"]),
        (
            ["plan", "--mesh", "dp=2", "--shape", "4x4", "P()", "P()"],
            ["--shape", "'4x4'", "4096,4096"],
        ),
        ([*MOVE, "--dtype", "b16"], ["--dtype", "'b16'", "bf16 (torch.bfloat16)", "f32"]),
        ([*MOVE, "--device", "tpu"], ["--device", "cuda"]),
        ([*MOVE, "--node-size", "0"], ["node_size=0"]),
        ([*MOVE, "--node-size", "4", "--crossing", "dp"], ["not allowed with"]),
        ([*MOVE, "--crossing", "pp"], ["'pp' is not one of its axes"]),
        ([*MOVE, "--max-bytes", "1"], ["max_bytes=1:", "pass max_bytes="]),
        ([*MOVE, "--transport", "int4"], ["--transport", "'int4'", "int8", "fp8"]),
        (
            [*MOVE, "--transport", "int8", "--dtype", "f64"],
            ["transport='int8'", "16- and 32-bit floats"],
        ),
        ([*MOVE, "--picture", "plan.unknown"], ["unknown", "png"]),
        ([*MOVE, "--picture", "/nowhere/plan.png"], ["/nowhere/plan.png"]),
        (["plan", *MESH, "P('pp')", "P()"], ["names axis 'pp'"]),
        (["plan", *MESH, "P('dp', 'dp')", "P()"], ["FROM", "'dp' more than once"]),
        (["plan", *MESH, "P()", "P(None, None, 'dp')"], ["3 entries", "2 dims"]),
        (["plan", *MESH, "P()", "P('dp', sizes={'dp': (1, 2)})"], ["add up to 4096"]),
        (["plan", *MESH, "P()", "[Shard(0)]"], ["1 placements", "2 axes"]),
        (["plan", *MESH, "P()", "[Shard('dp'), Replicate()]"], ["TO", "P('dp')"]),
        (["plan", *MESH, "P(way='dp')", "P()"], ["FROM", "'way'"]),
        (["play"], ["'play'", "plan"]),
    ],
)
def test_errors_are_one_line_and_status_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    shown = capsys.readouterr()
    assert (caught.value.code, shown.out) == (2, "")
    assert shown.err.count("\n") == 1
    assert all(word in shown.err for word in words), shown.err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "P",
        "dp",
        "'dp'",
        "None",
        "P(",
        "P(dp)",
        "P(*x)",
        "P(**x)",
        "P(__import__('os').system('true'))",
        "sm.P()",
        "open('x')",
        "Shard(0)",
        "[P('dp')]",
        "[Shard(0), 1]",
        "P('dp') or P()",
        "lambda: P()",
        "[p for p in ()]",
        "P(f'{x}')",
        "P('a' + 'b')",
        "\0",
        "(" * 10000,
    ],
)
def test_only_literal_calls_are_understood(text):
    with pytest.raises(ValueError, match="expected a spec or placements in quotes, such as P"):
        parse_spec(text)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("P()", sm.P()),
        (" P( 'dp' ,\n None ) ", sm.P("dp", None)),
        ("PartitionSpec('dp')", sm.P("dp")),
        (
            "P('dp', ('tp','cp'), None, unreduced={'ep'})",
            sm.P("dp", ("tp", "cp"), None, unreduced={"ep"}),
        ),
        ("P(unreduced={'ep': 'max'})", sm.P(unreduced={"ep": "max"})),
        ("P('dp', sizes={'dp': (3,0,5)})", sm.P("dp", sizes={"dp": (3, 0, 5)})),
        ("[Shard(0), Replicate(), Partial('sum')]", [sm.Shard(0), sm.Replicate(), sm.Partial()]),
        ("(Shard(-1, order=1), Shard(1, order=0))", [sm.Shard(-1, order=1), sm.Shard(1, order=0)]),
        ("[Shard(0, sizes=(3, 0, 5))]", [sm.Shard(0, sizes=(3, 0, 5))]),
        ("[]", []),
    ],
)
def test_accepted_forms_of_specs(text, spec):
    assert parse_spec(text) == spec


@given(st.data())
def test_repr_of_a_spec_can_be_parsed(data):
    mesh_shape, shape = data.draw(mesh_shapes), data.draw(shapes())
    mesh = sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)])
    layout = sm.Layout.of(mesh, data.draw(ragged_specs(mesh, shape)), shape)
    assert parse_spec(repr(layout.spec)) == layout.spec
    assert parse_spec(repr(list(layout.placements))) == list(layout.placements)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("f32", torch.float32),
        ("float32", torch.float32),
        ("torch.float32", torch.float32),
        ("bf16", torch.bfloat16),
        ("i8", torch.int8),
        ("bool", torch.bool),
        ("float8_e4m3fn", torch.float8_e4m3fn),
    ],
)
def test_dtypes(text, dtype):
    assert parse_dtype(text) == dtype


@pytest.mark.parametrize("text", ["", "torch", "nn", "Tensor", "torch.torch.float32", "f33"])
def test_invalid_dtypes_raise(text):
    with pytest.raises(ValueError, match="unknown dtype"):
        parse_dtype(text)


def test_meshes_and_shapes():
    assert parse_mesh("dp=2, tp = 4") == sm.AbstractMesh((2, 4), ("dp", "tp"))
    assert parse_shape("3, 0,5") == (3, 0, 5)
    assert parse_shape("") == ()
