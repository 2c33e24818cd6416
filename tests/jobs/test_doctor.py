"""`envace doctor` and `envace eval` on models and endpoints: what holds is told, and so is what does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import FAMILIES, tokenizer
from support.loopback import Asked, Reply, in_a_thread
from transformers import LlamaConfig, LlamaForCausalLM

from envace.cli import main
from envace.errors import ModelError, RunError
from envace.jobs import doctor as module
from envace.jobs.doctor import doctor
from envace.jobs.evaluate import evaluate
from envace.models.chat import ChatFormat
from envace.training.recipe import load_recipe

USAGE = {"prompt_tokens": 10, "completion_tokens": 5}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a model folder of a family: a tiny Llama of random weights with the family's tokenizer."""

    def build(name: str) -> Path:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer(name)), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        tokenizer(name).save_pretrained(tmp_path / name)
        return tmp_path / name

    return build


def failing(result: dict[str, Any]) -> list[str]:
    return [check["name"] for check in result["checks"] if not check["ok"]]


def test_everything_holds_on_the_starter() -> None:
    result = doctor("starter")
    assert (result["ok"], failing(result)) == (True, [])
    assert {"cache equals a full forward", "no forged turns"} <= {check["name"] for check in result["checks"]}


@pytest.mark.parametrize("name", FAMILIES)
def test_everything_holds_on_a_model_folder_of_each_family(name: str, folder: Callable[..., Path]) -> None:
    result = doctor(str(folder(name)))
    assert (result["ok"], failing(result)) == (True, [])
    assert len(result["checks"]) == 12


