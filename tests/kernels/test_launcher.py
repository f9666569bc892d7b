"""Launches: by a compiled kernel that is kept, exactly as Triton would launch. Triton's own code
runs, on a device that is not there.
"""

import pytest

from tests.kernels.launched import answers

pytestmark = pytest.mark.xdist_group("assembly")  # one worker of `pytest -n` compiles


def test_second_launches_equal_those_of_triton():
    assert answers()["calls"] == []


def test_second_launches_do_not_go_through_triton():
    assert set(answers()["kept"].values()) == {0}


def test_other_arguments_take_the_kernel_that_triton_would():
    assert answers()["specialized"] == []


def test_a_profiler_that_starts_later_is_told_of_launches():
    assert answers()["hooks"] == ["move_rows"]
