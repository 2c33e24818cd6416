"""Recipes: everything a run depends on, in one YAML file. Unknown keys are errors that name the nearest one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from envace.errors import ConfigError
from envace.models.http import HttpSettings
from envace.rewards import WEIGHTS
from envace.rewards.judge import JudgeSection, refuse_secrets
from envace.rollout import Limits
from envace.rollout.groups import Layout, Setting
from envace.runs.trackers import TrackerName
from envace.training.advantages import AdvantageKind, AdvantageSettings
from envace.training.arms import ARMS, Arm, ArmFacts

RewardChoice = Literal["contract", "checklist", "trusting", "judged"]


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSection(Section):
    """Which scenarios are drawn; for a package folder, which of its scenarios are used."""

    train: int = Field(2000, ge=1)
    """Scenarios to train on. The starter world draws them; a package's are split in the order of its file."""
    heldout: int = Field(400, ge=1)
    """Held-out scenarios of the trained domains: other seeds, wordings and combinations."""
    unseen: int = Field(100, ge=0)
    """Scenarios of domains that are never trained on (starter world only)."""
    seed: int = Field(0, ge=0)
    """Seed of the scenarios, apart from the seed of the run."""


class SftSection(Section):
    """Supervised warm-up."""

    demonstrations: int = Field(12000, ge=1)
    """Demonstrations to learn from. In the starter world their scenarios are never those of RL; a package's are."""
    carelessness: float = Field(0.35, ge=0, le=1)
    """Chance that the demonstrator slips at each decision."""
    fresh_ids: bool = True
    """Whether a scenario that is demonstrated again gets other digits in its ids, so that they are not learned by
    heart. Switch it off where the digits of an id mean something."""
    rows: Literal["conversation", "round"] = "conversation"
    """One row a conversation, every step of it learned; or one a step, of which only that step is learned."""
    thinking: Literal["keep", "strip"] = "keep"
    """Whether recorded reasoning is learned, or left out."""
    roles: Literal["both", "act"] = "both"
    """Whose steps are learned."""
    steps: int = Field(900, ge=1)
    batch_size: int = Field(32, ge=1)
    lr: float = Field(3e-3, gt=0)
    """Peak AdamW rate of embeddings, norms and biases."""
    matrix_lr: float = Field(3e-3, gt=0)
    """Peak Muon rate of the matrices."""


class LimitsSection(Section):
    """Where a rollout ends if it does not end by itself."""

    max_steps: int = Field(10, ge=1)
    max_length: int = Field(448, ge=8)
    """Tokens of a transcript, and in layout `prompted` of each of the rehearser's."""
    max_step_tokens: int = Field(96, ge=1)
    invalid_calls: Literal["observe", "end"] = "observe"
    """Whether a call that breaks its schema is answered with the error, or ends the rollout (as released)."""
    truncated: Literal["score", "drop", "zero"] = "score"
    """What a rollout earns that a limit on steps or tokens cut: what it did so far, nothing at all, or 0."""
    deadline: float | None = Field(None, gt=0)
    """Seconds for a whole rollout, by the clock. With one, a run no longer repeats to the bit."""
    history: Literal["kept", "template"] = "kept"
    """Whether a user's next message is appended to the ids so far, or rendered anew with them by the template, which
    may drop earlier reasoning and then begins a new row of training."""


class LossSection(Section):
    """The loss: what a token adds to it, and how tokens become one number."""

    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(3.0, gt=1)
    """Bound on the loss of a token with a negative advantage, in units of the advantage; None for no bound."""
    kl: float = Field(1e-4, ge=0)
    """Weight of the KL to the starting policy on tokens with a policy gradient."""
    kl_estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """How that KL is had: from the sampled token, or in full over the vocabulary."""
    anchor_kl: float = Field(0.1, ge=0)
    """Weight of the full KL to the starting policy on look-up tokens."""
    entropy: float = Field(0.0, ge=0)
    """Weight of the entropy on tokens with a policy gradient; it is subtracted from the loss."""
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    """How losses of tokens become one number, over the whole update."""
    unit: Literal["output", "trajectory", "row"] = "trajectory"
    """What a sequence is, for `sequence-mean` and `constant`."""
    constant_length: int | None = Field(None, ge=1)
    """Tokens that each sequence is divided by, of `constant` only."""
    flat: Literal["keep", "mask", "drop"] = "keep"
    """What becomes of outputs of lone and flat cells, whose advantage is 0. `keep`: they keep their KL and count among
    the tokens. `mask`: no KL, but they count. `drop`: neither."""
    max_grad_norm: float = Field(1.0, gt=0)
    max_batch_tokens: int = Field(2048, ge=1)
    """Padded tokens that go through the model at once; the update is the same whatever it is, memory is not."""
    logit_chunk: int = Field(256, ge=1)
    """Tokens whose distributions over the vocabulary are alive at once; the update is the same whatever it is."""
    recompute: bool = False
    """Whether activations are computed again on the way back instead of kept: less memory, about a third more time.
    Prompts are then not shared."""
    share_prompts: bool = True
    """Whether a prompt that rows have in common is read once; the update is the same up to rounding."""

    @model_validator(mode="after")
    def _has_length(self) -> LossSection:
        """A length where one is divided by it."""
        if self.aggregation == "constant" and self.constant_length is None:
            raise ValueError("aggregation: constant needs constant_length, the tokens that a sequence is divided by")
        return self


