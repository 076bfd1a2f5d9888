"""What the scheduler itself costs per step: `python -m benchmarks.serving.scheduler`. No model, no torch.

A runner that answers at once stands in for the model; only the scheduler's verbs are timed, as CPU time of
this thread. `between` is what no forward pass can hide in the overlapped loop: the scheduler's part from the
end of one pass to the start of the next (settle and plan). The rest runs while the model computes.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping

from runtime.config.scheduler import SchedulerConfig
from runtime.plan import RowResult, Sample, StepPlan, StepResult, TokenMask
from runtime.protocol.io_struct import TokenizedGenerateReqInput
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.scheduler import Scheduler

VOCAB = 32_000
VERBS = ("plan", "masks", "settle", "news", "add")
PROMPT, SHARED = 200, 120  # tokens of a prompt, and how many of them its group has in common
GROUPS = 16


class Instant:
    """Answers every row at once with a token that depends on the row; the cost is not the scheduler's."""

    def __init__(self) -> None:
        self.answers = [RowResult((Sample(token, -1.0),)) for token in range(100, 1100)]
        self.nothing = RowResult()

    def run(self, plan: StepPlan, masks: Mapping[int, TokenMask]) -> StepResult:
        answers, nothing = self.answers, self.nothing
        return StepResult(
            tuple(answers[(row.seq * 31 + row.step) % 1000] if row.sample else nothing for row in plan.rows)
        )


class Load:
    """Requests in groups that share a beginning, as the calls of a program do."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.stems = [[self.random.randrange(VOCAB) for _ in range(SHARED)] for _ in range(GROUPS)]
        self.count = 0

    def request(self, new: int, *, stream: bool) -> TokenizedGenerateReqInput:
        self.count += 1
        own = [self.random.randrange(VOCAB) for _ in range(PROMPT - SHARED)]
        return TokenizedGenerateReqInput(
            rid=str(self.count),
            input_ids=self.random.choice(self.stems) + own,
            sampling_params=SamplingParams(max_new_tokens=new, seed=self.count),
            stream=stream,
        )


def make(running: int, policy: str) -> Scheduler:
    config = SchedulerConfig(
        max_running_requests=running, policy=policy, max_prefill_tokens=1 << 20, context_length=100_000
    )
    vocabulary = Vocabulary(tuple(b"x" for _ in range(VOCAB)), frozenset({0}), frozenset({0}))
    return Scheduler(config, slots=running * 2048, vocabulary=vocabulary, encode=lambda _: [], grammar=None)


def step(scheduler: Scheduler, runner: Instant, spent: dict[str, float]) -> int:
    """One step; adds the CPU seconds of each verb to `spent`; how many requests ended."""
    clock = time.thread_time
    begin = clock()
    plan = scheduler.plan()
    planned = clock()
    if plan is None:
        raise SystemExit("nothing to run: the load is wrong")
    masks = scheduler.masks()
    masked = clock()
    result = runner.run(plan, masks)
    back = clock()
    scheduler.settle(result)
    settled = clock()
    news = scheduler.drain()
    told = clock()
    spent["plan"] += planned - begin
    spent["masks"] += masked - planned
    spent["settle"] += settled - back
    spent["news"] += told - settled
    return sum(one.finish is not None for one in news)


def decode_only(running: int, steps: int, policy: str) -> dict[str, float]:
    """All requests decode, all stream; nobody comes or goes."""
    scheduler, runner, load = make(running, policy), Instant(), Load(1)
    for _ in range(running):
        scheduler.add(load.request(1900, stream=True))
    warm = dict.fromkeys(VERBS, 0.0)
    while scheduler.state()["waiting"] or scheduler.state()["generated"] < running:
        step(scheduler, runner, warm)
    for _ in range(20):
        step(scheduler, runner, warm)
    return measured(lambda spent: step(scheduler, runner, spent), steps)


def mixed(running: int, steps: int, policy: str, outputs: tuple[int, int] = (128, 384)) -> dict[str, float]:
    """Requests come as others end; half of them are streamed, and there is a queue behind. `outputs`: tokens
    of one, from and to."""
    scheduler, runner, load = make(running, policy), Instant(), Load(2)
    backlog = max(16, running // 8)
    spent_warm = dict.fromkeys(VERBS, 0.0)

    def refill(spent: dict[str, float], ended: int) -> None:
        for _ in range(ended):
            request = load.request(load.random.randrange(*outputs), stream=load.count % 2 == 0)
            begin = time.thread_time()
            scheduler.add(request)
            spent["add"] += time.thread_time() - begin

    def one(spent: dict[str, float]) -> None:
        refill(spent, step(scheduler, runner, spent))

    refill(spent_warm, running + backlog)
    for _ in range(max(150, outputs[1])):
        one(spent_warm)
    return measured(one, steps)


def measured(one: Callable[[dict[str, float]], object], steps: int) -> dict[str, float]:
    """Milliseconds per step of each verb, and of all: the median over ten stretches."""
    stretches = []
    for _ in range(10):
        spent = dict.fromkeys(VERBS, 0.0)
        for _ in range(steps // 10):
            one(spent)
        stretches.append({name: 1e3 * value / (steps // 10) for name, value in spent.items()})
    found = {name: statistics.median(each[name] for each in stretches) for name in stretches[0]}
    found["between"] = found["plan"] + found["settle"]
    found["all"] = statistics.median(sum(each.values()) for each in stretches)
    return found


def churn(running: int, steps: int, policy: str) -> dict[str, float]:
    """The same with short outputs: one request in 64 changes with every step."""
    return mixed(running, steps, policy, (16, 112))


LOADS: dict[str, Callable[[int, int, str], dict[str, float]]] = {
    "decode only": decode_only,
    "mixed": mixed,
    "churn": churn,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--running", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--policy", default="lpm")
    parser.add_argument(
        "--gc", type=int, default=20_000, help="collector's threshold; the server's by default"
    )
    parser.add_argument("--profile", choices=LOADS, help="cProfile one load instead")
    options = parser.parse_args()
    gc.set_threshold(options.gc, 10, 10)
    if options.profile:
        cProfile.runctx(
            "LOADS[options.profile](options.running[0], options.steps, options.policy)",
            globals(),
            {"options": options},
            sort="tottime",
        )
        return
    print(f"{datetime.date.today()}, policy {options.policy}, collector at {options.gc}, ms of CPU per step")
    print("| load | running | plan | masks | settle | news | taking in | between | all |")
    print("|---" * 9 + "|")
    for name, load in LOADS.items():
        for running in options.running:
            found = load(running, options.steps, options.policy)
            cells = [f"{found[verb]:.3f}" for verb in (*VERBS, "between", "all")]
            print(f"| {name} | {running} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
