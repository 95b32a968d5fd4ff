"""What a started engine shows of itself where no canary was recorded: a model too large for the reference engine.

    language   a plain text, read up to each of some places: nearly always the token that follows it is among the few
               that the engine holds for likely. Of numbers that are not the model's (a weight in another's place, wrong
               scales, positions, heads) it is one in thousands
    rounds     a text written in rounds, with drafts where the engine drafts, is the one that prompts alone give: every
               token is what the engine says after reading the prompt and the tokens before it
    company    the same text again in a full batch, beside others

The last two allow a near tie, as the canary does. Together they tie every pass that serves jobs to the language test.

What they do not prove: that numbers are as exact as they should be (a small error, or one of long contexts, passes),
and that it is this model rather than another that can write. Nor that drafts are good: bad ones cost speed alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from edgellm_worker.engine.api import Engine, GenerationRequest, SamplingParams, TokenLogprobs
from edgellm_worker.engine.errors import EngineError

TEXT: Final = '''def add(a, b):
    """Return the sum of a and b."""
    return a + b


def subtract(a, b):
    """Return the difference of a and b."""
    return a - b
'''
_FIRST_PLACE: Final = 6  # tokens; there is something to go by then
_MOST_PLACES: Final = 24
_LIKELY: Final = 20
_LEAST_SHARE: Final = 0.4
_USUAL_SHARE: Final = 0.8
"""The packaged model of 9 million parameters has 0.96, and with embeddings, head, layers, gates or the order of nibbles
wrong 0 to 0.25. A model that knows no program text may have little, so what is low and not absurd is only told.
"""
_NUM_TOKENS: Final = 12

_log = logging.getLogger(__name__)

Written = tuple[list[int], list[TokenLogprobs]]


def text_ids(model_dir: Path) -> tuple[int, ...] | None:
    """With what the tokenizer puts before a text; None where the checkpoint has none of the usual form."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return None
    return tuple(Tokenizer.from_file(str(path)).encode(TEXT).ids)


def check(engine: Engine, text_ids: tuple[int, ...], *, margin: float) -> None:
    """`text_ids` are those of `TEXT`; `margin` is what rounding explains, in logits. Raises `EngineError`."""
    prompt, limits = text_ids[: len(text_ids) // 2], engine.limits
    longest = len(prompt) + _NUM_TOKENS
    if limits.max_input_len < longest or limits.max_new_tokens(len(prompt)) < _NUM_TOKENS:
        _log.warning("no canary, and prompts are too short here for another check: it takes %d tokens", longest)
        return
    share = _language(engine, text_ids)
    written = _rounds(engine, prompt, margin)
    _company(engine, prompt, written, margin)
    _log.info(
        "no canary: %.0f%% of a plain text are among the %d likeliest tokens, and rounds, prompts and batches agree",
        100 * share,
        _LIKELY,
    )


def _language(engine: Engine, text_ids: tuple[int, ...]) -> float:
    """-> the share of places whose true token is among the likely ones."""
    end = min(len(text_ids), _FIRST_PLACE + _MOST_PLACES, engine.limits.max_input_len + 1)
    places = range(_FIRST_PLACE, end)
    answers = _write_all(engine, [text_ids[:place] for place in places], 1)
    likely = [{token for token, _ in logprobs[0].top} for _, logprobs in answers]
    share = sum(text_ids[place] in best for place, best in zip(places, likely, strict=True)) / len(places)
    words = f"of a plain text {share:.0%} of the tokens are among the {_LIKELY} that this engine holds for likely"
    if share < _LEAST_SHARE:
        raise EngineError(f"{words}: it does not compute a model that can read; no job was taken")
    if share < _USUAL_SHARE:
        _log.warning("%s: fewer than of most models", words)
    return share


def _rounds(engine: Engine, prompt: tuple[int, ...], margin: float) -> Written:
    """-> the text that rounds write, in a batch of its own."""
    (written,) = _write_all(engine, [prompt], _NUM_TOKENS)
    token_ids, _ = written
    prompts = [(*prompt, *token_ids[:count]) for count in range(len(token_ids))]
    for at, (answer, logprobs) in enumerate(_write_all(engine, prompts, 1)):
        _compare("rounds", at, token_ids[at], answer[0], logprobs[0], margin)
    return written


def _company(engine: Engine, prompt: tuple[int, ...], alone: Written, margin: float) -> None:
    """Every other row reads one token less, so that rows differ."""
    count = engine.limits.max_batch_size
    batch = _write_all(engine, [prompt[: len(prompt) - row % 2] for row in range(count)], _NUM_TOKENS)
    for token_ids, _ in batch[::2]:
        differing = [at for at, pair in enumerate(zip(token_ids, alone[0], strict=True)) if pair[0] != pair[1]]
        if differing:  # what follows a near tie is another text
            at = differing[0]
            _compare("company", at, token_ids[at], alone[0][at], alone[1][at], margin)


def _compare(what: str, at: int, found: int, wanted: int, logprobs: TokenLogprobs, margin: float) -> None:
    """`logprobs` are of `wanted`."""
    if found == wanted:
        return
    gap = logprobs.logprob - dict(logprobs.top).get(found, float("-inf"))
    if gap > margin:
        raise EngineError(
            f"this engine contradicts itself ({what}): token {at} is {found} where it is {wanted} otherwise, preferred"
            f" by {gap:.2f}, more than rounding explains ({margin}); no job was taken"
        )
    _log.info("%s: token %d is %d instead of %d, a near tie (%.4f)", what, at, found, wanted, gap)


def _write_all(engine: Engine, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[Written]:
    """Greedily, as many at once as the engine takes."""
    waiting = list(enumerate(prompts))[::-1]
    written: list[Written] = [([], []) for _ in prompts]
    while waiting or engine.num_rows:
        is_open = engine.traits.in_flight or not engine.num_rows
        while is_open and waiting and engine.num_rows < engine.limits.max_batch_size:
            row, prompt = waiting.pop()
            engine.add(row, GenerationRequest(prompt, num_tokens, SamplingParams(top_logprobs=_LIKELY)))
        for update in engine.step().updates:
            if update.error is not None:
                raise EngineError(f"this engine cannot write: {update.error}; no job was taken")
            written[update.row_id][0].extend(update.token_ids)
            written[update.row_id][1].extend(update.logprobs)
    return written
