"""The starter world: every task can be judged, and neither guessing nor carelessness solves it."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jsonschema
import pytest

from envace.starter import world
from envace.starter.world.bank.tasks import DOMAIN as BANK
from envace.starter.world.calendar.tasks import DOMAIN as CALENDAR
from envace.starter.world.drafts import Domain, Draft
from envace.starter.world.flights.tasks import DOMAIN as FLIGHTS
from envace.starter.world.retail.tasks import DOMAIN as RETAIL

RECIPES: dict[str, Domain] = {"retail": RETAIL, "flights": FLIGHTS, "bank": BANK, "calendar": CALENDAR}
NUM_DRAFTS = 600
SLIPS = ("drop_mark", "give_up", "ignore_rule", "claim_success", "skip_lookup")

every_domain = pytest.mark.parametrize("domain", world.DOMAINS)
trained_domain = pytest.mark.parametrize("domain", world.TRAINED)
every_split = pytest.mark.parametrize("split", world.SPLITS)


def careful(name: str) -> bool:
    return False


@cache
def source(domain: str) -> str:
    return (world.folder(domain) / "environment.py").read_text()


@cache
def module(domain: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": f"{domain}_environment"}
    exec(compile(source(domain), f"{domain}/environment.py", "exec"), names)
    return names


def environment_class(domain: str) -> Any:
    return module(domain)[domain.capitalize()]


@cache
def drafts(domain: str, split: str) -> tuple[Draft, ...]:
    return tuple(world.draw(domain, split, 0, index) for index in range(NUM_DRAFTS))


@dataclass
class Run:
    """What a demonstrator did, and what came of it."""

    answer: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any], Any]] = field(default_factory=list)
    slips: list[str] = field(default_factory=list)

    def succeeds_like(self, oracle: Run) -> bool:
        """The oracle's outcome and final state, and every fact in the reply."""
        told = all(re.search(rf"(?<!\w){fact}(?!\w)", self.answer["reply"]) for fact in oracle.answer["facts"])
        return told and self.state == oracle.state and self.answer["outcome"] == oracle.answer["outcome"]


def demonstrate(domain: str, goal: dict[str, Any], state: dict[str, Any], slip: Callable[[str], bool] = careful) -> Run:
    """Let `solve` work in a fresh environment, which a JSON wire separates from it as in use."""
    environment, run = environment_class(domain)(), Run()
    for table, records in copy.deepcopy(state).items():
        setattr(environment, table, records)

    def call(tool: str, **arguments: Any) -> Any:
        before = copy.deepcopy(vars(environment))
        result = json.loads(json.dumps(getattr(environment, tool)(**arguments)))
        run.calls.append((tool, arguments, result))
        if tool in environment.LOOKUPS or "error" in result:
            assert vars(environment) == before, f"{tool} changed the state"
        return result

    def counted(name: str) -> bool:
        run.slips.append(name)
        return slip(name)

    run.answer = module(domain)["solve"](call, goal, counted)
    run.state = vars(environment)
    return run


@cache
def oracle_runs(domain: str, split: str) -> tuple[Run, ...]:
    return tuple(demonstrate(domain, draft.goal, draft.state) for draft in drafts(domain, split))


# The package format.


@every_domain
def test_file_can_be_read_without_running_it(domain: str) -> None:
    tree = ast.parse(source(domain))
    [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    literals = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in cls.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    tools = {node.name for node in cls.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}

    assert ast.get_docstring(cls)
    assert set(literals) == {"RULES", "STATE", "LOOKUPS"}
    assert 5 <= len(tools) <= 7
    assert set(literals["LOOKUPS"]) < tools
    assert set(literals["LOOKUPS"].values()) == set(literals["STATE"]) == set(vars(environment_class(domain)()))
    assert all(len(table["record"]["properties"]) <= 5 for table in literals["STATE"].values())
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef) if node.name[0] != "_"] == ["solve"]


def test_shared_lines_are_the_same_in_every_file() -> None:
    endings = {source(domain).split("# From here to the end mark")[1] for domain in world.DOMAINS}
    assert len(endings) == 1


