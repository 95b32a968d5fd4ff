"""Prompts to ids and ids to text, against the `tokenizers` library's own decoding."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

import edgellm_worker
from edgellm_producer.errors import JobRejected
from edgellm_producer.wire import Job
from edgellm_worker.engine.errors import CheckpointError
from edgellm_worker.tokenizer import Tokenizer
from edgellm_worker.tokenizer.detokenizer import Detokenizer, Vocabulary
from tests.support.tokenizers_small import checkpoint_folder, sentencepiece_like

TINY = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_qwen3_5_mtp.json"

tiny = Tokenizer(TINY)
tiny_backend = Backend.from_file(str(TINY / "tokenizer.json"))
fallback_backend = sentencepiece_like()
fallback = Vocabulary(fallback_backend, range(3))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    output = tokenizer.output_text()
    return [*(output.push([i]).text for i in ids), output.finish().text]


def test_recorded_prompts_and_answers_are_encoded_and_decoded_as_transformers_did() -> None:
    for prompt in json.loads(GOLDEN.read_text())["prompts"]:
        assert list(tiny.encode(prompt["prompt"])) == prompt["prompt_ids"]
        ids = [i for i in prompt["generated_ids"] if i not in tiny.eos_token_ids]
        assert tiny.decode(ids) == tiny_backend.decode(ids)
        assert "".join(streamed(tiny, ids)) == tiny.decode(ids)


def test_special_tokens_in_a_prompt_are_read_as_such_and_none_are_added() -> None:
    ids = tiny.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 8190
    assert ids[-1] == 8191
    assert tiny.encode("hi") == tuple(tiny_backend.encode("hi", add_special_tokens=False).ids)


def test_special_tokens_are_no_text_but_have_a_name() -> None:
    assert tiny.decode([8190, *tiny.encode("hi"), 8191]) == "hi"
    assert tiny.token_text(8191) == "<|im_end|>"


def test_eos_ids_are_the_union_of_generation_config_config_and_tokenizer(tmp_path: Path) -> None:
    """Scenario: several EOS ids -> union."""
    assert tiny.eos_token_ids == {8189, 8191}
    folder = checkpoint_folder(
        tmp_path,
        sentencepiece_like(),
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 9, "text_config": {"eos_token_id": [10]}},
        tokenizer_config={"eos_token": {"content": "</s>"}},
    )
    assert Tokenizer(folder).eos_token_ids == {2, 7, 8, 9, 10}


@given(st.lists(st.one_of(st.integers(0, 8300), st.integers(0, 260)), max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_byte_level_ids_decode_as_the_library_does_and_stream_to_the_same(ids: list[int]) -> None:
    expected = tiny_backend.decode(ids, skip_special_tokens=True)
    assert tiny.decode(ids) == expected
    assert "".join(streamed(tiny, ids)) == expected


def test_every_single_id_decodes_as_the_library_does() -> None:
    for i in range(8192):
        assert tiny.decode([i]) == tiny_backend.decode([i], skip_special_tokens=True)


def test_added_tokens_outside_the_byte_alphabet_are_plain_text() -> None:
    backend = Backend(models.BPE({"a": 0, "Ġ": 1, "Ã": 2, "©": 3}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("<｜x ▁y｜>", special=False)])
    vocabulary = Vocabulary(backend, ())
    for ids in ([0, 1, 4, 2, 3], [5, 0], [2, 5], [4, 3]):
        assert vocabulary.decode(ids) == backend.decode(ids)


utf8_ids = st.text(max_size=6).map(lambda text: [3 + b for b in text.encode(errors="replace")])
plain_ids = st.lists(st.integers(259, fallback_backend.get_vocab_size() - 1), max_size=4)


@given(st.lists(st.one_of(utf8_ids, plain_ids), max_size=8).map(lambda runs: [i for run in runs for i in run]))
@settings(max_examples=300, deadline=None)
def test_byte_fallback_ids_decode_as_the_library_does(ids: list[int]) -> None:
    """With one token in front, so that the library's strip of the text's first space does not reach these."""
    h = fallback_backend.token_to_id("h")
    assert fallback.decode([h, *ids]) == fallback_backend.decode([h, *ids])


@given(st.lists(st.integers(0, 290), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_byte_fallback_ids_stream_to_the_whole(ids: list[int]) -> None:
    detokenizer = Detokenizer(fallback)
    deltas = [detokenizer.push(i) for i in ids]
    assert "".join(deltas) + detokenizer.finish() == fallback.decode(ids)


def test_a_wrong_byte_spares_the_characters_around_it() -> None:
    ids = [3 + b for b in "é".encode() + b"\xff" + "é".encode() + b"\xe2\x82"]
    assert fallback.decode(ids) == "é\ufffdé\ufffd\ufffd"


def test_a_continuation_keeps_the_space_of_its_first_word() -> None:
    assert fallback.decode([fallback_backend.token_to_id("\u2581hello")]) == " hello"


def test_a_character_split_across_tokens_and_steps_is_held_back() -> None:
    """Scenario: a character split across tokens and steps -> valid UTF-8, concatenated deltas equal the final text."""
    ids = list(tiny.encode("a😀b"))
    deltas = streamed(tiny, ids)
    assert len(ids) > 3
    assert deltas[0] == "a"
    assert "".join(deltas) == "a😀b"
    assert not any("\ufffd" in delta for delta in deltas)


def test_max_tokens_cuts_inside_an_emoji() -> None:
    """Scenario: max_tokens cuts inside an emoji -> valid UTF-8, concatenated deltas equal the final text."""
    ids = list(tiny.encode("a😀"))[:-1]
    deltas = streamed(tiny, ids)
    assert deltas[-1] == "\ufffd"
    assert "".join(deltas) == tiny.decode(ids) == "a\ufffd"
    "".join(deltas).encode()


def test_a_decoder_of_another_family_is_refused_by_name(tmp_path: Path) -> None:
    backend = sentencepiece_like()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer(checkpoint_folder(tmp_path, backend))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Tokenizer(tmp_path)
    folder = checkpoint_folder(tmp_path, sentencepiece_like())
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(folder)
    folder = checkpoint_folder(tmp_path, sentencepiece_like(), generation_config={})
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not a JSON object"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"chat_template.jinja": b"\xff"}, r"chat_template\.jinja: chat template: UnicodeDecodeError"),
        ({"chat_template.jinja": None}, r"chat_template\.jinja: chat template: IsADirectoryError"),
        ({"tokenizer_config.json": b'{"chat_template": 5}'}, r"tokenizer_config\.json: chat template"),
        (
            {"tokenizer_config.json": b'{"chat_template": [{"name": "default"}]}'},
            r"tokenizer_config\.json: .*'template'",
        ),
        (
            {"tokenizer_config.json": b'{"chat_template": {"default": 5}}'},
            r"tokenizer_config\.json: chat template default",
        ),
        ({"config.json": b'{"eos_token_id": "</s>"}'}, r"config\.json: eos_token_id is '</s>', not an id"),
        ({"config.json": b'{"eos_token_id": [1, null]}'}, r"config\.json: eos_token_id is \[1, None\], not an id"),
    ],
    ids=["no text", "a folder", "a number", "a nameless entry", "a nested number", "a name as eos", "null as eos"],
)
def test_files_of_another_shape_are_named(tmp_path: Path, files: dict[str, bytes | None], said: str) -> None:
    folder = checkpoint_folder(tmp_path, sentencepiece_like())
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        Tokenizer(folder)


def test_a_special_token_without_content_is_none(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path, sentencepiece_like(), tokenizer_config={"bos_token": {"lstrip": True}})
    assert not Tokenizer(folder).has_chat_template


# Jobs


def test_a_job_is_tokenized_by_what_it_carries() -> None:
    assert tiny.prompt_token_ids(Job(id="a", prompt="hi")) == tiny.encode("hi")
    assert tiny.prompt_token_ids(Job(id="a", prompt_token_ids=[5, 6])) == (5, 6)
    chat = tiny.prompt_token_ids(Job(id="a", messages=[{"role": "user", "content": "hi"}]))
    assert chat == tiny.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_prompt_without_tokens_is_rejected_by_name() -> None:
    with pytest.raises(JobRejected) as caught:
        tiny.prompt_token_ids(Job(id="a", prompt=""))
    assert (caught.value.code, caught.value.field) == ("invalid_field", "prompt")


def test_messages_without_a_template_are_the_jobs_rejection(tmp_path: Path) -> None:
    tokenizer = Tokenizer(checkpoint_folder(tmp_path, sentencepiece_like()))
    with pytest.raises(JobRejected, match="no chat template") as caught:
        tokenizer.prompt_token_ids(Job(id="a", messages=[{"role": "user", "content": "hi"}]))
    assert (caught.value.code, caught.value.field) == ("template_error", "messages")


NAMED = [{"name": "default", "template": "hello"}, {"name": "tool_use", "template": "world"}]


def test_named_templates_are_chosen_by_whether_tools_are_given(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path, sentencepiece_like(), tokenizer_config={"chat_template": NAMED})
    tokenizer = Tokenizer(folder)
    chat = {"id": "a", "messages": [{"role": "user", "content": "hi"}]}
    tool = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    assert tokenizer.prompt_token_ids(Job(**chat)) == tokenizer.encode("hello")
    assert tokenizer.prompt_token_ids(Job(**chat, **tool)) == tokenizer.encode("world")
    assert tokenizer.prompt_token_ids(Job(**chat, **tool, tool_choice="none")) == tokenizer.encode("hello")


def test_the_template_file_wins_and_a_broken_one_is_the_operators(tmp_path: Path) -> None:
    folder = checkpoint_folder(
        tmp_path, sentencepiece_like(), chat_template="held", tokenizer_config={"chat_template": "hello"}
    )
    tokenizer = Tokenizer(folder)
    assert tokenizer.prompt_token_ids(Job(id="a", messages=[{"role": "user"}])) == tokenizer.encode("held")
    folder = checkpoint_folder(tmp_path, sentencepiece_like(), chat_template="{% if %}")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: chat template default: line 1"):
        Tokenizer(folder)
