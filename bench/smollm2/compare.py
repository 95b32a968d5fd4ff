"""Our llama family against transformers on one folder: the loss of a paragraph, the logits, a chat's greedy text.

    python -m bench.smollm2.compare FOLDER         needs the extra `oracle`; exit code 1 beyond the bound

The loss is the mean negative log-likelihood per token in nats, each side in float32 on the same weights and ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgellm_producer.wire import Job
from edgellm_worker.engine.api import GenerationRequest
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.load import EngineOptions, load_engine
from edgellm_worker.engine.models.registry import read_model
from edgellm_worker.engine.ops.reference import NumpyOps
from edgellm_worker.tokenizer import Tokenizer
from tests.support.tiny_engine import generate, logits_of

BOUND = 0.005
NUM_NEW_TOKENS = 32
PARAGRAPH = (
    "A lighthouse is a tower that carries a bright lamp at its top. Ships at sea use it to find out where they are "
    "and to keep away from rocks and shallow water. The first ones were open fires on hills near a harbour. Later, "
    "towers of stone were built, and keepers lived in them to look after the lamp every night. In 1823 a lens made "
    "of rings of glass was first used in France; it bends nearly all of the light into one flat beam, so that a "
    "small flame can be seen from more than 30 kilometres away. Today almost every lighthouse runs by itself, and "
    "satellites tell sailors their position, but many of the old towers are still kept because people like to visit "
    "them."
)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def mean_loss(logits: np.ndarray, ids: tuple[int, ...]) -> float:
    """logits [N, V] of ids [N] -> nats per predicted token."""
    scores = logits[:-1].astype(np.float64)
    peak = scores.max(axis=-1)
    log_sum = peak + np.log(np.exp(scores - peak[:, None]).sum(axis=-1))
    return float((log_sum - scores[np.arange(len(scores)), ids[1:]]).mean())


def our_logits(folder: Path, ids: tuple[int, ...]) -> np.ndarray:
    checkpoint = open_checkpoint(folder)
    return logits_of(read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft), NumpyOps(), ids)


def main() -> int:
    folder = Path(sys.argv[1])
    tokenizer, oracle_tokenizer = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer.encode(PARAGRAPH)
    assert list(ids) == oracle_tokenizer(PARAGRAPH, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        wanted = oracle(torch.tensor([ids])).logits[0].numpy()
    got = our_logits(folder, ids)
    ours, theirs = mean_loss(got, ids), mean_loss(wanted, ids)

    prompt = tokenizer.prompt_token_ids(Job(id="chat", messages=MESSAGES))
    assert tokenizer.decode(ids) == PARAGRAPH
    engine = load_engine("reference", open_checkpoint(folder), EngineOptions(1, 256, 512))
    (text,) = generate(engine, [GenerationRequest(prompt, NUM_NEW_TOKENS, eos_token_ids=tokenizer.eos_token_ids)])
    asked = oracle_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert list(prompt) == oracle_tokenizer(asked, add_special_tokens=False)["input_ids"]
    made = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
    )
    their_text = tuple(made[0, len(prompt) :].tolist())
    relative = abs(ours - theirs) / theirs
    result = {
        "tokens": len(ids),
        "loss": round(ours, 6),
        "loss_of_transformers": round(theirs, 6),
        "relative_difference": float(f"{relative:.2e}"),
        "bound": BOUND,
        "largest_logit_difference": float(f"{np.abs(got - wanted).max():.2e}"),
        "same_argmax": float((got.argmax(-1) == wanted.argmax(-1)).mean()),
        "same_greedy_text": text == their_text,
        "text": tokenizer.decode(text),
    }
    print(json.dumps(result, indent=1))
    return 0 if relative <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