@every_domain
@pytest.mark.parametrize("value", [None, 7, True, "", "nonsense", [], {"a": 1}, "\u0661" * 6, "#W482913\n"])
def test_no_tool_raises_for_a_bad_value(domain: str, value: object) -> None:
    environment = environment_class(domain)(drafts(domain, "train")[0].state)
    before = copy.deepcopy(vars(environment))
    for name, method in vars(environment_class(domain)).items():
        if name[0] != "_" and callable(method):
            num_arguments = method.__code__.co_argcount - 1
            result = getattr(environment, name)(*[value] * num_arguments)
            assert result == [] or re.fullmatch("[a-z_]+", result["error"])
    assert vars(environment) == before


@every_domain
def test_writes_never_iterate_over_a_table(domain: str) -> None:
    # Whoever plays the world with half-known tables must see which records a write needs.
    class Guarded(dict[str, Any]):
        def _refuse(self, *_: object) -> Any:
            raise AssertionError("iterated over a table")

        __iter__ = keys = values = items = _refuse

    for draft, run in zip(drafts(domain, "train")[:200], oracle_runs(domain, "train"), strict=False):
        environment = environment_class(domain)()
        for table, records in copy.deepcopy(draft.state).items():
            setattr(environment, table, Guarded(records))
        for tool, arguments, result in run.calls:
            if tool not in environment.LOOKUPS:
                assert getattr(environment, tool)(**arguments) == result


@every_domain
def test_lookups_return_copies_of_full_records(domain: str) -> None:
    lookups = environment_class(domain).LOOKUPS
    for draft, run in zip(drafts(domain, "train"), oracle_runs(domain, "train"), strict=True):
        seen_write = False
        for tool, _, result in run.calls:
            seen_write = seen_write or tool not in lookups
            records = result if isinstance(result, list) else [result]
            if tool in lookups and "error" not in result and not seen_write:
                assert len(records) <= 2
                assert all(record in draft.state[lookups[tool]].values() for record in records)
    environment = environment_class(domain)(draft.state)
    for table, records in draft.state.items():
        [tool] = [name for name, of in lookups.items() if of == table and name.startswith("get_")]
        key = next(iter(records))
        getattr(environment, tool)(key).clear()
        assert getattr(environment, tool)(key) == records[key]


# The drafts.


@every_domain
@every_split
def test_states_match_their_schema_and_records_hold_their_keys(domain: str, split: str) -> None:
    tables = environment_class(domain).STATE
    validators = {name: jsonschema.Draft202012Validator(table["record"]) for name, table in tables.items()}
    for draft in drafts(domain, split):
        assert set(draft.state) == set(tables)
        for name, records in draft.state.items():
            for key, record in records.items():
                validators[name].validate(record)
                assert record[tables[name]["key"]] == key
                assert set(record) == set(tables[name]["record"]["required"])


@every_domain
def test_same_seed_and_index_give_the_same_draft(domain: str) -> None:
    assert world.draw(domain, "train", 3, 5) == world.draw(domain, "train", 3, 5)
    assert world.draw(domain, "train", 3, 5) != world.draw(domain, "heldout", 3, 5)
    assert world.draw(domain, "train", 3, 5) != world.draw(domain, "train", 4, 5)


def test_unknown_domain_is_named() -> None:
    with pytest.raises(ValueError, match=r"'hotel'.*retail"):
        world.draw("hotel", "train", 0, 0)


def normalised(draft: Draft) -> str:
    """The wording of an instruction, without the values in it."""
    text = draft.instruction
    goals = draft.goal.get("parts", [draft.goal])
    for value in sorted({str(v) for g in goals for k, v in g.items() if k != "kind"}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "_", text)
    return text


@trained_domain
def test_heldout_wordings_are_new_but_made_of_known_words(domain: str) -> None:
    train = {normalised(draft) for name in world.TRAINED for draft in drafts(name, "train")}
    heldout = {normalised(draft) for draft in drafts(domain, "heldout")}
    assert not train & heldout

    known = {word for text in train for word in re.findall(r"\w+", text)}
    assert {word for text in heldout for word in re.findall(r"\w+", text)} <= known


