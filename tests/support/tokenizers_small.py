"""Small tokenizer folders of both decoder families, built on the spot."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

SPACE = "\u2581"


def sentencepiece_like() -> Tokenizer:
    """Byte fallback with a leading-space strip, as Llama 2's: <unk> <s> </s>, 256 bytes, then a few pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += [SPACE, *"helowrd", "he", "ll", "llo", f"{SPACE}hello", f"{SPACE}wor", "é", "ld"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("l", "d")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def checkpoint_folder(path: Path, tokenizer: Tokenizer, **files: dict | str) -> Path:
    """A folder with a tokenizer.json and the given files: `config={...}` is config.json, text is written as it is."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in {"config": {}, **files}.items():
        if isinstance(content, str):
            (path / f"{name}.jinja").write_text(content)
        else:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path
