"""`Pending`: a value to come."""

from __future__ import annotations

import pytest

from shardmesh.mesh.comm.pending import Pending
from shardmesh.mesh.comm.work import DONE, Work


class Ticket(Work):
    """A work that completes when it is told to."""

    def __init__(self) -> None:
        self.is_done = False
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def is_completed(self) -> bool:
        return self.is_done


def test_the_value_is_made_once():
    ticket = Ticket()
    pending = Pending.after(ticket, lambda: [1])
    assert pending.wait() is pending.wait()
    assert ticket.waits == 1


def test_is_completed_as_its_work():
    ticket = Ticket()
    pending = Pending.after(ticket, list)
    sizes = pending.then(len)
    assert [pending.is_completed(), sizes.is_completed()] == [False, False]
    ticket.is_done = True
    assert [pending.is_completed(), sizes.is_completed()] == [True, True]


@pytest.mark.parametrize("work", [None, DONE])
def test_without_work_the_value_is_there(work: Work | None):
    assert Pending.after(work, list).is_completed()


def test_unknown_works_count_as_not_completed_until_waited_for():
    pending = Pending(list)
    assert not pending.is_completed()
    pending.wait()
    assert pending.is_completed()


def test_then_calls_its_function_once():
    calls = []
    doubled = Pending(lambda: 2, DONE).then(lambda x: calls.append(x) or 2 * x)
    assert calls == []
    assert [doubled.wait(), doubled.wait(), calls] == [4, 4, [2]]


def test_an_error_is_raised_and_a_later_wait_tries_again():
    answers = iter([RuntimeError("not yet"), 3])

    def finish() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    pending = Pending(finish)
    with pytest.raises(RuntimeError, match="not yet"):
        pending.wait()
    assert pending.wait() == 3