@trained_domain
def test_every_kind_has_enough_wordings(domain: str) -> None:
    recipe = RECIPES[domain]
    for kind in recipe.kinds.values():
        assert len(set(kind.train)) >= 6
        assert len(set(kind.heldout)) >= 2
        assert not set(kind.train) & set(kind.heldout)


@every_domain
def test_some_pairs_are_asked_for_only_in_heldout_tasks(domain: str) -> None:
    train = Counter(draft.kind for draft in drafts(domain, "train"))
    heldout = Counter(draft.kind for draft in drafts(domain, "heldout"))
    pairs = {split: {frozenset(kind.split("+")) for kind in kinds if "+" in kind}
             for split, kinds in (("train", train), ("heldout", heldout))}  # fmt: skip
    unseen = {kind for kind in heldout if "+" in kind and frozenset(kind.split("+")) not in pairs["train"]}

    assert len(pairs["train"]) >= 3
    assert len(unseen) >= 2
    assert {name for kind in unseen for name in kind.split("+")} <= set(train)
    compounds = sum(count for kind, count in heldout.items() if "+" in kind)
    assert compounds / NUM_DRAFTS == pytest.approx(0.15, abs=0.05)
    assert sum(heldout[kind] for kind in unseen) / compounds == pytest.approx(0.5, abs=0.12)


@every_domain
@every_split
def test_instructions_are_short(domain: str, split: str) -> None:
    lengths = [len(draft.instruction.split()) for draft in drafts(domain, split) if "+" not in draft.kind]
    assert min(lengths) >= 7 and max(lengths) <= 18
    assert max(len(draft.instruction.split()) for draft in drafts(domain, split)) <= 28


@every_domain
def test_the_instruction_does_not_give_the_branch_away(domain: str) -> None:
    # Judged by each word: within a kind, tasks with it are feasible about as often as all tasks.
    done_by_word: dict[tuple[str, str], list[bool]] = defaultdict(list)
    done_by_kind: dict[str, list[bool]] = defaultdict(list)
    for index in range(3000):
        draft = world.draw(domain, "train", 1, index)
        done = demonstrate(domain, draft.goal, draft.state).answer["outcome"] == "done"
        done_by_kind[draft.kind].append(done)
        for word in set(re.findall(r"\w+", draft.instruction)):
            done_by_word[draft.kind, word].append(done)
    for (kind, _), done_list in done_by_word.items():
        if len(done_list) >= 30:
            share = sum(done_by_kind[kind]) / len(done_by_kind[kind])
            # Five standard errors: hundreds of words are looked at.
            assert sum(done_list) / len(done_list) == pytest.approx(share, abs=5 * (0.25 / len(done_list)) ** 0.5)


# The oracle.


@every_domain
@every_split
def test_oracle_needs_few_calls_and_is_told_the_facts(domain: str, split: str) -> None:
    for draft, run in zip(drafts(domain, split), oracle_runs(domain, split), strict=True):
        done = run.answer["outcome"] == "done"
        # A refusal may need no more than the look-up that shows why.
        assert (2 if done else 1) <= len(run.calls) <= 6, draft
        assert run.succeeds_like(run)
        assert run.answer["facts"]
        assert all(len(reply.split()) <= 14 for reply in run.answer["reply"].split(". "))
        assert run.answer["reply"].startswith("Done") or not done
        assert ("Sorry" in run.answer["reply"]) != done
        assert not any("error" in result for _, _, result in run.calls) or not done


@every_domain
@every_split
def test_more_than_half_of_the_requests_can_be_done(domain: str, split: str) -> None:
    # Many drafts, so that the share of each kind is known to a few points.
    by_kind: dict[str, list[bool]] = defaultdict(list)
    not_found = 0
    for index in range(3000):
        draft = world.draw(domain, split, 1, index)
        answer = demonstrate(domain, draft.goal, draft.state).answer
        by_kind[draft.kind].append(answer["outcome"] == "done")
        not_found += "not found" in answer["facts"]
    assert 0.55 <= sum(map(sum, by_kind.values())) / 3000 <= 0.61
    assert 0.05 <= not_found / 3000 <= 0.09
    for kind, done in by_kind.items():
        assert 0.4 <= sum(done) / len(done) <= 0.75, kind


