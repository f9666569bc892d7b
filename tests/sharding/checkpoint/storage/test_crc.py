import random
import zlib

import pytest
import torch

from shardmesh.sharding.checkpoint.storage.crc import crc32_combine
from shardmesh.sharding.checkpoint.storage.files import Sink


@pytest.mark.parametrize("length", [0, 1, 5, 1000, 70001])
def test_checksums_of_parts_combine(length):
    rng = random.Random(length)
    a, b = rng.randbytes(777), rng.randbytes(length)
    assert crc32_combine(zlib.crc32(a), zlib.crc32(b), length) == zlib.crc32(a + b)


@pytest.mark.parametrize("shape", [(), (3,), (100, 700)])
@pytest.mark.parametrize("torch_has_one", [True, False])
def test_checksum_of_a_tensor_is_computed_once(shape, torch_has_one, tmp_path, monkeypatch):
    """torch.save computes it if it can; in both cases the checksum is that of the file's bytes."""
    summed, whole = [], zlib.crc32
    monkeypatch.setattr(
        zlib,
        "crc32",
        lambda data, crc=0: (summed.append(memoryview(data).nbytes), whole(data, crc))[1],
    )
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(torch_has_one)
    try:
        with Sink(tmp_path / "file") as sink:
            sink.write(b"before")
            start, x = sink.piece(), torch.randn(shape)
            sink.save(x)
            sink.sync()
    finally:
        torch.serialization.set_crc32_options(before)
    assert sink.crc == whole((tmp_path / "file").read_bytes()[start:])
    assert (max(summed) < x.nbytes) == (torch_has_one and x.nbytes > 100_000)
