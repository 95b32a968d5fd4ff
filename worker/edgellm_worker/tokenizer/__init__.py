"""Text at the worker's edge: prompts in, ids out; ids in, text out; stop strings; chat templates."""

from edgellm_worker.tokenizer.output_text import OutputText, TextDelta
from edgellm_worker.tokenizer.tokenizer import Tokenizer

__all__ = ["OutputText", "TextDelta", "Tokenizer"]