@every_domain
@every_split
def test_doing_nothing_can_be_told_from_doing_it(domain: str, split: str) -> None:
    for draft, run in zip(drafts(domain, split), oracle_runs(domain, split), strict=True):
        words = set(re.findall(r"[\w#]+", draft.instruction))
        untold = [fact for fact in run.answer["facts"] if fact not in words]
        assert run.answer["outcome"] == "declined" or run.state != draft.state or untold


@every_domain
def test_oracle_declines_in_an_empty_world(domain: str) -> None:
    empty: dict[str, Any] = {table: {} for table in environment_class(domain).STATE}
    for draft in drafts(domain, "train"):
        assert demonstrate(domain, draft.goal, empty).answer["outcome"] == "declined"


@every_domain
def test_solve_works_in_any_world(domain: str) -> None:
    # A world with holes: every second record of each table is gone, so references lead nowhere.
    for draft in drafts(domain, "train")[:300]:
        holes = {table: dict(list(records.items())[::2]) for table, records in draft.state.items()}
        for slip in (careful, lambda name: True, lambda name: name == "ignore_rule"):
            assert demonstrate(domain, draft.goal, holes, slip).answer["outcome"] in ("done", "declined")


@every_domain
def test_look_up_first_never_meets_an_error_the_rules_foretell(domain: str) -> None:
    # The oracle's own reading of the rules agrees with the environment's: its writes succeed.
    lookups = environment_class(domain).LOOKUPS
    for run in oracle_runs(domain, "train"):
        assert all(tool in lookups or "error" not in result for tool, _, result in run.calls)


@every_domain
@every_split
def test_each_fact_speaks_for_one_part_only(domain: str, split: str) -> None:
    # Else a false "Done" for one part could hide behind the other's words.
    for draft in drafts(domain, split):
        if parts := draft.goal.get("parts"):
            answers = [demonstrate(domain, part, draft.state).answer for part in parts]
            reasons = [set(answer["facts"]) for answer in answers if answer["outcome"] == "declined"]
            assert len(reasons) < 2 or not reasons[0] & reasons[1]


@every_domain
def test_the_order_of_records_does_not_matter(domain: str) -> None:
    # Scenarios are stored as JSON, and some writers sort keys.
    for draft, run in zip(drafts(domain, "train"), oracle_runs(domain, "train"), strict=True):
        again = demonstrate(domain, draft.goal, json.loads(json.dumps(draft.state, sort_keys=True)))
        assert again.calls == run.calls and again.state == run.state


# Careless demonstrators.


@every_domain
@every_split
def test_one_who_always_slips_fails_most_of_the_time(domain: str, split: str) -> None:
    results = [
        demonstrate(domain, draft.goal, draft.state, lambda name: True).succeeds_like(oracle)
        for draft, oracle in zip(drafts(domain, split), oracle_runs(domain, split), strict=True)
    ]
    assert sum(results) / len(results) < 0.1


@every_domain
@pytest.mark.parametrize("slip", SLIPS)
def test_each_slip_makes_a_difference_where_it_is_asked(domain: str, slip: str) -> None:
    # give_up and claim_success come after another slip, which is made too.
    before = {"give_up": ("drop_mark",), "claim_success": ("ignore_rule",)}.get(slip, ())
    asked = 0
    for draft, oracle in zip(drafts(domain, "train"), oracle_runs(domain, "train"), strict=True):
        run = demonstrate(domain, draft.goal, draft.state, lambda name: name == slip or name in before)
        if slip in run.slips:
            asked += 1
            assert run.calls != oracle.calls or run.answer != oracle.answer
    assert asked >= 20


@every_domain
def test_an_ignored_rule_is_an_error_and_a_claim_is_wrong(domain: str) -> None:
    for draft, oracle in zip(drafts(domain, "train"), oracle_runs(domain, "train"), strict=True):
        ignored = demonstrate(domain, draft.goal, draft.state, lambda name: name == "ignore_rule")
        assert ignored.state == oracle.state
        claimed = demonstrate(domain, draft.goal, draft.state, lambda name: name in ("ignore_rule", "claim_success"))
        if "claim_success" in claimed.slips:
            assert not claimed.succeeds_like(oracle)
