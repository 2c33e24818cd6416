"""python -m bench [rollout|update|llm|trl|judge|study] [options]: each prints a table and one JSON line.

rollout  sampled tokens/s of our rollout loop against `generate` with re-prefill each turn, same model, same prompts
update   trained tokens/s of one row a trajectory against one row an output, same trajectories
llm      sampled tokens/s of the local policy against `generate` on SmolLM2-135M, minutes
trl      trained tokens/s and peak memory of an update against TRL's, options as of its own `--help`
judge    calls of the judge, one a turn against one a (step, item), on recorded conversations
study    equal-length arms over seeds: real success, feasible share (the README's table)
"""

from __future__ import annotations

import sys

from bench import judge, llm, speed, study, trl_update


def main() -> None:
    """Run what is named; by default the two speed benchmarks."""
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or ["rollout", "update"]
    jobs = {"rollout": speed.rollout, "update": speed.update, "llm": llm.llm}
    own = {"study": study.main, "trl": trl_update.main, "judge": judge.judge}  # with options of their own
    unknown = set(names[:1]) - set(jobs) - set(own)
    if unknown:
        sys.exit(f"unknown benchmark {', '.join(unknown)}; there are {', '.join([*jobs, *own])}.\n\n{__doc__}")
    if names[0] in own:
        own[names[0]](sys.argv[2:])
        return
    for name in names:
        jobs[name]()


main()
