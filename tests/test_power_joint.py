"""The joint search over batch size, threads, cores and frequency: against brute force on a simulated board; and through `tune`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from cross.errors import DoesNotFitError, UsageError
from host_control.power.joint import JointSpace, JointStudy, Outcome, Setting, best, front, useful_rate
from host_control.power.joint_run import joint_space

LITTLE, BIG = (0, 1, 2, 3), (4, 5)
SPACE = JointSpace(
    (1, 2, 4, 6, 8, 12, 16),
    ((None, (1, 2, 3, 4, 5, 6)), (LITTLE, (1, 2, 3, 4)), (BIG, (1, 2))),
    (600, 1000, 1400, 1800),
)


def simulated(s: Setting) -> Outcome:
    """Small cores are slow and frugal; large batches help up to 8; power goes with f^2.5 and the cores in use."""
    speed = {None: 0.7, LITTLE: 0.4, BIG: 1.0}[s.cores]
    rate = s.frequency_khz / 100 * speed * s.threads**0.8 * min(s.batch_size, 8) ** 0.3
    watts = 1.5 + s.threads * speed**1.7 * (s.frequency_khz / 1000) ** 2.5
    return Outcome(s, rate, 0.01, watts, watts / rate)


def study(folder: Path, budget: int, seed: int = 0, key: str = "k") -> JointStudy:
    return JointStudy(folder, SPACE, {"key": key}, budget, seed)


def test_a_space_within_the_budget_is_measured_whole(tmp_path: Path) -> None:
    small = JointSpace((1, 2), ((None, (1, 2)), (BIG, (1,))), (600, 1800))
    joint = JointStudy(tmp_path, small, {}, 40, 0)
    joint.run(simulated, None)
    assert set(joint.known) == set(small) and len(joint.known) == len(small) == 12


@pytest.mark.parametrize("objective", ["throughput", "energy"])
def test_the_search_comes_near_brute_force_within_its_budget(tmp_path: Path, objective: str) -> None:
    every = [simulated(s) for s in SPACE]
    assert len(every) == len(SPACE) == 336
    truth = best(every, objective, None)
    measured: list[Setting] = []
    joint = study(tmp_path, 60)
    joint.run(lambda s: measured.append(s) or simulated(s), None)
    found = best(joint.outcomes, objective, None)
    assert len(measured) == len(set(measured)) <= 60
    if objective == "throughput":
        assert found.samples_per_s >= 0.93 * truth.samples_per_s
    else:
        assert found.joules_per_sample <= 1.1 * truth.joules_per_sample  # type: ignore[operator]


def test_the_front_is_what_nothing_beats() -> None:
    every = [simulated(s) for s in SPACE]
    kept = front(every, None)
    for o in every:
        beaten = any(
            (q.samples_per_s, -q.joules_per_sample) != (o.samples_per_s, -o.joules_per_sample)  # type: ignore[operator]
            and q.samples_per_s >= o.samples_per_s
            and q.joules_per_sample <= o.joules_per_sample  # type: ignore[operator]
            for q in every
        )
        assert (o in kept) != beaten
    rates = [o.samples_per_s for o in kept]
    assert rates == sorted(rates, reverse=True) and len(kept) > 3


def test_an_interrupted_search_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    calls = 0

    def interrupted(s: Setting) -> Outcome:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        if calls == 3:
            raise DoesNotFitError("too large")
        return simulated(s)

    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, 20).run(interrupted, None)
    joint = study(tmp_path, 20)
    before = dict(joint.known)
    assert len(before) == 5 and list(before.values()).count(None) == 1
    fresh: list[Setting] = []
    joint.run(lambda s: fresh.append(s) or simulated(s), None)
    assert len(joint.known) == 20 and not set(fresh) & set(before) and len(fresh) == 15
    with pytest.raises(UsageError, match="key k, not other"):
        study(tmp_path, 20, key="other")


def test_what_batch_sizes_need_counts_for_the_time() -> None:
    one, other = simulated(Setting(4, 2, BIG, 1800)), simulated(Setting(16, 2, BIG, 1800))
    assert best([one, other], "throughput", None) is other
    r = {4: 0.5, 16: 1.0}
    assert best([one, other], "time-to-accuracy", r) is one and useful_rate(one, r) == 2 * one.samples_per_s
    with pytest.raises(UsageError, match="without a power sensor"):
        best([Outcome(one.setting, 1.0, 0.0, None, None)], "energy", None)


def test_the_space_is_what_the_board_has_and_flags_leave_open() -> None:
    policies: list[dict[str, Any]] = [
        {"policy": 0, "governor": "g", "cores": "0 1 2 3", "frequencies_khz": [600, 1000]},
        {"policy": 4, "governor": "g", "cores": "4 5", "frequencies_khz": [600, 1000, 1800]},
    ]

    def space(**flags: Any) -> JointSpace:
        args = argparse.Namespace(**({"joint": True, "cores": None, "threads": None} | flags))
        return joint_space(args, {"policies": policies}, [1, 2], 6)

    assert [(cores, len(counts)) for cores, counts in space().core_sets] == [(None, 6), ((0, 1, 2, 3), 4), ((4, 5), 2)]
    assert space().frequencies_khz == (600, 1000, 1800) and space().default == Setting(2, 6, None, 1800)
    assert space(threads=4).core_sets == ((None, (4,)), ((0, 1, 2, 3), (4,)))
    assert space(cores=(1, 2)).core_sets == (((1, 2), (1, 2)),)
    alone = space(joint=False)
    assert alone.core_sets == ((None, (6,)),) and alone.frequencies_khz == (0,) and len(alone) == 2
    with pytest.raises(UsageError, match="--threads 9"):
        space(threads=9)