def test_the_command_prints_one_object_and_a_code(folder: Callable[..., Path], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["envace", "doctor", "--model", str(folder("qwen3")), "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True
    assert set(result["checks"][0]) == {"name", "ok", "detail"}


# --- planted faults --------------------------------------------------------------------------------------------


def test_a_separator_that_is_forgotten_is_found(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    header = ChatFormat.tool_header
    monkeypatch.setattr(
        ChatFormat,
        "tool_header",
        lambda self, *, first=True: type(header(self))(header(self, first=first).lstrip("\n")),
    )
    assert failing(doctor(str(folder("qwen3")))) == ["appended ids equal the template's", "parallel calls"]


def test_text_that_is_encoded_like_glue_is_found(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envace.models.formats.SafeEncoder.occurrences", lambda self, text: [])
    assert "no forged turns" in failing(doctor(str(folder("qwen3"))))


def test_a_cache_that_is_off_by_a_position_is_found(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from envace.models.ragged import RaggedCache

    mask = RaggedCache._mask
    monkeypatch.setattr(RaggedCache, "_mask", lambda self, positions, length: mask(self, positions - 1, length))
    assert "cache equals a full forward" in failing(doctor(str(folder("qwen3"))))


def test_logits_that_training_sees_differently_are_found(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = module.log_probabilities
    monkeypatch.setattr(module, "log_probabilities", lambda model, hidden, t: right(model, hidden, 1.0))
    assert failing(doctor(str(folder("qwen3")))) == ["training sees the sampled logprobs"]


# --- models that cannot be used --------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_is_one_error(folder: Callable[..., Path]) -> None:
    path = folder("qwen3")
    for file in path.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match="cannot load a model from"):
        doctor(str(path))


def test_a_folder_without_a_template_is_one_error(folder: Callable[..., Path]) -> None:
    path = folder("chatml")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        doctor(str(path))


def test_a_model_that_gives_nan_is_told(folder: Callable[..., Path]) -> None:
    path = folder("chatml")
    model = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(path)
    result = doctor(str(path))
    assert "a step samples" in failing(result)
    assert any("not finite" in check["detail"] for check in result["checks"])


def test_a_name_that_is_nothing_says_what_can_be_named() -> None:
    with pytest.raises(ModelError, match="owner/name"):
        doctor("no-such-model")


# --- endpoints -------------------------------------------------------------------------------------------------


def speak(asked: Asked) -> Reply:
    """A server that calls a tool once and then replies, and tells token ids where it is asked in them."""
    body = asked.json
    if "prompt" in body:
        ids = tokenizer("qwen3").encode('{"status": "pending"}\n</tool_response><|im_end|>')
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.1] * len(ids)}, "finish_reason": "stop"}
        return Reply({"choices": [{"text": "", **choice}], "usage": USAGE})
    answered = any(message["role"] == "tool" for message in body["messages"])
    if "tools" not in body or answered:
        message: dict[str, Any] = {"role": "assistant", "content": "Done, it is pending."}
    else:
        function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"order_id": "#W111111"}'}
        message = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    return Reply({"choices": [{"message": message, "finish_reason": "stop"}], "usage": USAGE})


def test_everything_holds_on_a_loopback_endpoint(folder: Callable[..., Path]) -> None:
    with in_a_thread() as server:
        server.answers(speak)
        result = doctor(f"{server.url}#tiny", tokenizer=str(folder("qwen3")))
    assert (result["ok"], failing(result)) == (True, [])
    assert [check["name"] for check in result["checks"]][-2:] == [
        "token ids and logprobs are told", "it rehearses in a tool message",
    ]  # fmt: skip


def test_an_endpoint_that_tells_no_ids_and_no_usage_is_told_so(folder: Callable[..., Path]) -> None:
    def sparse(asked: Asked) -> Reply:
        whole = json.loads(speak(asked).body)
        del whole["usage"]
        for choice in whole["choices"]:
            if "token_ids" in choice:
                whole["choices"] = [{"text": "Done.", "finish_reason": "stop"}]
        return Reply(whole)

    with in_a_thread() as server:
        server.answers(sparse)
        result = doctor(f"{server.url}#tiny", tokenizer=str(folder("qwen3")))
    assert failing(result) == ["usage is told", "token ids and logprobs are told"]


def test_an_endpoint_that_is_down_is_one_failed_check() -> None:
    result = doctor("http://127.0.0.1:9/v1#tiny")
    assert failing(result) == ["endpoint"] or failing(result)[0] == "a step samples"
    assert not result["ok"]


def test_an_endpoint_is_evaluated_in_the_real_environment() -> None:
    recipe = load_recipe({}, ["data.heldout=6", "data.unseen=0"])
    with in_a_thread() as server:
        server.answers(speak)
        result = evaluate(recipe, model=f"{server.url}#tiny")
        assert server.most <= 16
    assert result["n"] == 6
    assert result["stops"] == {"replied": 6}
    assert result["endpoint"]["steps"] == 12
    assert "fidelity" not in result


def test_an_endpoint_that_dies_is_nobodys_failure() -> None:
    recipe = load_recipe({}, ["data.heldout=2", "data.unseen=0"])
    with in_a_thread() as server:
        server.answers(Reply(b"<html>no</html>", kind="text/html"))
        with pytest.raises(RunError, match=r"2 of 2 attempts have no verdict.*EndpointError: .*html"):
            evaluate(recipe, model=f"{server.url}#tiny")


def test_a_limit_that_no_prompt_fits_is_no_score_of_zero() -> None:
    recipe = load_recipe({}, ["data.heldout=2", "data.unseen=0"])
    refusal = {"error": {"message": "This model's maximum context length is 32 tokens.", "code": 400}}
    with in_a_thread() as server:
        server.answers(Reply(refusal, status=400))
        with pytest.raises(RunError, match="context length"):
            evaluate(recipe, model=f"{server.url}#tiny")


def test_one_endpoint_failure_among_many_is_counted_and_stands_in_no_share() -> None:
    recipe = load_recipe({}, ["data.heldout=6", "data.unseen=0"])
    with in_a_thread() as server:
        server.answers(Reply(b"<html>no</html>", kind="text/html"), speak)
        result = evaluate(recipe, model=f"{server.url}#tiny")
    assert (result["undecided"], result["n"]) == (1, 5)
    assert sum(result["endpoint"]["failures"].values()) == 1


def test_a_mistyped_path_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("runs/nope", "./nope", "../nope/model", "/nope/model"):
        with pytest.raises(ModelError, match="There is no model"):
            doctor(name)
