"""`envace export`: a model or the result of a run as a plain folder, for transformers, vLLM and llama.cpp."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from envace.errors import ConfigError, ModelError, RunError
from envace.jobs.endpoints import is_endpoint
from envace.jobs.models import resolve
from envace.runs import RunFolder
from envace.training.checkpoints import MANIFEST, load_model, save_model
from envace.training.keeping import BEST_FOLDER

DTYPES = ("bfloat16", "float16", "float32")
TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json")
"""What some converters read beside tokenizer.json; taken from the base model where it has them."""


def export(model: str, *, out: Path, dtype: str | None = None, best: bool = False) -> dict[str, Any]:
    """Write merged weights, tokenizer, chat template and generation config as one folder.

    Args:
        model: A run folder, or whatever else `--model` names.
        out: The folder; it must not hold anything.
        dtype: Of the weights; None keeps what they are stored in.
        best: Of a run, the weights of its best evaluation instead of the last ones.

    Returns:
        `out`, `source`, `architecture`, `parameters`, `dtype`, `tied` (whether the head is the embeddings), `files`.

    Raises:
        ConfigError: There is no such dtype.
        ModelError: There is no such model, or what was written is not the plain model of its architecture.
        RunError: `out` holds something, or the disk refuses.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}.")
    if is_endpoint(model):
        raise ModelError("An endpoint holds no weights to export. Name a run folder or a model folder.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} already holds something; an export begins with an empty folder. Name another --out.")
    source = _best(model) if best else resolve(model)
    name = dtype or _stored_dtype(source)
    loaded = load_model(source, dtype=name)
    save_model(out, loaded, dtype=getattr(torch, name))
    _add_tokenizer_files(out, model, source)
    _check_plain(out, loaded.model)
    (out / MANIFEST).unlink()  # it knows nothing of the files that were added
    return {
        "out": str(out),
        "source": str(source),
        "architecture": type(loaded.model).__name__,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "dtype": name,
        "tied": bool(loaded.model.config.get_text_config().tie_word_embeddings),
        "files": sorted(file.name for file in out.iterdir()),
    }


def _best(model: str) -> Path:
    folder = RunFolder.open(Path(model)).path / BEST_FOLDER
    if not folder.exists():
        raise ModelError(f"{model} keeps no best weights: it was trained with keep_best=false, or not evaluated yet.")
    return folder


def _stored_dtype(source: Path | str) -> str:
    """The precision that the weights of a model are stored in.

    The config of a model may say another than its files have, so a folder's own weights are asked.
    """
    if isinstance(source, Path):
        for file in sorted(source.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                kinds = {str(tensors.get_slice(name).get_dtype()) for name in tensors.keys()}  # noqa: SIM118
            return "float32" if "F32" in kinds else "float16" if "F16" in kinds else "bfloat16"
    config = AutoConfig.from_pretrained(source)
    return str(config.dtype or "float32").removeprefix("torch.")


def _add_tokenizer_files(out: Path, model: str, source: Path | str) -> None:
    """Copy what converters may read from where the model came from, unless it was written already."""
    for place in _origins(model, source):
        for name in TOKENIZER_FILES:
            found = place / name if isinstance(place, Path) else try_to_load_from_cache(place, name)
            if isinstance(found, str | Path) and Path(found).is_file() and not (out / name).exists():
                shutil.copyfile(found, out / name)


def _origins(model: str, source: Path | str) -> Iterator[Path | str]:
    """The model itself, and the one that its run began with."""
    yield source
    config = Path(model) / "config.json"
    if (Path(model) / "metrics.jsonl").exists() and config.exists():
        began = str(json.loads(config.read_text(encoding="utf-8"))["model"])
        try:
            yield resolve(began)
        except ModelError:  # it is gone; what the run wrote is enough for transformers
            return


def _check_plain(out: Path, model: PreTrainedModel) -> None:
    """Names and shapes must be those that the architecture itself has. Raises ModelError."""
    with torch.device("meta"):
        plain: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out, local_files_only=True))
    tied = set(plain.all_tied_weights_keys) if plain.config.get_text_config().tie_word_embeddings else set()
    wanted = {name: tuple(tensor.shape) for name, tensor in plain.state_dict().items() if name not in tied}
    found = dict(_shapes(out))
    if found != wanted:
        odd = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise ModelError(
            f"{out} is not a plain {type(model).__name__}: {len(odd)} tensors differ in name or shape, first {odd[0]}."
        )


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - the file is no mapping
                yield name, tuple(tensors.get_slice(name).get_shape())
