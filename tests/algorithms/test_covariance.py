"""The tokens that clip_cov and kl_cov select, compared with NumPy.

They are selected from the whole mini-batch, and the selection is reproducible.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from millrace.algorithms.token_weights import clip_cov_tokens, covariances, kl_cov_tokens

TOKENS = st.lists(st.tuples(st.floats(-10, 0), st.floats(-3, 3), st.booleans()), max_size=60)
BAND = {"ratio": 0.1, "lower": 0.5, "upper": 4.0}


def tensors(rows: Any) -> Any:
    log_probs = torch.tensor([r[0] for r in rows], dtype=torch.float64)
    advantages = torch.tensor([r[1] for r in rows], dtype=torch.float64)
    return log_probs, advantages, torch.tensor([r[2] for r in rows], dtype=torch.bool)


def seeded(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


def reference(rows: Any) -> Any:
    """Return {position: covariance} of the trained tokens."""
    kept = [i for i, r in enumerate(rows) if r[2]]
    n = max(len(kept), 1)
    mean_logp, mean_a = sum(rows[i][0] for i in kept) / n, sum(rows[i][1] for i in kept) / n
    return {i: (rows[i][1] - mean_a) * (rows[i][0] - mean_logp) for i in kept}


@given(TOKENS)
def test_covariances_are_about_the_means_of_all_trained_tokens(rows: Any) -> None:
    got, want = covariances(*tensors(rows)), reference(rows)
    for i, row in enumerate(rows):
        assert (
            got[i].item() == pytest.approx(want[i], rel=1e-6, abs=1e-9)
            if row[2]
            else got[i].isnan()
        )


@settings(max_examples=60)
@given(TOKENS, st.sampled_from([2e-4, 0.1, 0.5, 1.0]))
def test_kl_cov_takes_the_largest_covariances(rows: Any, ratio: Any) -> None:
    got = kl_cov_tokens(*tensors(rows), ratio=ratio)
    cov = reference(rows)
    taken = set(got.nonzero().squeeze(-1).tolist())
    assert taken <= set(cov)
    assert len(taken) == min(max(int(ratio * len(cov)), 1), len(cov))
    if taken and len(taken) < len(cov):
        assert min(cov[i] for i in taken) >= max(cov[i] for i in set(cov) - taken) - 1e-9


@settings(max_examples=60)
@given(TOKENS, st.sampled_from([2e-4, 0.1, 1.0]), st.integers(0, 3))
def test_clip_cov_draws_from_the_band_and_repeats_itself(rows: Any, ratio: Any, seed: int) -> None:
    cov = reference(rows)
    assume(all(abs(c - edge) > 1e-9 for c in cov.values() for edge in (0.5, 4.0)))

    def draw() -> Any:
        return clip_cov_tokens(*tensors(rows), **(BAND | {"ratio": ratio}), generator=seeded(seed))

    got = draw()
    band = {i for i, c in cov.items() if 0.5 < c < 4.0}
    taken = set(got.nonzero().squeeze(-1).tolist())
    assert taken <= band
    assert len(taken) == min(max(int(ratio * len(cov)), 1), len(band))
    assert torch.equal(got, draw())


def test_clip_covs_band_is_open_and_every_candidate_is_equally_likely() -> None:
    # The means are 0, so the covariances are 1, 1, -1, -1, 1, 1, ...
    rows = [(x, y, True) for x, y in [(-1.0, -1.0), (1.0, 1.0), (-1.0, 1.0), (1.0, -1.0)] * 3]
    for lower, upper in ((1.0, 2.0), (-1.0, 1.0)):
        assert not clip_cov_tokens(
            *tensors(rows), ratio=1.0, lower=lower, upper=upper, generator=seeded()
        ).any()
    generator = seeded()
    counts = sum(
        clip_cov_tokens(
            *tensors(rows), ratio=0.1, lower=0.5, upper=2.0, generator=generator
        ).double()
        for _ in range(1200)
    )
    assert counts.sum() == 1200
    at = (counts > 0).nonzero().squeeze(-1).tolist()
    assert at == [0, 1, 4, 5, 8, 9]
    # The expected count is 200 each; the margin of 50 is 3.9 standard deviations.
    assert counts[at].min() > 150  # type: ignore[index]


def test_clip_covs_share_is_of_all_trained_tokens() -> None:
    """It is 0.2 of the 20 trained tokens: not of the 10 in the band, nor of all 25."""
    rows = [(x, y, True) for x, y in [(-1.0, -1.0), (1.0, 1.0), (-1.0, 1.0), (1.0, -1.0)] * 5]
    rows += [(0.0, 0.0, False)] * 5
    band = {"ratio": 0.2, "lower": 0.5, "upper": 2.0, "generator": seeded()}
    assert clip_cov_tokens(*tensors(rows), **band).sum() == 4  # type: ignore[arg-type]


def test_clip_cov_passes_over_tokens_that_are_clipped_already() -> None:
    rows = [(x, y, True) for x, y in [(-1.0, -1.0), (1.0, 1.0), (-1.0, 1.0), (1.0, -1.0)]]
    clipped = torch.tensor([True, False, False, False])
    got = clip_cov_tokens(
        *tensors(rows), ratio=1.0, lower=0.5, upper=2.0, generator=seeded(), clipped=clipped
    )
    assert got.tolist() == [False, True, False, False]


def test_of_equal_covariances_kl_cov_takes_the_first() -> None:
    rows = [(-1.0, -1.0, True), (1.0, 1.0, True)] * 10
    assert kl_cov_tokens(*tensors(rows), ratio=0.2).nonzero().squeeze(-1).tolist() == [0, 1, 2, 3]


def test_masked_tokens_are_not_looked_at() -> None:
    rows = [(-2.0, 1.0, True), (-1.0, 2.0, True), (np.nan, np.inf, False)]
    assert kl_cov_tokens(*tensors(rows), ratio=1.0).tolist() == [True, True, False]
    assert covariances(*tensors(rows))[:2].tolist() == [0.25, 0.25]


def test_no_trained_tokens_give_none_and_bad_shares_are_refused() -> None:
    for rows in ([], [(-1.0, 1.0, False)]):
        assert not kl_cov_tokens(*tensors(rows), ratio=0.5).any()
        assert not clip_cov_tokens(*tensors(rows), **BAND, generator=seeded()).any()  # type: ignore[arg-type]
    for ratio in (0.0, 1.5):
        with pytest.raises(ValueError, match="ratio"):
            kl_cov_tokens(*tensors([(-1.0, 1.0, True)]), ratio=ratio)
    with pytest.raises(ValueError, match="lower"):
        clip_cov_tokens(*tensors([]), ratio=0.5, lower=1.0, upper=1.0, generator=seeded())
