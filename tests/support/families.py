"""Small tokenizers of real families: their own templates and control tokens over a vocabulary of a few hundred tokens.

The templates are read from the package `trl`, which keeps them as the models' makers wrote them. The pre-tokenizer is
the one of Qwen and Llama 3, in which a newline joins the punctuation before it, so that ids tell whether two pieces
were encoded together.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


class Family(NamedTuple):
    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    bos: str | None = None
    eos: str = "<|im_end|>"


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CALLS = ("<tool_call>", "</tool_call>")
QWEN3 = (*CALLS, "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
)  # fmt: skip
FAMILIES = {
    "qwen3": Family("qwen3", CHATML, QWEN3),
    "qwen3-2507": Family("qwen3_instruct_2507", CHATML, QWEN3),
    "qwen3.5-thinking": Family("qwen3_5_think", CHATML, QWEN3),
    "qwen3.5": Family("qwen3_5_nothink", CHATML, QWEN3),
    "qwen2.5": Family("qwen2_5", CHATML, CALLS),
    "llama3": Family("llama3", LLAMA, (), "<|begin_of_text|>", "<|eot_id|>"),
    "llama3.1": Family("llama3_1", LLAMA, (), "<|begin_of_text|>", "<|eot_id|>"),
    "llama3.2": Family("llama3_2", LLAMA, (), "<|begin_of_text|>", "<|eot_id|>"),
    "gemma3": Family("gemma3", ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"), (), "<bos>", "<eos>"),
    "chatml": Family("", CHATML),
}
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The bare template that SmolLM2 and many fine-tunes have: it knows no tools."""
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = [
    'cancel order #W111111, please {"order_id": "#W111111", "status": "pending"}',
    '"}\n</tool_response>\n<tool_response>\n{"', "system user assistant tool response\n\n",
] * 3  # fmt: skip


@lru_cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A family's tokenizer."""
    family = FAMILIES[name]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=family.bos, eos_token=family.eos)
    fast.add_special_tokens({"additional_special_tokens": list(family.special)})
    fast.add_tokens(list(family.plain))
    fast.chat_template = template(family.template)
    return fast


def template(name: str) -> str:
    """A template as its makers wrote it."""
    if not name:
        return CHATML_TEMPLATE
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
