"""Flow and stock of a run of `bench modes`: what it drew, what it trained, and what is left over."""

from __future__ import annotations

from typing import Any

from millrace.persist.run_reader import RunReader


def figures_of_flow(run: RunReader, versions: range) -> dict[str, Any]:
    """Return the flow over the counted versions, the change of the stock, and the advice.

    The stock is the samples that are finished and not yet taken by the trainer. A rate of training
    that takes from it, or adds to it, cannot continue. Without the accounts, because the disk was
    full, there is no stock and no advice.
    """
    from millrace.report.advice.advise import advise
    from millrace.report.advice.measure import checked, measured_of, setup_of

    if run.config is None or not versions:
        return {}
    setup, rows = setup_of(run.config), list(run.rows.values())
    counted = [rows[k] for k in versions]
    wall = sum(row["perf/time_per_version"] for row in counted)
    trained = sum(row["response_length/mean"] * row["train/samples"] for row in counted)
    flow: dict[str, Any] = {"trained_responses_per_s": trained * setup.n / wall}
    measured = measured_of(setup, run.rows, run.accounts, versions)
    if measured is None:
        return flow
    advice = checked(advise(measured), run.tree)
    return flow | {
        "more_ready": measured.more_ready,
        "more_running": measured.more_running,
        "stock_share": measured.stock_share,
        "dropped_share": measured.drop_share,
        "advice": [str(one) for one in advice],
        "gain": advice[0].gain,
        "overrides": list(advice[0].overrides),
    }
