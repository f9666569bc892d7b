"""docs/kernels.md: its examples run, and its numbers agree with its table and the code."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from shardmesh.kernels.quantize import BLOCK, FORMATS, LARGEST, record_bytes
from shardmesh.kernels.symmetric import (
    MAX_PROGRAMS,
    MAX_RANKS,
    PAD_BYTES,
    AddNorm,
    Peers,
    reference_add_norm,
)
from shardmesh.mesh.comm.symmetric_memory import BUFFER_BYTES, STAGING_BYTES
from tests.docs.pages import DOCS, blocks, check_python_examples
from tests.kernels.device import DEVICE

PAGE = (DOCS / "kernels.md").read_text()


def test_python_examples():
    assert sum(">>>" in block for block in blocks(PAGE, "python")) > 3
    check_python_examples(PAGE)


# -- numbers ---------------------------------------------------------------------------------------


def rows(text: str) -> list[list[str]]:
    """Return the cells with the bytes moved by the kernels and others, from a page or from the
    whole table.
    """
    table = text.split("| case | who | launches |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def measured_table() -> str:
    (file,) = set(re.findall(r"\((\S+kernel-bytes\.md)\)", PAGE))
    return (DOCS / file).read_text()


def test_bytes_agree_with_the_table():
    measured = measured_table()
    known = [row[:5] for row in rows(measured)]
    assert len(rows(PAGE)) > 10
    assert [row for row in rows(PAGE) if row not in known] == []
    ours, cases = re.findall(r"each once, in (\d+) of (\d+) cases", measured)[0]
    assert ours == cases
    assert f"each once, in all {cases} cases" in PAGE


def test_torch_moves_more_bytes():
    """The smallest of what is more than ours by more than padding, the largest, and how many cases
    there are.
    """
    more: dict[str, float] = {}  # of each case, by those who move least of the others
    for case, _, _, _, _, factor, *_ in rows(measured_table()):
        if factor.endswith("x") and float(factor[:-1]) > 1.05:
            more[case] = min(float(factor[:-1]), more.get(case, 99.0))
    assert (
        f"{min(more.values())} to {max(more.values())} times as much\nin {len(more)} of them"
        in PAGE
    )


def test_limits():
    said = {
        f"parts over {STAGING_BYTES >> 20} MiB a rank",
        f"{BUFFER_BYTES >> 20} MiB of device memory",
        f"groups over {MAX_RANKS} ranks",
        f"in blocks of {BLOCK},",
        f"{1 + 4 / BLOCK:.2f} bytes an element",
        f"a box of one element travels as {record_bytes(1)} bytes",
        f"integers up to {LARGEST['int8']:.0f} | m / {2 * LARGEST['int8']:.0f} |",
        f"float8_e4m3fn up to {LARGEST['fp8']:.0f} | x / 16, or m / {1024 * LARGEST['fp8']:,.0f} "
        "where",
    }
    assert {text for text in said if text not in PAGE} == set()
    assert all(f'"{transport}"' in PAGE for transport in FORMATS)


# -- the epilogue ----------------------------------------------------------------------------------


def one_rank() -> Peers:
    """Return the shared memory of a group of one rank."""
    memory = torch.zeros((1 << 22) + PAD_BYTES, dtype=torch.uint8, device=DEVICE)
    address = torch.tensor([memory.data_ptr()], device=DEVICE)
    epochs = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=DEVICE)
    error = torch.zeros(1, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    return Peers(0, 1, memory[: 1 << 22], address, address + (1 << 22), epochs, error, spins=1)


def test_the_epilogue():
    """As shown on the page, on a group of one rank."""
    pytest.importorskip("triton")
    (program,) = [block for block in blocks(PAGE, "python") if ">>>" not in block]
    group = SimpleNamespace(size=1, shared={DEVICE: one_rank()})
    made = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(3, 64, generator=made).to(DEVICE) for _ in range(2))
    weight = torch.linspace(0.5, 2, 64, device=DEVICE)
    added, normed = reference_add_norm(
        x, AddNorm(residual, weight, 1e-6, residual.clone()), torch.float32
    )
    names = {"torch": torch, "x": x, "residual": residual, "weight": weight}
    exec(
        program,
        names | {"mesh": SimpleNamespace(group=lambda _: group, device=torch.device(DEVICE))},
        names,
    )
    torch.testing.assert_close(names["normed"], normed)
    assert torch.equal(residual, added)
