"""The starter policy: a small Llama with its own tokenizer, in the ordinary transformers form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaAttention

from envace.models.formats import CHAT_TEMPLATE, CONTROL_TOKENS, END, PAD

SHIPPED = Path(__file__).parent / "checkpoint"
"""The warm-up checkpoint that comes with the package; `envace sft` on the starter recipe makes it."""

VOCABULARY = 2048
NUMBERS = [f"{number:03d}" for number in range(1000)]


def new_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on texts; digits stand in chunks of up to three, and each chunk is one token.

    Ids are copied far more reliably as two known chunks than digit by digit. A JSON key is one token with its quote and
    colon, so that the token before a value says which field it is: that is what a small model can look up.
    """
    tokenizer = Tokenizer(models.BPE())
    words = r'\p{N}{1,3}| ?#\p{L}| ?[\p{L}_]+(?:":"?|\()?| ?[^\s\p{L}\p{N}_]+|\s+'
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
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        attention_bias=True,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    _ready_to_copy(model)
    return model


@torch.no_grad()
def _ready_to_copy(model: LlamaForCausalLM, *, sharpness: float = 4.0, match: float = 24.0) -> None:
    """Start one key head of layer 0 as "look at the previous token", and one of layer 1 as "find where this token
    stood before".

    Together they continue a text that was seen before, which is how ids are copied from instruction and responses;
    found by training alone, that is a plateau of hundreds of steps. It is an initialisation, not an architecture:
    training is free to undo it. Three orthogonal subspaces keep apart what a token is, what stood before it, and what
    is to be said.

    Source: the previous-token and induction heads of Olsson et al., arXiv:2209.11895.
    """
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    basis, _ = torch.linalg.qr(torch.randn(config.hidden_size, config.hidden_size))
    is_token, stood_before, to_say = basis[:width], basis[width : 2 * width], basis[2 * width : 3 * width]
    for layer in model.model.layers:
        # Residual branches start silent, so that the two heads below are all there is at first.
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    before, find = (model.model.layers[number].self_attn for number in (0, 1))
    _look_back_one(before, model.model.rotary_emb.inv_freq.float(), sharpness)
    before.v_proj.weight[:width] = is_token * 2 * config.initializer_range
    before.o_proj.weight[:, :width] = stood_before.T
    slow = (model.model.rotary_emb.inv_freq < 0.007).repeat(2)  # matching must not depend on distance
    strength = (match * math.sqrt(width) / slow.sum()) ** 0.5 * slow[:, None]
    find.q_proj.weight[:width] = is_token * strength
    find.k_proj.weight[:width] = stood_before * strength
    find.v_proj.weight[:width] = to_say
    find.o_proj.weight[:, :width] = to_say.T


def _look_back_one(attention: LlamaAttention, angles: torch.Tensor, sharpness: float) -> None:
    """Constant query and key whose rotary score peaks at distance one, by `sharpness` over its neighbours."""
    fast = torch.arange(len(angles)) < 6  # the slow rotations hardly tell neighbours apart
    margin = (1 - torch.cos(angles[fast])).sum() / math.sqrt(2 * len(angles))
    strength = fast * math.sqrt(sharpness / margin)
    width = 2 * len(angles)
    attention.q_proj.bias[:width] = torch.cat([torch.cos(-angles) * strength, torch.sin(-angles) * strength])
    attention.k_proj.bias[:width] = torch.cat([strength, torch.zeros_like(angles)])
