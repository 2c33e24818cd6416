"""What is exported is the plain model of its architecture, and says what the trained one says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from envace.errors import ConfigError, ModelError, RunError
from envace.jobs.export import export
from envace.jobs.models import load
from envace.jobs.train import train
from envace.models.formats import StarterFormat
from envace.runs import RunFolder
from envace.starter.policy import SHIPPED
from envace.training.checkpoints import Loaded, save_model
from envace.training.lora import add_lora, lora_state
from envace.training.recipe import LoraSection, load_recipe

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of what a folder's weights hold."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(IDS).logits.float()


@pytest.fixture
def run(tmp_path: Path, new_tiny: Callable[..., LlamaForCausalLM], form: StarterFormat) -> tuple[Path, torch.Tensor]:
    """A run folder as training with adapters leaves it, and the logits of the model in memory."""
    base, model = new_tiny(), new_tiny()
    save_model(tmp_path / "base", Loaded(model=base, format=form))
    (tmp_path / "base" / "vocab.json").write_text("{}")
    folder = RunFolder.create(tmp_path / "run", {"model": str(tmp_path / "base")}, resume=False)
    folder.log({"kind": "update", "update": 1})
    add_lora(model, LoraSection(rank=4), seed=0)
    with torch.no_grad():
        for tensor in lora_state(model).values():
            tensor.normal_(std=0.2)
    save_model(folder.path / "model", Loaded(model=model, format=form))
    save_model(folder.path / "best", Loaded(model=base, format=form), notes={"best.json": "{}"})
    return folder.path, logits(model)


def test_a_run_with_adapters_says_in_transformers_what_it_said_in_memory(
    run: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    folder, said = run
    result = export(str(folder), out=tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(model), said, atol=1e-4)
    assert not torch.allclose(logits(load(str(tmp_path / "base")).model), said, atol=1e-2)  # adapters did something
    assert (result["architecture"], result["dtype"], result["tied"]) == ("LlamaForCausalLM", "float32", True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_names_shapes_and_tokenizer_files_are_those_of_the_base(run: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, _ = run
    result = export(str(folder), out=tmp_path / "out")
    assert tensors(tmp_path / "out") == tensors(tmp_path / "base")
    assert "lm_head.weight" not in tensors(tmp_path / "out")  # tied: it is the embeddings
    assert set(result["files"]) == {file.name for file in (tmp_path / "base").iterdir()} - {"manifest.json"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (tmp_path / "base" / "tokenizer.json").read_text()
    assert "vocab.json" in result["files"]  # what the base has beside is taken from there


def test_the_template_and_the_ends_come_along(tmp_path: Path) -> None:
    export("starter", out=tmp_path / "out")
    told, shipped = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(SHIPPED)
    assert told.chat_template == shipped.chat_template
    assert told.encode("get_order #W123456") == shipped.encode("get_order #W123456")
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == shipped.eos_token_id


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")])
def test_weights_are_written_in_the_precision_that_is_asked_for(tmp_path: Path, dtype: str, stored: str) -> None:
    export("starter", out=tmp_path / "out", dtype=dtype)
    assert {kind for kind, _ in tensors(tmp_path / "out").values()} == {stored}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)


def test_the_stored_precision_is_kept(tmp_path: Path) -> None:
    assert export("starter", out=tmp_path / "out")["dtype"] == "bfloat16"  # the shipped warm-up is
    assert {kind for kind, _ in tensors(tmp_path / "out").values()} == {"BF16"}


def test_the_best_weights_of_a_run(run: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, _ = run
    export(str(folder), out=tmp_path / "out", best=True)
    assert not (tmp_path / "out" / "best.json").exists()
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(load(str(tmp_path / "base")).model)
    )


def test_an_untied_head_is_written(
    tmp_path: Path, new_tiny: Callable[..., LlamaForCausalLM], form: StarterFormat
) -> None:
    config = new_tiny().config
    config.tie_word_embeddings = False
    save_model(tmp_path / "base", Loaded(model=LlamaForCausalLM(config), format=form))
    result = export(str(tmp_path / "base"), out=tmp_path / "out")
    assert not result["tied"]
    assert "lm_head.weight" in tensors(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"model": "http://localhost:1/v1#x"}, ModelError, "An endpoint holds no weights"),
        ({"model": "nowhere"}, ModelError, "no model 'nowhere'"),
        ({"model": "nowhere", "best": True}, RunError, "nowhere is not a run folder"),
        ({"model": "starter", "dtype": "int4"}, ConfigError, "choose one of bfloat16, float16, float32"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, arguments: dict[str, str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        export(out=tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(RunError, match="already holds something"):
        export("starter", out=tmp_path)


def test_a_run_without_best_weights_says_so(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {}, resume=False)
    with pytest.raises(ModelError, match="keeps no best weights"):
        export(str(tmp_path / "run"), out=tmp_path / "out", best=True)


def test_what_adapters_trained_is_exported_end_to_end(tmp_path: Path) -> None:
    settings = {
        "updates": 1,
        "scenarios_per_update": 2,
        "group_size": 4,
        "data": {"train": 4},
        "eval": {"every": 0, "scenarios": 2},
        "limits": {"max_length": 120, "max_step_tokens": 24},
        "learning_rate": 1e-2,
        "lora": {"rank": 4},
    }
    train(load_recipe(settings), out=tmp_path / "run")
    export(str(tmp_path / "run"), out=tmp_path / "out")
    assert tensors(tmp_path / "out").keys() == tensors(SHIPPED).keys()
    trained = logits(load(str(tmp_path / "run")).model)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), trained)
    assert not torch.equal(trained, logits(load("starter").model))
