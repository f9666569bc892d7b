"""Selection between the torch and Triton implementations of a kernel."""

from __future__ import annotations

import sys
import threading
import warnings

import pytest
import torch

from shardmesh.kernels import backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def forgotten():
    """Forget what is cached about Triton, before and after a test."""

    def forget():
        backend._has_triton.cache_clear()
        backend._by_default.cache_clear()

    forget()
    yield
    forget()


def test_torch_on_the_cpu_kernels_on_gpus(forgotten):
    pytest.importorskip("triton")
    assert not backend.wants_kernels(CPU)
    assert backend.wants_kernels(CUDA)


def test_one_warning_without_triton(forgotten, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backend.wants_kernels(CPU)  # where nobody wants it, nobody misses it
    with pytest.warns(UserWarning, match="pip install triton"):
        assert not backend.wants_kernels(CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backend.wants_kernels(CUDA)


def test_explicit_choice(forgotten):
    with backend.using_kernels():
        assert backend.wants_kernels(CPU)
        with pytest.raises(KeyError), backend.using_kernels(False):
            assert not backend.wants_kernels(CUDA)
            raise KeyError
        assert backend.wants_kernels(CPU)
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(backend.wants_kernels(CPU)))
        thread.start()
        thread.join()
        assert elsewhere == [False]
    assert not backend.wants_kernels(CPU)
