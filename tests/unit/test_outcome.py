"""A finished job's answer, packed without the model: it is the model's answer, byte for byte."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm_producer import wire
from edgellm_producer.wire import BatchInfo, ErrorInfo, FinishReason, Reply, Status, TokenLogprob, TopLogprob
from edgellm_worker import outcome
from edgellm_worker.outcome import Outcome, Speculative, Timings, Usage, packed

COUNTS = st.integers(0, 1 << 40)
FLOATS = st.floats(0, 1e12)
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob,
        token_id=COUNTS,
        token=st.text(),
        logprob=FLOATS,
        top_logprobs=st.lists(st.builds(TopLogprob, token_id=COUNTS, token=st.text(), logprob=FLOATS), max_size=2),
    ),
    max_size=2,
)
OUTCOMES = st.builds(
    Outcome,
    id=st.text("abc-123", min_size=1),
    status=st.sampled_from(Status),
    text=st.text(),
    token_ids=st.lists(COUNTS, max_size=3),
    logprobs=st.none() | LOGPROBS,
    seed=COUNTS,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error=st.none() | st.builds(ErrorInfo, code=st.text(), message=st.text(), field=st.none() | st.text()),
    usage=st.builds(Usage, COUNTS, COUNTS, COUNTS),
    timings=st.builds(Timings, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS),
    speculative=st.builds(Speculative, st.text(), FLOATS, FLOATS, st.lists(COUNTS, max_size=3), COUNTS, COUNTS, COUNTS),
    batch=st.builds(BatchInfo, id=st.text(), size=COUNTS, engine=st.text()),
    attempt=COUNTS,
)


@pytest.mark.parametrize("name", ["Usage", "Timings", "Speculative"])
def test_the_parts_have_the_models_fields_in_its_order(name):
    assert getattr(outcome, name)._fields == tuple(getattr(wire, name).model_fields)


def test_an_outcome_has_the_models_fields_but_for_what_its_writer_adds():
    assert ("v", *Outcome._fields, "worker", "reply_ttl_s") == tuple(Reply.model_fields)


@given(OUTCOMES)
def test_the_bytes_are_those_of_the_model(one):
    fields = {name: part._asdict() if hasattr(part, "_asdict") else part for name, part in one._asdict().items()}
    model = Reply(**fields, worker="w-1", reply_ttl_s=60)
    assert packed(one, worker="w-1", reply_ttl_s=60) == msgpack.packb(model.model_dump(exclude_none=True))


def test_a_job_that_never_ran_has_a_reply():
    reply = Reply(id="a", status=Status.EXPIRED, worker="old", attempt=2)
    assert wire.decode_reply(packed(reply, worker="w-1", reply_ttl_s=60)) == reply.model_copy(
        update={"worker": "w-1", "reply_ttl_s": 60}
    )
