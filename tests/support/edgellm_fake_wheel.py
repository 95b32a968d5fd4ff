"""A package tree that stands in for the vendor's wheel: its builder, and a loader that hands out the fake runtime.

The builder takes the vendor's real flags, refuses others, and writes a bundle with what it was told, except where the
environment variable FAKE_EDGELLM says otherwise (JSON): {"crash": ..., "kv": ..., "verify": ..., "defect": false, ...}.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

# Of `tensorrt-edgellm-build` 0.11.0, as far as a text model is concerned.
BUILDER_FLAGS = [
    "--engine-dir",
    "--model-dir",
    "--plugin-path",
    "--components",
    "--spec-type",
    "--dense",
    "--max-input-len",
    "--max-kv-cache-capacity",
    "--max-batch-size",
    "--max-lora-rank",
    "--max-verify-tree-size",
    "--max-draft-tree-size",
    "--tp-size",
]

_DETECT = """
import json, os
from types import SimpleNamespace
def detect_platform():
    if "machine" in json.loads(os.environ.get("FAKE_EDGELLM", "{}")):
        raise RuntimeError("Unknown board")
    return SimpleNamespace(gpu_sm=110, tensorrt_runtime_soname="libnvinfer.so.10")
"""

# Needs the tests' own folder on the path: its native module is the fake of fake_edgellm.py.
_RUNTIME = """
class NativeRuntimeError(RuntimeError):
    pass
def load():
    from tests.support.edgellm_setup import count_tokens
    from tests.support.fake_edgellm import Behaviour, Script, make_module
    words = [1000, 1001, 1002, 1003]
    script = lambda text: Script([words[:1], words[1:3], words[3:]], eos=frozenset())
    return make_module(Behaviour(script, count_tokens))
"""

_DRAFT = """
import json, os
class Tensor:
    def __init__(self, state): self.state = state
class Qwen35MtpDraftModel:
    def __init__(self):
        self.norm = lambda hidden: Tensor("after the norm")
    def forward(self, **inputs):
        hidden = Tensor("before the norm")
        normed = self.norm(hidden)
        has_defect = json.loads(os.environ.get("FAKE_EDGELLM", "{}")).get("defect", True)
        return {"logits": normed, "hidden_states": hidden if has_defect else normed}
    def __call__(self, **inputs):
        return self.forward(**inputs)
"""

_CLI = """
import argparse, json, os, pathlib, sys
def main(argv):
    told = json.loads(os.environ.get("FAKE_EDGELLM", "{}"))
    parser = argparse.ArgumentParser()
    for flag in FLAGS:
        parser.add_argument(flag)
    args = parser.parse_args(argv)
    print("building for", args.model_dir)
    if "crash" in told:
        raise RuntimeError(told["crash"])
    if "signal" in told:
        os.kill(os.getpid(), told["signal"])
    out = pathlib.Path(args.engine_dir)
    calls = out.parent / "calls.log"
    calls.write_text((calls.read_text() if calls.exists() else "") + json.dumps(argv) + "\\n")
    built = {name: int(getattr(args, name)) for name in ("max_input_len", "max_kv_cache_capacity", "max_batch_size")}
    base = {"vocab_size": 8192, "kv_cache_dtype": told.get("kv", "fp8"), "builder_config": built,
            "checkpoint_weight_bindings": told.get("bindings", [])}
    if args.spec_type == "none":
        (out / "llm.engine").touch()
        (out / "config.json").write_text(json.dumps(base))
        return
    built["max_verify_tree_size"] = told.get("verify", int(args.max_verify_tree_size or 60))
    from experimental.builder.models.qwen3_5 import modeling_qwen3_5_mtp as mtp
    outputs = mtp.Qwen35MtpDraftModel()(inputs_embeds=1)
    draft = {"kv_cache_dtype": told.get("draft_kv", base["kv_cache_dtype"]),
             "builder_config": {"max_draft_tree_size": int(args.max_draft_tree_size or 60)},
             "hidden_states": outputs["hidden_states"].state}
    for name, config in (("base", base), ("draft", draft)):
        (out / f"spec_{name}.engine").touch()
        (out / f"{name}_config.json").write_text(json.dumps(config))
"""


def write_fake_wheel(
    root: Path, *, version: str = "0.11.0", tensorrt: str = "10.16.0.72", draft_class: str = ""
) -> Path:
    files = {
        f"tensorrt_edgellm-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: tensorrt-edgellm\nVersion: {version}\n",
        f"tensorrt-{tensorrt}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {tensorrt}\n",
        "tensorrt_edgellm/__init__.py": "",
        "tensorrt_edgellm/runtime.py": _RUNTIME,
        "tensorrt_edgellm/_native/__init__.py": "",
        "tensorrt_edgellm/_native/detect.py": _DETECT,
        "experimental/__init__.py": "",
        "experimental/builder/__init__.py": "",
        "experimental/builder/cli.py": f"FLAGS = {BUILDER_FLAGS!r}\n" + textwrap.dedent(_CLI),
        "experimental/builder/models/__init__.py": "",
        "experimental/builder/models/qwen3_5/__init__.py": "",
        "experimental/builder/models/qwen3_5/modeling_qwen3_5_mtp.py": _DRAFT.replace(
            "Qwen35MtpDraftModel", draft_class or "Qwen35MtpDraftModel"
        ),
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def told(**behaviour: Any) -> str:
    return json.dumps(behaviour)
