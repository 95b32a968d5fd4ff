"""The sweep, on an engine whose times are known; the command, on the tiny checkpoint."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

import edgellm_worker
from edgellm_worker.bench import (
    PLAIN,
    Cell,
    Spread,
    SweepPlan,
    SweepResult,
    bench_requests,
    read_batch_sizes,
    read_drafts,
    sweep,
)
from edgellm_worker.cli import bench as command
from edgellm_worker.cli import main
from edgellm_worker.engine.api import Engine, GenerationRequest
from edgellm_worker.engine.errors import DemandError, EngineError
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from edgellm_worker.errors import ConfigError, ExitCode
from edgellm_worker.tokenizer import Tokenizer
from tests.support.counting_engine import DRAFT_S, PREFILL_S, ROUND_S, CountingEngine, Log
from tests.support.edgellm_setup import EOS, count_tokens, job, open_fake, write_bundle
from tests.support.fake_edgellm import Behaviour, Script

TINY = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"
NUM_TOKENS = 13
FOUR = [GenerationRequest((i + 1, i + 2, i + 3), NUM_TOKENS) for i in range(4)]
TWO_DRAFTS = SpeculativeConfig(2)


def run_sweep(
    log: Log,
    sizes: tuple[int, ...] = (1, 4),
    draftings: tuple[SpeculativeConfig, ...] = (PLAIN.drafting, TWO_DRAFTS),
    *,
    repeats: int = 1,
    requests: list[GenerationRequest] = FOUR,
    **kind: object,
) -> SweepResult:
    def open_engine(drafting: SpeculativeConfig) -> Engine:
        log.opened.append(drafting)
        return CountingEngine(log, drafting.num_speculative_tokens, **kind)

    return sweep(SweepPlan(sizes, draftings, repeats), open_engine, requests, log.clock)


def test_rates_are_of_the_steps_that_ran():
    """4 requests of 13 tokens: 12 rounds each without drafts, 6 with two drafts of which one is right."""
    result = run_sweep(Log())
    (serial,) = result.runs[PLAIN]
    assert serial.mean_step_ms == pytest.approx(1e3 * ROUND_S)
    assert serial.decode_tokens_per_s == pytest.approx(1 / ROUND_S)
    assert serial.tokens_per_s == pytest.approx(4 * 13 / (4 * (12 * ROUND_S + PREFILL_S)))
    assert serial.acceptance == 0.0
    (batched,) = result.runs[Cell(4, TWO_DRAFTS)]
    assert batched.mean_step_ms == pytest.approx(1e3 * (ROUND_S + 2 * DRAFT_S))
    assert batched.decode_tokens_per_s == pytest.approx(4 * 2 / (ROUND_S + 2 * DRAFT_S))
    assert batched.acceptance == 0.5
    assert [len(text) for text in batched.texts] == [NUM_TOKENS] * 4


def test_ratios_are_against_the_serialized_run_and_the_plain_one():
    by_cell = {(s.batch_size, s.drafts): s for s in run_sweep(Log()).summaries()}
    assert by_cell[4, "2"].over_serialized.median == pytest.approx(4.0)
    assert by_cell[4, "2"].over_plain.median == pytest.approx(4 * 2 / (1 + 2 * DRAFT_S))
    assert by_cell[1, "0"].over_plain == by_cell[1, "2"].over_serialized == Spread(1.0, 1.0, 1.0)


def test_a_sweep_without_zero_drafts_has_no_plain_run():
    assert {s.over_plain for s in run_sweep(Log(), draftings=(TWO_DRAFTS,)).summaries()} == {None}


def test_a_ratio_is_of_cells_of_one_repeat():
    """The second repeat is on a machine of half the speed: the rates spread, the ratios do not."""
    log = Log()
    rates = {1: [10.0, 5.0, 8.0], 4: [30.0, 15.0, 24.0]}
    run = run_sweep(log).runs[PLAIN][0]
    runs = {Cell(n, TWO_DRAFTS): [replace(run, decode_tokens_per_s=r) for r in of_n] for n, of_n in rates.items()}
    _, batched = SweepResult(runs, {}).summaries()
    assert batched.decode_tokens_per_s == Spread(24.0, 15.0, 30.0)
    assert batched.over_serialized == Spread(3.0, 3.0, 3.0)


def test_draft_lengths_take_turns_and_engines_are_closed():
    log = Log()
    result = run_sweep(log, repeats=3)
    assert log.opened == [PLAIN.drafting, TWO_DRAFTS] * 3
    assert log.closed == 6
    assert {len(runs) for runs in result.runs.values()} == {3}


def test_no_more_rows_than_the_batch_size_and_as_many_as_there_are():
    log = Log()
    run_sweep(log, (1, 3), (PLAIN.drafting,))
    warm_up, serial = 8, 4 * NUM_TOKENS
    assert set(log.row_counts[: warm_up + serial]) == {1}
    assert max(log.row_counts[warm_up + serial :]) == 3


def test_a_closed_batch_is_not_joined():
    """3 and then 1 request, not 3 with the fourth joining: two prefills of whole batches."""
    log = Log()
    requests = [replace(request, max_new_tokens=n) for request, n in zip(FOUR, (4, 9, 9, 9), strict=True)]
    run_sweep(log, (1, 3), (PLAIN.drafting,), requests=requests, in_flight=False)
    counts = log.row_counts[4 + 4 + 3 * 9 :]
    assert counts == [3] * 4 + [2] * 5 + [1] * 9


def test_rows_of_different_keys_never_meet():
    log = Log()
    run_sweep(log, (1, 4), (PLAIN.drafting,), key_of=lambda request: request.prompt_token_ids[0] % 2)
    assert set(log.row_counts) == {1}


def test_texts_that_differ_between_runs_are_counted():
    result = run_sweep(Log())
    assert result.num_different_texts == 0
    (run,) = result.runs[PLAIN]
    changed = replace(run, texts=((9,), *run.texts[1:]))
    assert SweepResult({**result.runs, PLAIN: [changed]}, {}).num_different_texts == 1


def test_drafts_that_the_engine_does_not_do_are_left_out():
    log = Log()

    def open_engine(drafting: SpeculativeConfig) -> Engine:
        log.opened.append(drafting)
        return CountingEngine(log, 0, method="off: checkpoint has no MTP")

    plan = SweepPlan((1, 2), (PLAIN.drafting, TWO_DRAFTS, SpeculativeConfig(2, adaptive=True)), 2)
    result = sweep(plan, open_engine, FOUR, log.clock)
    assert set(result.runs) == {PLAIN, Cell(2, PLAIN.drafting)}
    assert result.left_out == dict.fromkeys(("2", "adaptive"), "off: checkpoint has no MTP")
    assert log.opened.count(TWO_DRAFTS) == 1
    assert log.closed == len(log.opened)


def test_drafts_that_no_engine_opens_with_are_left_out_with_the_reason():
    log = Log()

    def open_engine(drafting: SpeculativeConfig) -> Engine:
        if drafting.adaptive:
            raise DemandError("this runtime's draft length is fixed")
        return CountingEngine(log, drafting.num_speculative_tokens)

    adaptive = SpeculativeConfig(2, adaptive=True)
    result = sweep(SweepPlan((1,), (PLAIN.drafting, TWO_DRAFTS, adaptive), 2), open_engine, FOUR, log.clock)
    assert set(result.runs) == {PLAIN, Cell(1, TWO_DRAFTS)}
    assert result.left_out == {"adaptive": "this runtime's draft length is fixed"}


def test_an_engine_that_does_none_of_the_drafts_is_an_error_that_says_why_once():
    def open_engine(_drafting: SpeculativeConfig) -> Engine:
        raise DemandError("quantization fp8: not here")

    with pytest.raises(DemandError, match=r"^quantization fp8: not here$"):
        sweep(SweepPlan((1,), (PLAIN.drafting, TWO_DRAFTS), 2), open_engine, FOUR, Log().clock)


def test_a_row_that_fails_ends_the_sweep():
    log = Log()
    with pytest.raises(EngineError, match="row 4: not a number"):
        run_sweep(log, error="not a number")
    assert log.closed == 1


def test_a_request_that_cannot_run_is_named():
    with pytest.raises(ConfigError, match="prompt 5: prompt: too long"):
        run_sweep(Log(), requests=[*FOUR, GenerationRequest(tuple(range(40)), 4)])


@pytest.mark.parametrize(("text", "sizes"), [("1,2,4", (1, 2, 4)), ("4", (1, 4)), (" 8, 2,2", (1, 2, 8))])
def test_batch_sizes_hold_the_serialized_run(text, sizes):
    assert read_batch_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "two", "1.5"])
def test_wrong_batch_sizes(text):
    with pytest.raises(ValueError, match="is not a list of batch sizes"):
        read_batch_sizes(text)


def test_adaptive_goes_up_to_the_largest_length_beside_it():
    assert read_drafts("3,0,adaptive") == (*map(SpeculativeConfig, (0, 3)), SpeculativeConfig(3, adaptive=True))
    assert read_drafts("adaptive") == (SpeculativeConfig(5, adaptive=True),)


@pytest.mark.parametrize("text", ["", "16", "1,", "-1", "adaptively"])
def test_wrong_drafts(text):
    with pytest.raises(ValueError, match="is not a list of 0 to 15"):
        read_drafts(text)


def test_requests_are_chats_and_come_round_again():
    tokenizer = Tokenizer(TINY)
    requests = bench_requests(tokenizer, ["Say a.", "Say b."], 3, 7)
    assert requests[0] == requests[2] != requests[1]
    assert tokenizer.has_chat_template
    assert len(requests[0].prompt_token_ids) > len(tokenizer.encode("Say a."))
    assert (requests[0].max_new_tokens, requests[0].eos_token_ids) == (7, tokenizer.eos_token_ids)


def test_the_vendors_runtime_is_swept_batch_by_batch(tmp_path):
    """Over the fake of its native module: calls of at most as many rows as the batch size, each row in one of them."""
    behaviour = Behaviour(lambda _text: Script([[10], [11, 12], [13, 14], [EOS]]), count_tokens)
    bundle = write_bundle(tmp_path, num_drafts=2)
    requests = [job(f"prompt {i}") for i in range(4)]
    plan = SweepPlan((1, 3), (TWO_DRAFTS,), 1)
    result = sweep(plan, lambda _: open_fake(bundle, behaviour), requests, time.perf_counter)
    assert [len(call["texts"]) for call in behaviour.calls] == [1, *[1] * 4, 3, 1]
    assert result.num_different_texts == 0
    assert {run.texts for runs in result.runs.values() for run in runs} == {((10, 11, 12, 13, 14, EOS),) * 4}


# --- the command ---

SMALL = ("--batch-sizes", "2", "--repeats", "1", "--requests", "2", "--tokens", "4")


def bench(*argv: str) -> int:
    return main(["bench", *argv], {})


def test_the_command_sweeps_the_bundled_checkpoint(capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Write a Python function `a(b)`.\n\nWrite a Python function `c(d)`.\n")
    assert bench(*SMALL, "--drafts", "0,2", "--prompts", str(prompts), "--json") == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    cells = {(cell["batch_size"], cell["drafts"]): cell for cell in document["cells"]}
    assert list(cells) == [(1, "0"), (1, "2"), (2, "0"), (2, "2")]
    assert document["num_different_texts"] == 0
    assert all(cell["decode_tokens_per_s"]["median"] > 0 for cell in cells.values())
    assert cells[1, "2"]["over_serialized"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert (document["engine"], document["model"]) == ("reference", TINY.name)


@pytest.fixture
def undrafted(monkeypatch):
    """The command on a counting engine that never drafts."""
    log = Log()
    monkeypatch.setattr(command, "load_engine", lambda *_: CountingEngine(log, 0, method="off: checkpoint has no MTP"))
    monkeypatch.setattr(command, "bench_requests", lambda *_: FOUR)


@pytest.mark.usefixtures("undrafted")
def test_default_drafts_narrow_with_a_line(capsys):
    assert bench(*SMALL) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == " ".join(command.COLUMNS).split()
    assert [line.split()[:2] for line in lines[1:3]] == [["1", "0"], ["2", "0"]]
    assert "drafts adaptive left out: off: checkpoint has no MTP" in lines
    assert lines[-1] == "every request got the same text in all runs"


@pytest.mark.usefixtures("undrafted")
def test_a_terminal_gets_a_drawn_table(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    assert bench(*SMALL) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "median (smallest to largest)" in out
    assert all(column in out for column in command.COLUMNS)


@pytest.mark.usefixtures("undrafted")
def test_drafts_asked_for_and_not_done_are_the_operators_mistake(capsys):
    assert bench(*SMALL, "--drafts", "0,3") == ExitCode.OPERATOR
    assert capsys.readouterr().err == "edgellm-worker: --drafts 3: off: checkpoint has no MTP\n"


def test_everything_wrong_is_told_at_once(capsys):
    assert bench("--batch-sizes", "0", "--drafts", "99", "--repeats", "0", "--tokens", "-1") == ExitCode.OPERATOR
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["--repeats", "--tokens", "--batch-sizes", "--drafts"]


@pytest.mark.parametrize("content", [None, "\n \n"])
def test_a_prompt_file_without_prompts(content, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_text(content)
    assert bench(*SMALL, "--prompts", str(file)) == ExitCode.OPERATOR
    assert str(file) in capsys.readouterr().err


def test_columns_are_as_wide_as_their_widest_cell():
    assert command.plain_table(("a", "bb"), [("long", "1"), ("x", "22")]) == ["   a  bb", "long   1", "   x  22"]
