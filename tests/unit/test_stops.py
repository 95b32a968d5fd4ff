"""Stop strings, what may be shown, and which tokens the text took."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from edgellm_worker.tokenizer import OutputText
from edgellm_worker.tokenizer.detokenizer import Detokenizer, Vocabulary

LETTERS = "abcé"


def byte_level(pieces: list[str]) -> Vocabulary:
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    return Vocabulary(backend, ())


PIECES = ["a", "b", "c", "ab", "bc", "ca", "abc", "aa", "Ã", "©", "cabb"]  # "Ã" and "©" are the two bytes of é
VOCABULARY = byte_level(PIECES)
ID = {piece: i for i, piece in enumerate(PIECES)}
EOS = 77


def run(
    steps: list[list[int]], stops: list[str], eos: frozenset[int] = frozenset()
) -> tuple[str, list[int], bool, list[str]]:
    """The row's text, the tokens kept, whether a stop ended it, and the deltas."""
    output = OutputText(Detokenizer(VOCABULARY, eos), stops)
    pushed: list[int] = []
    deltas, num_tokens, stopped = [], 0, False
    for step in steps:
        pushed += step
        delta = output.push(step)
        deltas.append(delta.text)
        num_tokens += delta.num_tokens
        stopped = delta.stopped
        if stopped:
            break
    if not stopped:
        delta = output.finish()
        deltas.append(delta.text)
        num_tokens += delta.num_tokens
    return "".join(deltas), pushed[:num_tokens], stopped, deltas


def settled(tokens: list[int]) -> str:
    """The text that tokens settle among themselves, without what the next one would."""
    detokenizer = Detokenizer(VOCABULARY)
    return "".join([detokenizer.push(token) for token in tokens])


def ids(*pieces: str) -> list[int]:
    return [ID[piece] for piece in pieces]


def test_a_stop_string_inside_a_multi_token_accept() -> None:
    """Scenario: stop string inside a multi-token accept, across tokens -> found on text."""
    text, tokens, stopped, _ = run([ids("a", "b", "c", "a", "a")], ["bc"])
    assert (text, tokens, stopped) == ("a", ids("a"), True)


def test_a_stop_string_across_steps_and_differently_tokenised() -> None:
    """Scenario: stop string tokenised differently in text -> found on text."""
    for steps in ([ids("a"), ids("b"), ids("c")], [ids("ab"), ids("c")], [ids("a"), ids("bc")], [ids("abc")]):
        text, _, stopped, _ = run(steps, ["bc"])
        assert (text, stopped) == ("a", True)


def test_token_ids_end_with_the_text() -> None:
    """Scenario: token ids, logprobs and counts past the stop -> all end at the same token."""
    assert run([ids("a", "bc")], ["bc"])[1] == ids("a")  # the stop's own token is not needed
    assert run([ids("abc", "a")], ["bc"])[1] == ids("abc")  # but it is when text before the stop came from it
    assert run([ids("bc", "a")], ["bc"])[:3] == ("", [], True)
    assert run([ids("a", "ca", "bc")], ["abc"])[:2] == ("ac", ids("a", "ca"))


def test_text_that_may_begin_a_stop_is_held_back_and_given_out_when_it_does_not() -> None:
    _, _, _, deltas = run([ids("a"), ids("b"), ids("b"), ids("a")], ["bc"])
    assert deltas == ["a", "", "b", "ba", ""]
    assert run([ids("a"), ids("b")], ["bc"])[:3] == ("ab", ids("a", "b"), False)


def test_held_tokens_are_not_counted_before_they_are_sure() -> None:
    output = OutputText(Detokenizer(VOCABULARY), ["bc"])
    assert output.push(ids("a", "b")).num_tokens == 1
    assert output.push(ids("ca")).num_tokens == 0
    assert output.push(ids("a")) == output.finish()  # stopped: nothing more


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert run([ids("cabb")], ["bb", "ab"])[0] == "c"
    assert run([ids("cabb")], ["b", "ab"])[0] == "c"


def test_a_stop_string_may_hold_a_character_of_several_tokens() -> None:
    assert run([ids("a", "Ã", "©")], ["é"])[:3] == ("a", ids("a"), True)
    assert run([ids("a", "Ã", "©", "b")], ["b"])[:3] == ("aé", ids("a", "Ã", "©"), True)
    assert run([ids("a", "Ã", "b")], ["c"])[:3] == ("a\ufffdb", ids("a", "Ã", "b"), False)


def test_an_eos_is_counted_but_is_no_text_even_when_the_tokenizer_has_letters_for_it() -> None:
    assert run([[*ids("a"), ID["b"]]], ["b"], eos=frozenset({ID["b"]}))[:3] == ("a", ids("a", "b"), False)
    assert run([[*ids("a"), EOS]], ["b"])[:3] == ("a", [*ids("a"), EOS], False)


def test_a_stop_string_completed_before_an_eos_in_the_same_step_wins() -> None:
    """Scenario: max_tokens is reached in the step in which a stop came earlier -> finish_reason "stop"."""
    text, tokens, stopped, _ = run([[*ids("a", "b", "c"), EOS]], ["b"])
    assert (text, tokens, stopped) == ("a", ids("a"), True)


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=25),
    cuts=st.lists(st.integers(1, 6), min_size=1),
    stops=st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=5), max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_how_many_tokens_a_step_brings_changes_nothing(tokens: list[int], cuts: list[int], stops: list[str]) -> None:
    steps, at = [], 0
    while at < len(tokens):
        n = cuts[len(steps) % len(cuts)]
        steps.append(tokens[at : at + n])
        at += n
    one_by_one = run([[t] for t in tokens], stops)
    grouped = run(steps, stops)
    assert grouped[:3] == one_by_one[:3]
    text, kept, stopped, _ = grouped
    whole = VOCABULARY.decode(tokens)
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    if stopped:
        assert any(whole[len(text) :].startswith(stop) for stop in stops)
        assert not kept or len(settled(kept[:-1])) < len(text)  # no token too many
        assert settled(kept).startswith(text)  # and none too few
    else:
        assert (text, kept) == (whole, tokens)


@pytest.mark.parametrize("stops", [[], ["ab"], ["é"]])
def test_no_delta_splits_a_character(stops: list[str]) -> None:
    for _, _, _, deltas in [run([[t] for t in ids("a", "Ã", "©", "b", "Ã", "©")], stops)]:
        assert not any("\ufffd" in delta for delta in deltas)
