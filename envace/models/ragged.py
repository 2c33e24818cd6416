"""A key/value cache whose rows have lengths of their own, for any transformers model with plain attention.

Rows live in one tensor per layer. Each tick appends one token to every row at that row's own position, so rollouts of
unequal length share a batch without padding, and a row keeps its cache while others finish, wait for a tool, or change
roles.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from envace.errors import ModelError

ATTENTION = "envace_ragged"
SERVE_IT = "The local policy cannot keep that in its cache; serve the model and name its endpoint instead."


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
# Without a maker of masks of its own, an attention gets none, and layers with a window would attend to everything.
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@dataclass(frozen=True, kw_only=True)
class Aim:
    """Where one forward reads and writes."""

    rows: Tensor
    """(R,) rows of the storage."""
    positions: Tensor
    """(R, Q) position of each token in its row."""
    length: int
    """How many positions are attended to."""
    prefix: bool
    """Whether the rows are 0..R-1, which are read without a copy."""
    needed: int
    """Rows that the storage must have."""
    capacity: int
    """Positions that are written to, padding included."""


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, (rows, key heads, capacity, d)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.aim = Aim(rows=torch.empty(0), positions=torch.empty(0), length=0, prefix=True, needed=0, capacity=0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage is made by the first `update`."""

    def storage(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all rows."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write where this forward aims, and return the part that it attends to."""
        aim = self.aim
        self.keys = _grown(self.keys, key_states, rows=aim.needed, capacity=aim.capacity)
        self.values = _grown(self.values, value_states, rows=aim.needed, capacity=aim.capacity)
        self.is_initialized = True
        for storage, new in ((self.keys, key_states), (self.values, value_states)):
            storage[aim.rows[:, None], :, aim.positions] = new.transpose(1, 2)
        return self._read(self.keys), self._read(self.values)

    def _read(self, storage: Tensor) -> Tensor:
        """The first rows as a view, others as a copy."""
        rows = slice(len(self.aim.rows)) if self.aim.prefix else self.aim.rows
        return storage[rows, :, : self.aim.length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another, which need not be there yet."""
        if self.keys is None:  # nothing was read yet, so there is nothing to copy
            return
        keys, values = self.storage()
        self.keys, self.values = (_grown(s, s, rows=target + 1, capacity=length) for s in (keys, values))
        for storage in self.storage():
            storage[target, :, :length] = storage[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset."""
        return self.aim.length, 0

    def get_seq_length(self) -> int:
        """Longest row."""
        return self.aim.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class RaggedCache:
    """Rows of keys and values over all layers: chunks of tokens are read into some rows, single tokens into all."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Make an empty cache.

        Raises:
            ModelError: The model's attention is of a kind that such a cache cannot hold.
        """
        self.model = model
        config = model.config.get_text_config()
        if not model._supports_attention_backend:
            raise ModelError(f"Models of type {config.model_type!r} bring an attention of their own. {SERVE_IT}")
        self._window = _window(config)
        self._by_kind = getattr(config, "layer_types", None) is not None
        self.layers = [RaggedLayer() for _ in range(config.num_hidden_layers)]
        self._cache = Cache(layers=list(self.layers))
        self._keywords = {module: cache_keyword(module) for module in (model, model.base_model)}
        self.forward_tokens = 0
        """Tokens that went through the model, padding included."""

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int], *, pad: int) -> None:
        """Read a chunk of tokens into each row, the first at its start; no logits are made."""
        longest = max(map(len, tokens))
        ids = torch.tensor([[*chunk, *[pad] * (longest - len(chunk))] for chunk in tokens], device=self.model.device)
        # Padding is written behind the chunk, at positions that are written again before anything attends to them.
        ends = max(start + len(chunk) for start, chunk in zip(starts, tokens, strict=True))
        self._forward(self.model.base_model, rows, ids, starts, length=ends, capacity=max(starts) + longest)

    def tick(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to rows 0..R-1 at the given positions; returns logits (R, vocabulary), float32.

        A row that has nothing to append repeats any token at its next free position; that slot is written again later.
        """
        ids, length = torch.tensor(tokens, device=self.model.device)[:, None], max(positions) + 1
        output = self._forward(self.model, range(len(tokens)), ids, positions, length=length, capacity=length)
        logits: Tensor = output.logits[:, -1].float()
        return logits

    @torch.inference_mode()
    def _forward(
        self, module: nn.Module, rows: Sequence[int], ids: Tensor, starts: Sequence[int], *, length: int, capacity: int
    ) -> Any:
        """One pass of ids (R, Q) over the cache."""
        device = ids.device
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(ids.shape[1], device=device)
        prefix = list(rows) == list(range(len(rows)))
        aim = Aim(
            rows=torch.tensor(list(rows), device=device),
            positions=positions,
            length=length,
            prefix=prefix,
            needed=max(rows) + 1,
            capacity=capacity,
        )
        for layer in self.layers:
            layer.aim = aim
        self.forward_tokens += ids.numel()
        return module(
            input_ids=ids,
            attention_mask=self._mask(positions, length),
            position_ids=positions,
            use_cache=True,
            **{self._keywords[module]: self._cache},
        )

    def _mask(self, positions: Tensor, length: int) -> Any:
        """What each token attends to, (R, 1, Q, length); by kind of layer where there are several."""
        keys = torch.arange(length, device=positions.device)
        full = (keys <= positions[..., None])[:, None]
        if self._window is None:
            return full
        near = full & (keys > positions[..., None] - self._window)[:, None]
        return {"full_attention": full, "sliding_attention": near} if self._by_kind else near

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        for layer in self.layers:
            layer.copy(source, target, length)


def _grown(storage: Tensor | None, like: Tensor, *, rows: int, capacity: int) -> Tensor:
    """The storage with room for so many rows and positions; capacity grows in chunks of 64."""
    have = (0, 0) if storage is None else (storage.shape[0], storage.shape[2])
    rows, capacity = max(rows, have[0]), max(-(-capacity // 64) * 64, have[1])
    if storage is not None and (rows, capacity) == have:
        return storage
    new = torch.zeros((rows, like.shape[1], capacity, like.shape[3]), dtype=like.dtype, device=like.device)
    if storage is not None:
        new[: have[0], :, : have[1]] = storage
    return new


def cache_keyword(module: nn.Module) -> str:
    """Renamed from `past_key_values` in the course of transformers 5."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def keeps_all(config: Any) -> bool:
    """Whether every layer keeps the keys and values of all tokens, so that rows can share what they begin with."""
    try:
        return _window(config) is None
    except ModelError:
        return False


def _window(config: Any) -> int | None:
    """The window of sliding layers (all of them where the config names no kinds); None where none slides.

    Raises:
        ModelError: A layer keeps a state that is no list of keys and values, attention is capped, or positions are
            encoded by the length of what is read.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    found = kinds - {"full_attention", "sliding_attention"}
    if getattr(config, "attn_logit_softcapping", None) or config.model_type == "gpt_oss":
        found.add("capped attention logits or attention sinks")
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ("longrope", "dynamic"):
        found.add("rotary positions that change with the length")
    if found:
        raise ModelError(f"Models of type {config.model_type!r} have {', '.join(sorted(found))}. {SERVE_IT}")
    window = getattr(config, "sliding_window", None)
    slides = getattr(config, "use_sliding_window", True) if not hasattr(config, "layer_types") else False
    return int(window) if window and (slides or "sliding_attention" in kinds) else None


def buckets(lengths: Sequence[int], *, max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows of like length, each batch at most `max_tokens` after padding (a longer row stands alone)."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
