"""Flow and stock of a run of `bench modes`: what it drew, what it trained, and what is left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def figures_of_flow(
    run_dir: Path, rows: Sequence[Mapping[str, float]], versions: range
) -> dict[str, Any]:
    """Return the flow over the counted versions, the change of the stock, and the advice.

    The stock is the samples that are finished and not yet taken by the trainer. A rate of training
    that takes from it, or adds to it, cannot continue. Without the accounts, because the disk was
    full, there is no stock and no advice.
    """
    from millrace.report.accounts.lines import read
    from millrace.report.advice.advise import advise
    from millrace.report.advice.measure import checked, measured_of, setup_at

    found = setup_at(run_dir)
    if found is None or not versions:
        return {}
    setup, tree = found
    counted = [rows[k] for k in versions]
    wall = sum(row["perf/time_per_version"] for row in counted)
    trained = sum(row["response_length/mean"] * row["train/samples"] for row in counted)
    flow: dict[str, Any] = {"trained_responses_per_s": trained * setup.n / wall}
    by_version = {int(row["version"]): row for row in rows}
    measured = measured_of(setup, by_version, read(run_dir), versions)
    if measured is None:
        return flow
    advice = checked(advise(measured), tree)
    return flow | {
        "more_ready": measured.more_ready,
        "more_running": measured.more_running,
        "stock_share": measured.stock_share,
        "dropped_share": measured.drop_share,
        "advice": [str(one) for one in advice],
        "gain": advice[0].gain,
        "overrides": list(advice[0].overrides),
    }
