"""OpenAI batch files through the queue: `edgellm-producer batch IN.jsonl -o OUT.jsonl`.

Theory of operation. A run has a random id, kept in ``OUT.jsonl.journal`` until the run is complete. Line n of the input
is the job ``<run>.<n>``, and its answer is the output line whose ``id`` is ``batch_req_<run>.<n>``. Both are functions
of the run and the line number alone, hence whatever the moment of a crash:

    not submitted             the resumed run submits it
    submitted, not written    the resumed run submits the same id again, which the queue takes for the same job,
                              and reads the answer that is there or is coming
    written                   the output file says so; a half-written last line is cut off before the resumed run starts

Output lines come in order of completion; `custom_id` tells them apart, as in OpenAI's own batch output.
"""
