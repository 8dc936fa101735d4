"""Limit on automatic restarts: counts how often in a row a run failed at the same step."""

from __future__ import annotations

from collections.abc import Mapping

from samecurve.errors import RepeatedFailureError
from samecurve.run.status import REFUSED, counted
from samecurve.strategy.restarts import is_restart

MOST_FAILURES = 3


def count_failures(status: Mapping, last_step: int) -> dict:
    """Count consecutive failures at one step, including the last start's.

    A refused start counts as a failure at the step from which it would have resumed.

    Args:
        status: the status.json of the last start.
        last_step: the last step in metrics.jsonl, 0 if there is none.

    Returns:
        `failing_step` and `failures` (the keys in `status.COUNTED`); {} if the last start did not fail.
    """
    last = {**status, **status.get(REFUSED, {})}
    # a status that still says running is that of a killed process
    if REFUSED not in status and status.get("state") not in ("running", "failed"):
        return {}
    if (last.get("exit_code") or 0) > 128:  # 128 + signal number: the run was ended from outside, the step did not fail
        return counted(last)
    step = last_step + 1
    times = last.get("failures", 0) + 1 if last.get("failing_step") == step else 1
    return {"failing_step": step, "failures": min(times, MOST_FAILURES)}


def check_repeated_failures(failures: Mapping, status: Mapping, environ: Mapping[str, str]) -> None:
    """Raise RepeatedFailureError if this is an automatic restart after MOST_FAILURES failures at one step.

    Args:
        failures: the result of `count_failures`.
        status: the status.json of the last start, whose reason is quoted.
        environ: tells whether this start is an automatic restart.
    """
    if failures.get("failures", 0) < MOST_FAILURES or not is_restart(environ):
        return
    start = f"step {failures['failing_step']} failed {MOST_FAILURES} times in a row, so it is not tried again"
    last = {**status, **status.get(REFUSED, {})}.get("reason") or "the processes ended without giving a reason"
    # The last start may itself have been refused with this message, if the launcher keeps restarting: do not nest it.
    raise RepeatedFailureError(last if last.startswith(start) else f"{start}; the last time: {last}")
