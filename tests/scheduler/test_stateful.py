"""Random lives of whole groups: hypothesis drives them step by step, a plain generator drives many
more.

After every step: one step type on all ranks, budgets respected, device block tables (kept by deltas
alone) equal to the host's, check_integrity. At the end: everything ended within the computed bound
of steps, with exactly the model's tokens, nothing held.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sched_fuzz import Episode, fuzz


class GroupLife(RuleBasedStateMachine):
    """Every random choice inside an episode is hypothesis' own, so that failures shrink."""

    split = False

    @initialize(rng=st.randoms(use_true_random=False))
    def start(self, rng):
        self.episode = Episode(rng, split=self.split)
        for driver in self.episode.drivers:
            driver.check_every = 1

    @rule()
    def arrival(self):
        self.episode.add()

    @rule(count=st.integers(2, 5))
    def burst(self, count):
        for _ in range(count):
            self.episode.add()

    @rule()
    def abort(self):
        self.episode.abort()

    @rule()
    def fork(self):
        self.episode.fork()

    @rule()
    def failure(self):
        self.episode.fail_one()

    @rule()
    def image_arrives(self):
        self.episode.unblock()

    @rule()
    def drafts(self):
        self.episode.choose_drafts()

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.episode.step()

    @invariant()
    def intact(self):
        if hasattr(self, "episode"):
            for driver in self.episode.drivers:
                driver.check()

    def teardown(self):
        if hasattr(self, "episode"):
            self.episode.drain()


class HandOverLife(GroupLife):
    """A PROMPT group handing over to a COMPLETION group."""

    split = True


_SETTINGS = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestGroupLife = GroupLife.TestCase
TestGroupLife.settings = _SETTINGS
TestHandOverLife = HandOverLife.TestCase
TestHandOverLife.settings = _SETTINGS


@pytest.mark.parametrize("part", range(4))
def test_two_hundred_thousand_random_steps(part):
    steps, _ = fuzz(first_seed=10_000_000 * (part + 1), min_steps=52_000)
    assert steps >= 52_000
