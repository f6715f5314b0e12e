"""What each write policy does with a save."""

from __future__ import annotations

import pytest

from gdsstore.tiers.policy import Standing, WritePolicy, save_rule


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_save_is_written_now_or_enters_the_cache(policy: WritePolicy) -> None:
    rule = save_rule(policy)
    assert rule.writes_now or rule.enters is not None


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_record_that_is_not_written_now_is_never_called_clean(policy: WritePolicy) -> None:
    rule = save_rule(policy)
    assert rule.writes_now == (rule.enters in (None, Standing.CLEAN))


def test_only_write_back_promises_to_write_what_was_used_once() -> None:
    dirty = [policy for policy in WritePolicy if save_rule(policy).enters is Standing.DIRTY]
    assert dirty == [WritePolicy.WRITE_BACK]


def test_never_keeps_saves_out() -> None:
    assert save_rule(WritePolicy.NEVER).enters is None