class LoraSection(Section):
    """Low-rank adapters."""

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get adapters."""


class SimulatorSection(Section):
    """Who plays the environment in arm `grpo-simulator`; it is never trained."""

    model: str | None = None
    """What `model` may be, or an endpoint (`URL#NAME`); None is the policy as it is at the start."""
    temperature: float = Field(1.0, ge=0)
    endpoint: HttpSettings = Field(default_factory=HttpSettings)
    """How it is asked, where it is an endpoint."""

    @field_validator("model")
    @classmethod
    def _no_secrets(cls, model: str | None) -> str | None:
        """Recipes are written into run folders, so an address in one holds no credentials. Raises ConfigError."""
        if model is not None:
            refuse_secrets(model, "simulator.model")
        return model


class EvalSection(Section):
    """Evaluation in the real environment."""

    every: int = Field(10, ge=0)
    """Updates between evaluations during training; 0 for none but at the ends."""
    scenarios: int = Field(120, ge=1)
    """Held-out scenarios of an evaluation during training; in the starter world, others than those of `envace eval`."""
    temperature: float = Field(0.0, ge=0)
    """0 acts greedily."""
    fidelity: int = Field(100, ge=0)
    """Recorded episodes of the fixed fidelity probe."""


AlarmName = Literal["entropy", "repetition", "length", "flat", "unscored", "grad_norm", "kl"]
AlarmAction = Literal["warn", "stop", "off"]


class AlarmsSection(Section):
    """When a run is told that it may be collapsing; each alarm reads the metrics of updates alone."""

    action: AlarmAction = "warn"
    """What every alarm does: `warn` says it and goes on, `stop` writes a checkpoint and ends the run, `off` nothing."""
    actions: dict[AlarmName, AlarmAction] = Field(default_factory=dict)
    """The same for single alarms, e.g. `{repetition: stop}`; all others do what `action` says."""
    patience: int = Field(3, ge=1)
    """Updates in a row that must be beyond a threshold."""
    first: int = Field(5, ge=1)
    """Updates whose mean is what the run began with, for `entropy_drop` and `growth`."""
    entropy: float = Field(0.01, ge=0)
    """`entropy`: mean entropy of a role's tokens below this, nats."""
    entropy_drop: float = Field(0.1, ge=0, le=1)
    """`entropy`: below this share of what the run began with."""
    repetition: float = Field(0.5, ge=0, le=1)
    """`repetition`: share of trajectories that repeat themselves in a role above this."""
    length: float = Field(0.5, ge=0, le=1)
    """`length`: share of trajectories cut by a limit on tokens above this."""
    growth: float = Field(4.0, gt=1)
    """`length`: sampled tokens a trajectory above so many times what the run began with."""
    flat: float = Field(0.9, ge=0, le=1)
    """`flat`: share of cells in which all rewards are equal above this."""
    unscored: float = Field(0.25, ge=0, le=1)
    """`unscored`: share of trajectories without a reward above this."""
    grad_norm: float = Field(10.0, gt=1)
    """`grad_norm`: gradient norm above so many times the median of the updates before."""
    kl: float = Field(0.5, gt=0)
    """`kl`: KL to the starting policy above this, nats a token."""


