"""One row of a native call: what its channel and its response say, and where the two disagree."""

from __future__ import annotations

import pytest

from edgellm_worker.engine.api import FinishReason, RowUpdate
from edgellm_worker.engine.edgellm.rows import Row
from tests.support.edgellm_setup import EOS, job
from tests.support.edgellm_values import FinishReason as Native
from tests.support.edgellm_values import StreamChannel, StreamChunk


def row(max_new_tokens: int = 8) -> tuple[Row, StreamChannel]:
    made, channel = Row(1, job("x", max_new_tokens), 0, None), StreamChannel.create()
    made.attach(channel)
    return made, channel


def told(one: Row) -> list[RowUpdate]:
    updates = []
    while (update := one.next_update()) is not None:
        updates.append(update)
    return updates


def test_the_rest_of_a_row_whose_channel_never_finished_comes_from_the_response():
    one, channel = row()
    channel.push(StreamChunk([5, 6]))
    one.pull()
    one.take_rest([5, 6, 7, EOS], [], "END_ID")
    assert [token for update in told(one) for token in update.token_ids] == [5, 6, 7, EOS]
    assert one.is_done
    assert one.is_gone


@pytest.mark.parametrize(
    ("tokens", "reason", "said"),
    [
        ([5, 9], "LENGTH", "contradicts the tokens that it had streamed"),
        ([5, 6], "ERROR", "ended this row with an error of its own"),
    ],
)
def test_a_response_that_cannot_be_believed_fails_the_row(tokens: list[int], reason: str, said: str):
    one, channel = row()
    channel.push(StreamChunk([5, 6]))
    one.pull()
    one.take_rest(tokens, [], reason)
    *_, last = told(one)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert said in last.error


def test_a_response_after_the_rows_own_end_changes_nothing():
    one, channel = row(max_new_tokens=2)
    channel.push(StreamChunk([5, 6, 7]))
    one.pull()
    assert channel.is_cancelled()
    one.take_rest([5, 6, 7, 8], [], "ERROR")
    assert [(update.token_ids, update.finish_reason) for update in told(one)][-1] == ((6,), FinishReason.LENGTH)


def test_waiting_takes_the_next_chunk_and_gives_up_without_one():
    one, channel = row()
    one.wait(1)
    assert told(one) == []
    channel.push(StreamChunk([5], finished=True, reason=Native.END_ID))
    one.wait(1)
    (update,) = told(one)
    assert (update.token_ids, update.finish_reason) == ((5,), FinishReason.STOP)


def test_a_reason_that_is_not_known_fails_the_row_after_its_tokens():
    one, channel = row()
    channel.push(StreamChunk([5], finished=True, reason=Native.CANCELLED))
    one.pull()
    assert [update.finish_reason for update in told(one)] == [None, FinishReason.ERROR]
