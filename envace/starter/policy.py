"""The starter policy: a small Llama with its own tokenizer, in the ordinary transformers form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from envace.models.formats import CHAT_TEMPLATE, CONTROL_TOKENS, END, PAD

SHIPPED = Path(__file__).parent / "checkpoint"
"""The warm-up checkpoint that comes with the package; `envace sft` on the starter recipe makes it."""

VOCABULARY = 2048
NUMBERS = [f"{number:03d}" for number in range(1000)]


def new_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on texts; digits stand in chunks of up to three, and each chunk is one token.

    Ids of tools are copied far more reliably as two known chunks than digit by digit.
    """
    tokenizer = Tokenizer(models.BPE())
    words = r"\p{N}{1,3}| ?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Every chunk of digits must become one token, however rare: it is shown often enough to be merged first.
    tokenizer.train_from_iterator([*texts, *(" ".join(NUMBERS) for _ in range(2000))], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(CONTROL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """A fresh model: 128 wide, 4 layers, 4 query and 2 key heads, about 1 M parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        attention_bias=True,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    _look_back_one(model, layers=(0, 1))
    return model


@torch.no_grad()
def _look_back_one(model: LlamaForCausalLM, *, layers: tuple[int, ...], sharpness: float = 4.0) -> None:
    """Start one key head of some layers as "look at the previous token", through its biases.

    Copying an id needs a head that knows what stood before each token; found by training alone that is a plateau of hundreds
    of steps. With constant query and key, a rotary score depends on distance only: rotating the key by one step puts its peak
    at distance one. It is an initialisation, not an architecture: training is free to undo it.
    """
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    queries = config.num_attention_heads // config.num_key_value_heads
    angles = model.model.rotary_emb.inv_freq.float()
    fast = torch.arange(len(angles)) < 6  # the slow rotations hardly tell neighbours apart
    margin = (1 - torch.cos(angles[fast])).sum() / math.sqrt(width)
    strength = fast * math.sqrt(sharpness / margin)
    for layer in layers:
        attention = model.model.layers[layer].self_attn
        query = torch.cat([torch.cos(-angles) * strength, torch.sin(-angles) * strength])
        key = torch.cat([strength, torch.zeros_like(angles)])
        attention.k_proj.bias[:width] = key
        attention.q_proj.bias[: queries * width] = query.repeat(queries)