class Recipe(Section):
    """A run. `envace recipe` prints the starter run."""

    name: str = "starter"
    """Name of the run folder, under `runs/`."""
    seed: int = Field(0, ge=0)
    """Seed of sampling, data order and initialisation."""
    world: str | list[str] = "starter"
    """`starter`, or one or more folders of environment packages and data sets (files, or `hub:owner/name`)."""
    model: str = "starter"
    """`starter` (the shipped warm-up), `new` (a fresh starter model, for sft), or a model folder."""
    arm: Arm = "envace"
    reward: RewardChoice = "contract"
    """Reward of rehearsed arms; arms that execute are rewarded by the scenario's own checks."""
    updates: int = Field(40, ge=1)
    scenarios_per_update: int = Field(16, ge=1)
    group_size: int = Field(8, ge=2)
    """Rollouts of each scenario. With 1 there is no baseline."""
    groups_at_once: int | None = Field(None, ge=1)
    """Groups whose rollouts are under way at once, which bounds the memory of their caches; None is all."""
    learning_rate: float = Field(2e-4, gt=0)
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of both roles in training."""
    gate: bool = True
    """With reward `judged`: whether the user speaks again only after a turn that passed what its checklist requires."""
    layout: Layout = "shared"
    """What the rehearser sees: `shared`, the actor's own transcript, which it continues; `prompted` (the paper's), a
    prompt of its own with instruction, tools, history and the call."""
    grounding: Literal["none", "reference"] = "none"
    """Whether a prompted rehearser is shown every recorded call of the scenario with its result (as released)."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """Files that take the place of prompts (`envace/prompts`)."""
    simulator: SimulatorSection = Field(default_factory=SimulatorSection)
    rehearser: str | None = None
    """Model that the second policy of arm `per-role` starts from; None takes `model`."""
    resample: int = Field(0, ge=0)
    """How often groups whose rewards are all equal are replaced by groups of further scenarios, an update."""
    weight_decay: float = Field(0.0, ge=0)
    weights: dict[str, float] = Field(default_factory=lambda: dict(WEIGHTS))
    """Weights of the reward's parts; a part that is not named keeps its own."""
    advantage: AdvantageKind | None = None
    """What a reward is compared with: its cell, the whole update, or first the one and then the other; None takes what
    the arm says."""
    baseline: Literal["outputs", "trajectories"] = "outputs"
    scale: Literal["none", "std"] = "none"
    world_sharing: Literal["group", "rollout"] | None = None
    """One imagined world per `group` or per `rollout`; None takes what the arm says."""
    data: DataSection = Field(default_factory=DataSection)
    sft: SftSection = Field(default_factory=SftSection)
    limits: LimitsSection = Field(default_factory=LimitsSection)
    loss: LossSection = Field(default_factory=LossSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    endpoint: HttpSettings = Field(default_factory=HttpSettings)
    """How an endpoint is asked, where the model is one."""
    judge: JudgeSection | None = None
    """Who decides what no program can, where scenarios bring checklists."""
    checkpoint_every: int = Field(5, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    keep_best: bool = True
    """Keep the weights of the best evaluation during training as a model folder, `best/`."""
    tracker: TrackerName = "none"
    """Where the records of metrics.jsonl also go."""
    tracker_project: str | None = None
    """What a tracker files the run under; None is `envace`."""
    alarms: AlarmsSection = Field(default_factory=AlarmsSection)
    trajectories_every: int = Field(10, ge=1)
    """Updates between recordings of one group's trajectories."""
    threads: int = Field(1, ge=1)
    """Torch threads; more is slower on small models when cores are shared."""
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Where the model lives; `auto` takes a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights, in sampling and training."""
    thinking: bool | None = None
    """Whether the model is asked to think before it acts, where its template can; None is the template's own way."""
    shots: int = Field(0, ge=0)
    """Worked examples that every prompt shows, for models that have not seen the tools: the oracle's demonstrations in
    scenarios of the warm-up."""
    lora: LoraSection | None = None
    """Train low-rank adapters instead of the weights; needs `pip install peft`."""

    @field_validator("weights")
    @classmethod
    def _complete(cls, weights: dict[str, float]) -> dict[str, float]:
        """Known parts only, none negative, not all 0."""
        unknown = set(weights) - set(WEIGHTS)
        if unknown:
            raise ValueError(f"unknown parts {sorted(unknown)}; there are {', '.join(WEIGHTS)}")
        whole = {**WEIGHTS, **weights}
        if min(whole.values()) < 0 or sum(whole.values()) <= whole["consistent"]:
            raise ValueError("weights must not be negative, and one beside `consistent` must be above 0")
        return whole

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        """Settings that mean nothing together are a mistake."""
        if self.grounding == "reference" and self.layout != "prompted":
            raise ValueError(
                "grounding=reference shows recorded results in the rehearser's prompt: set layout=prompted"
            )
        if self.sft.rows == "round" and self.sft.roles == "both" and self.layout == "shared":
            raise ValueError("sft.rows=round learns the assistant's steps alone: set sft.roles=act, or layout=prompted")
        if self.judge is not None and self.reward != "judged":
            raise ValueError(f"a judge decides checklists, and reward is {self.reward}: set reward=judged")
        kind = self.advantage or self.facts.advantage
        if kind == "global" and self.scale == "std":
            raise ValueError("scale=std divides by a cell's spread, and advantage=global compares with no cell")
        if kind == "global" and self.resample:
            raise ValueError("resample replaces groups without spread, and advantage=global learns from these too")
        if self.rehearser is not None and self.facts.rehearser != "second":
            raise ValueError("rehearser names the second policy of arm per-role")
        if self.simulator.model is not None and self.facts.rehearser != "simulator":
            raise ValueError("simulator.model names who plays the environment in arm grpo-simulator")
        if self.layout == "shared" and any(name.startswith("rehearse") for name in self.prompts):
            raise ValueError("prompts.rehearse_* are of layout=prompted, and layout is shared")
        if self.loss.constant_length is not None and self.loss.aggregation != "constant":
            raise ValueError("loss.constant_length is of loss.aggregation=constant")
        if self.resample and self.arm == "sft":
            raise ValueError("resample draws groups anew, and arm sft samples none")
        return self

    @property
    def facts(self) -> ArmFacts:
        """What the arm sets."""
        return ARMS[self.arm]

    @property
    def executes(self) -> bool:
        """Whether training executes calls for real."""
        return self.facts.answers != "rehearsed"

    @property
    def share_world(self) -> bool:
        """Whether a group lives in one imagined world."""
        return self.facts.shares_world if self.world_sharing is None else self.world_sharing == "group"

    def advantages(self) -> AdvantageSettings:
        """What rewards are compared with."""
        return AdvantageSettings(
            kind=self.advantage or self.facts.advantage,
            role_wise=self.facts.role_wise,
            baseline=self.baseline,
            scale=self.scale,
        )

    def setting(self) -> Setting:
        """What rollouts are answered and rewarded by."""
        simulated = self.facts.rehearser == "simulator"
        return Setting(
            answers="executable" if self.executes else "rehearsed",
            layout=self.layout,
            gate=self.gate,
            groups_at_once=self.groups_at_once,
            grounded=self.grounding == "reference",
            share_world=self.share_world,
            anchors=self.facts.anchors,
            reward="real" if self.executes else self.reward,
            weights=self.weights,
            limits=self.rollout_limits(),
            temperature=self.temperature,
            rehearse_temperature=self.simulator.temperature if simulated else self.temperature,
        )

    def rollout_limits(self) -> Limits:
        """The limits of a rollout."""
        return Limits(**self.limits.model_dump())


def load_recipe(source: Path | str | dict[str, Any] | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides (dots reach into sections).

    Args:
        source: A YAML file, a mapping, or None for the defaults.
        overrides: `updates=2`, `sft.steps=100`, ...; values are YAML.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, or a value is out of range.
    """
    values = source if isinstance(source, dict) else _read(source)
    values = {**values}
    if isinstance(source, (str, Path)):
        _anchor_paths(values, Path(source).parent)
    for override in overrides:
        _override(values, override)
    _check_keys(Recipe, values, "")
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if not where:  # of several keys together; the input would be the whole recipe, with what must not be shown
            raise ConfigError(f"{first['msg'].removeprefix('Value error, ')}.") from None
        shown = "(not shown)" if "headers" in where else repr(first["input"])  # headers may be credentials
        raise ConfigError(f"{_named(source)}: {where} = {shown}: {first['msg']}.") from None


def _named(source: Path | str | dict[str, Any] | None) -> str:
    return "recipe" if source is None or isinstance(source, dict) else str(source)


def _read(source: Path | str | None) -> dict[str, Any]:
    if source is None:
        return {}
    try:
        values = yaml.safe_load(Path(source).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {source}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source} holds a {type(values).__name__}; a recipe is a mapping of keys to values.")
    return values


def _anchor_paths(values: dict[str, Any], folder: Path) -> None:
    """Paths that begin with `./` or `../` are relative to the recipe; all others to where the command runs."""

    def anchor(name: Any) -> Any:
        return str(folder / name) if isinstance(name, str) and name.startswith(("./", "../")) else name

    for key in ("world", "model"):
        if key in values:
            value = values[key]
            values[key] = [anchor(name) for name in value] if isinstance(value, list) else anchor(value)


def _override(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"{override!r} is not of the form key=value.")
    *sections, key = name.split(".")
    target = values
    for section in sections:
        inner = target.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}: {section} is not a section.")
        target[section] = target = {**inner}
    try:
        target[key] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{override!r}: the value is not YAML.") from None


def _check_keys(model: type[BaseModel], values: dict[str, Any], prefix: str) -> None:
    """Unknown keys, with the nearest known one."""
    known = set(model.model_fields)
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {prefix}{near[0]}?" if near else f" Known: {', '.join(sorted(known))}."
            raise ConfigError(f"Unknown recipe key {prefix}{key}.{hint}")
        section = _section(model, key)
        if section is not None and isinstance(value, dict):
            _check_keys(section, value, f"{prefix}{key}.")


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    annotation = model.model_fields[key].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
