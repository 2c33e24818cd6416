"""A key/value cache whose rows have lengths of their own, for any transformers model with plain attention.

Rows live in one tensor per layer. Each tick appends one token to every row at that row's own position, so rollouts of
unequal length share a batch without padding, and a row keeps its cache while others finish, wait for a tool, or change
roles.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

ATTENTION = "envace_ragged"


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one query a row without expanding shared key heads; longer queries go to SDPA.

    Memory traffic of keys and values bounds a decode tick on a CPU, and expanding them to the query heads multiplies
    it.

    Shapes: query (B, heads, 1, d), key and value (B, key_heads, T, d), mask (B, 1, 1, T) bool.
    """
    if query.shape[2] != 1 or attention_mask is None or attention_mask.dtype != torch.bool:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    rows, heads, _, width = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
    scores = torch.matmul(grouped, key.transpose(2, 3)) * (scaling or width**-0.5)
    scores.masked_fill_(~attention_mask, float("-inf"))
    output = torch.matmul(scores.softmax(-1), value)
    return output.reshape(rows, 1, heads, width), None


AttentionInterface.register(ATTENTION, ragged_attention)


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, (rows, key heads, capacity, d)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.length = 0, 0
        self.positions: Tensor = torch.empty(0)
        self.index: Tensor = torch.empty(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage is made by `reserve`."""

    def reserve(self, like: Tensor, *, rows: int, capacity: int) -> None:
        """Make or enlarge the storage; `like` has the shape of keys."""
        old = self.keys, self.values
        shape = (rows, like.shape[1], capacity, like.shape[3])
        self.keys, self.values = (torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2))
        self.is_initialized = True
        for new, previous in zip((self.keys, self.values), old, strict=True):
            if previous is not None:
                new[: previous.shape[0], :, : previous.shape[2]] = previous

    def storage(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all rows."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token a row, and return the part that this tick attends to."""
        keys, values = self.storage()
        keys[self.index, :, self.positions] = key_states[:, :, 0]
        values[self.index, :, self.positions] = value_states[:, :, 0]
        return keys[: self.rows, :, : self.length], values[: self.rows, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset."""
        return self.length, 0

    def get_seq_length(self) -> int:
        """Longest row."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class RaggedCache:
    """Rows of keys and values over all layers, with prefill, one-token ticks, and moves between rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = [RaggedLayer() for _ in range(model.config.num_hidden_layers)]
        self._cache = Cache(layers=list(self.layers))
        # Renamed from `past_key_values` in the course of transformers 5.
        self._keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.forward_tokens = 0
        """Tokens that went through the model, padding included."""

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[Sequence[int]], pad: int) -> None:
        """Run each prompt once and write its keys and values into all the rows that share it."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[*prompt, *[pad] * (longest - len(prompt))] for prompt in prompts])
        output = self.model.base_model(input_ids=ids, use_cache=True)
        cache = output["cache"] if "cache" in output else output["past_key_values"]
        self.forward_tokens += ids.numel()
        rows = torch.tensor([row for group in copies for row in group])
        source = torch.tensor([number for number, group in enumerate(copies) for _ in group])
        for layer, filled in zip(self.layers, cache.layers, strict=True):
            self._grow(layer, filled.keys, int(rows.max()) + 1, longest + 1)
            keys, values = layer.storage()
            keys[rows, :, :longest] = filled.keys[source]
            values[rows, :, :longest] = filled.values[source]

    @torch.inference_mode()
    def tick(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Append one token to rows 0..R-1 at the given positions; returns logits (R, vocabulary), float32.

        A row that has nothing to append repeats any token at its next free position; that slot is written again later.
        """
        rows, length = len(tokens), int(positions.max()) + 1
        index = torch.arange(rows)
        for layer in self.layers:
            self._grow(layer, layer.storage()[0], rows, length)
            layer.rows, layer.length, layer.positions, layer.index = rows, length, positions, index
        mask = (torch.arange(length) <= positions[:, None])[:, None, None, :]
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            use_cache=True,
            **{self._keyword: self._cache},
        )
        self.forward_tokens += rows
        logits: Tensor = output.logits[:, -1].float()
        return logits

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        for layer in self.layers:
            for storage in layer.storage():
                storage[target, :, :length] = storage[source, :, :length]

    def _grow(self, layer: RaggedLayer, like: Tensor, rows: int, capacity: int) -> None:
        """Room for so many rows and positions; capacity grows in chunks of 64."""
        have = (0, 0) if layer.keys is None else (layer.keys.shape[0], layer.keys.shape[2])
        if rows > have[0] or capacity > have[1]:
            layer.reserve(like, rows=max(rows, have[0]), capacity=max(-(-capacity // 64) * 64, have[1]))
