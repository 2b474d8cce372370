"""The gap between the log-probs of two engines with the same weights: figures, limits, causes. Pure.

The dtype explains a gap: the trainer in the dtype of the run differs from an independent model in a
wider one by the **floor**. For an engine in 8 bits, that model rounds weights and activations as the
engine does. Two engines may differ by FACTOR times the floor at the start of a run,
and by LATER_FACTOR times the floor of the start in a later version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from millrace.errors import GapError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

FACTOR = 2.0
"""Healthy starts in bfloat16 on GPUs were at most at 1.19 (benchmarks/results/proof.md)."""
K3_FACTOR = 3.0
"""The same for k3, which is quadratic: a small fault shows there far above the noise of a dtype."""
LATER_FACTOR = 3.0
"""A policy that has trained may have a larger floor, which is not measured again."""
LEAST = {"float32": 5e-5, "bfloat16": 1e-3, "fp8": 1e-3}
"""The smallest limit of each dtype, nats: below it, floors are too small to be measured."""
LEAST_TF32 = 5e-3
"""The same for float32 on a GPU, where kernels of attention multiply in TF32."""
TRAINER = {"float32": 1e-3, "bfloat16": 0.1, "fp8": 0.1}
"""The largest floor that the dtype explains. Above it, the trainer's own passes are wrong."""
ASSUMED = {"float32": 1e-3, "bfloat16": 0.04, "fp8": 0.2}
"""The floor where no independent model finds room."""
STALE_SHARE = {"float32": 0.003, "bfloat16": 0.01, "fp8": 0.03}
"""The part of a change of all weights that may seem missing in an engine, with _SIGMAS of noise.

Errors of one response are alike in bfloat16, so its noise is larger than single tokens say.
"""
_SIGMAS = 4.0
ROUNDED = 1.5
"""The most that an engine in 8 bits may differ from an independent model in 8 bits, in floors.

Both round activations, in part to other numbers. Two roundings with nothing in common would differ
by the root of 2.
"""
_CLIP = 0.2
"""PPO's clip: beyond it, a ratio to the policy that drew loses its gradient."""
RANK_SHIFT = 0.02
"""The shift of the mean rank of drawn tokens that a dtype may make, without its noise.

No GPU has measured it yet, so it is wide: a cut to the 16 likeliest of 128 tokens shifts by 0.15.
"""
_DOUBT = 16.0
"""A mean rank of healthy draws is over its limit once in e^16 proofs, at the most, about."""
_K3_LEAST, _K3_NOISE = 4.0, 12.0
"""The smallest limit of k3 in squares of that of the mean, and the noise of one token in means.

The k3 of a normal error is 0.8 squares of its mean. Tails make it 1.2 to 1.4 in bfloat16.
"""
_FEW = 64
"""A kind of tokens with fewer tokens than this is not judged by itself."""
_FAR = 2.0
"""A kind of tokens whose gap is this many times that of its counterpart points to a cause."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The figures of |a - b| over tokens."""

    tokens: int = 0
    mean: float = 0.0
    k3: float = 0.0
    """Mean of exp(b - a) - 1 - (b - a): the KL of both policies, never negative."""
    worst: float = 0.0

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, k3 {self.k3:.2g}, worst token {self.worst:.2g}"


def gap(a: Floats, b: Floats) -> Gap:
    """Return the figures of two log-probs of the same tokens. A value that is not finite is wrong."""
    if not len(a):
        return Gap()
    delta = np.nan_to_num(b - a, nan=np.inf)
    size = np.abs(delta)
    with np.errstate(over="ignore", invalid="ignore"):
        k3 = np.expm1(delta) - delta
    mean_k3 = float(np.nan_to_num(k3, nan=np.inf).mean())
    return Gap(len(a), float(size.mean()), mean_k3, float(size.max()))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that engines drew with known weights, and what others say about them. [K] each."""

    engine: Floats
    trainer: Floats
    reference: Floats
    """Of an independent model. NaN for tokens that it did not read."""
    kinds: Mapping[str, Mask]
    """What the tokens have in common, by name."""
    unchanged: Floats | None = None
    """The trainer's log-probs with the true weights, if the weights were displaced."""
    ranks: Floats | None = None
    """The reference's probability of all likelier tokens, with half of that of equal ones.

    Its expected value is exactly 1/2 if tokens are drawn from the policy.
    """
    quantised: Floats | None = None
    """Of an independent model that computes in 8 bits, as the engine does. None in other runs."""

    def floor(self, mask: Mask | None = None) -> Gap:
        """Return the gap that the numbers of both engines explain, on the tokens of `mask`."""
        if self.quantised is None:
            return _gap_where(self.reference, self.trainer, self.reference, mask)
        # The tokens are drawn in 8 bits. The other k3 has tails that no engine shows.
        return _gap_where(self.quantised, self.quantised, self.trainer, mask)

    def missing(self) -> tuple[float, float]:
        """Return the part of the displacement that the engine lacks, and its standard error.

        An engine without the new weights of one part differs from the trainer along the change that
        they make. So it shows far below the noise of single tokens.
        """
        if self.unchanged is None:
            return 0.0, 0.0
        # What 8 bits change is no part of the displacement.
        own = self.trainer if self.quantised is None else self.quantised
        known = np.isfinite(self.reference) & np.isfinite(self.unchanged) & np.isfinite(own)
        if not known.any():
            return 0.0, 0.0
        # The reference, because the trainer's noise would be on both sides.
        change = (self.unchanged - self.reference)[known]
        error = (self.engine - own)[known]
        change, error = change - change.mean(), error - error.mean()
        power = float((change**2).sum())
        if not power > 0:
            return 0.0, 0.0
        part = float((change * error).sum()) / power
        rest = error - part * change
        return part, float(np.sqrt((rest**2).mean() / power))


def _joined(parts: Sequence[Drawn]) -> Drawn:
    """Return the tokens of all parts, without their kinds."""
    sides = ("engine", "trainer", "reference")
    engine, trainer, reference = (np.concatenate([getattr(d, s) for d in parts]) for s in sides)
    quantised = [d.quantised for d in parts if d.quantised is not None]
    return Drawn(
        engine, trainer, reference, {}, quantised=np.concatenate(quantised) if quantised else None
    )


def _gap_where(read: Floats, a: Floats, b: Floats, mask: Mask | None = None) -> Gap:
    """Return the figures of the tokens of `mask` that have no NaN in `read`."""
    known = np.isfinite(read) if mask is None else np.isfinite(read) & mask
    return gap(a[known], b[known])


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is over its limit."""

    where: str
    """The round: "true weights" or "displaced weights"."""
    kind: str
    value: float
    limit: float

    def __str__(self) -> str:
        return f"{self.kind} ({self.where}) {self.value:.3g}, limit {self.limit:.3g}"


def worst(findings: Sequence[Finding]) -> Finding:
    """Return the finding that is the most times over its limit."""
    return max(findings, key=lambda one: one.value / one.limit)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a proof."""

    gap: Gap
    floor: float
    limit: float
    findings: tuple[Finding, ...] = ()
    causes: tuple[str, ...] = ()
    rounds: Mapping[str, Gap] = field(default_factory=dict)
    missing: float = 0.0
    explained: bool = True
    """Whether the floor was measured."""
    floor_k3: float = 0.0
    bits: float | None = None
    """The gap that 8 bits alone make, in a run that draws with them."""

    def error(self) -> GapError | None:
        """Return the error of engines that disagree. None if they agree."""
        if not self.findings:
            return None
        rounds = "; ".join(f"{name}: {figures}" for name, figures in self.rounds.items())
        return disagreement(f"{worst(self.findings)}; {rounds}", self.causes)


def disagreement(figures: str, causes: Sequence[str]) -> GapError:
    """Return the error in the form that both checks share."""
    numbered = " ".join(f"({i}) {cause}." for i, cause in enumerate(causes, 1))
    return GapError(
        "rollout engines and trainer give different log-probs with the same weights, so a run would "
        f"train on wrong tokens. Gap: {figures}. Likely causes, the first one first: {numbered} "
        "guard.on_gap=warn trains in spite of it"
    )


def limit_of(floor: float, least: float, factor: float = FACTOR) -> float:
    return max(least, factor * floor)


def limit_of_few(limit: float, tokens: float, noise: float = 4.0) -> float:
    """Return the limit for the mean of so few tokens, where one has `noise` times the mean."""
    return limit * (1 + noise / max(tokens, 1) ** 0.5)


def judge(
    rounds: Mapping[str, Drawn],
    *,
    dtype: str,
    least: float,
    most_bits: float | None = None,
    alone: float | None = None,
) -> Verdict:
    """Judge the rounds of a proof.

    `most_bits` is the largest gap that 8 bits alone may make, in a run that draws with them. `alone` is
    the gap of a request without company, if known.
    """
    if not rounds:
        return Verdict(Gap(), ASSUMED[dtype], limit_of(ASSUMED[dtype], least), explained=False)
    every = list(rounds.values())
    whole = _joined(every)
    own = whole.floor()
    floor = own if own.tokens else Gap(0, ASSUMED[dtype], 1.5 * ASSUMED[dtype] ** 2)
    limit, findings, missing = limit_of(floor.mean, least), list[Finding](), 0.0
    if (exact := _gap_where(whole.reference, whole.trainer, whole.reference).mean) > TRAINER[dtype]:
        findings.append(Finding("any weights", _TRAINER, exact, TRAINER[dtype]))
    if whole.quantised is not None:
        near = _gap_where(whole.quantised, whole.engine, whole.quantised)
        most = limit_of_few(ROUNDED * floor.mean, near.tokens)
        if near.mean > most:
            findings.append(Finding("any weights", _ROUNDED, near.mean, most))
    figures = {name: gap(d.engine, d.trainer) for name, d in rounds.items()}
    for name, drawn in rounds.items():
        findings += of_kinds(name, drawn, floor, least)
        part, error = drawn.missing()
        if abs(part) > (most := STALE_SHARE[dtype] + _SIGMAS * error):
            findings.append(Finding(name, _MISSING, abs(part), most))
        missing = max(missing, abs(part))
    findings += _of_ranks(rounds)
    bits = None
    if most_bits is not None and (true := rounds.get(TRUE)) is not None:
        # Displaced weights are not those of the run. Without the model in 8 bits, all of it counts.
        alike = true.floor()
        alike = alike if alike.tokens else gap(true.engine, true.trainer)
        bits, most = alike.mean, limit_of_few(most_bits, alike.tokens)
        if bits > most:
            findings.append(Finding(TRUE, _BITS, bits, most))
    return Verdict(
        gap(whole.engine, whole.trainer),
        floor.mean,
        limit,
        tuple(findings),
        tuple(causes(rounds, findings, alone)) if findings else (),
        figures,
        missing,
        bool(own.tokens),
        floor.k3,
        bits,
    )


_ALL, _K3 = "the mean gap of all tokens", "the k3 of all tokens"
_TRAINER = "the trainer's own gap to an independent model"
_MISSING = "the share of a change of weights that engines lack"
_ROUNDED = "the mean gap to an independent model in 8 bits"
_RANKS = "the shift of the mean rank of drawn tokens"
_BITS = "the mean gap that 8 bits alone make"


def _of_ranks(rounds: Mapping[str, Drawn]) -> list[Finding]:
    """Judge whether tokens are drawn from the policy, whose log-probs may be right all the same."""
    known = [d.ranks[np.isfinite(d.ranks)] for d in rounds.values() if d.ranks is not None]
    shift = np.concatenate([np.zeros(0), *known]) - 0.5
    if not len(shift):
        return []
    # Freedman's inequality for sums of draws, whose differences are at most 1.
    noise = np.sqrt(2 * _DOUBT * (shift**2).sum()) + 2 / 3 * _DOUBT
    limit, value = RANK_SHIFT + float(noise) / len(shift), abs(float(shift.mean()))
    return [Finding("any weights", _RANKS, value, limit)] if value > limit else []


def of_kinds(name: str, drawn: Drawn, floor: Gap, least: float) -> list[Finding]:
    """Return the kinds of tokens over their limits. All tokens are the first kind.

    The tokens that gave the floor are as uncertain as a kind's mean. A floor of no tokens is known.
    """
    found = []
    for kind, mask in {_ALL: np.ones(len(drawn.engine), dtype=bool), **drawn.kinds}.items():
        if kind != _ALL and mask.sum() < _FEW:
            continue
        own = drawn.floor(mask)
        own = own if own.tokens >= _FEW else Gap()
        now, few = gap(drawn.engine[mask], drawn.trainer[mask]), floor.tokens or np.inf
        few = min(now.tokens, few)
        most = limit_of_few(limit_of(max(floor.mean, own.mean), least), few)
        if now.mean > most:
            found.append(Finding(name, kind, now.mean, most))
        most = max(_K3_LEAST * least**2, K3_FACTOR * max(floor.k3, own.k3))
        if kind == _ALL and now.k3 > (most := limit_of_few(most, few, _K3_NOISE)):
            found.append(Finding(name, _K3, now.k3, most))
    return found


TRUE, DISPLACED = "true weights", "displaced weights"
EARLY, LATE = "first tokens", "tokens after the 64th"
FEW, MANY = "first tokens beside few requests", "first tokens beside many requests"
ASKED_FIRST, ASKED_AGAIN = "prompts asked for the first time", "prompts asked again"
STRAIGHT, CONTINUED = "tokens before an interruption", "tokens after an interruption"
LONG = "the longest contexts"
OF_REPLICA = "tokens of replica {}"
SECOND = "second turns"


_OF_FINDINGS = {
    _TRAINER: "the trainer differs from an independent model by more than its dtype explains: "
    "model.compile=false, actor.ulysses_sequence_parallel_size=1, trainer.engine=fsdp and "
    "model.dtype=float32 show which part",
    _RANKS: "tokens are not drawn from the distribution whose log-probs the engine returns, as with "
    "top-k, top-p, a penalty or another temperature: remove it from "
    "rollout.engine_kwargs. rollout.engine=torch shows which engine is wrong",
    _BITS: "8 bits are too coarse for this model: before any training, OUTSIDE of its tokens "
    f"leave a clip of {_CLIP:g}. SmolLM2-135M learned nearly nothing at 0.21 nats. "
    "rollout.quantization=null, or another model; or a larger guard.max_quantization_gap, "
    "with async_training.use_rollout_log_probs=false "
    "algorithm.rollout_correction.rollout_is=token, which clips no token for it",
    _ROUNDED: "the engine computes in 8 bits, but not as they should be: a wrong scale, or other "
    "kernels. rollout.quantization=null shows it",
}
"""The cause that a finding itself points to."""


def causes(
    rounds: Mapping[str, Drawn], findings: Sequence[Finding], alone: float | None = None
) -> list[str]:
    """Return the likely causes with the keys to change, by the pattern of the gap."""
    true, displaced, kinds = rounds.get(TRUE), rounds.get(DISPLACED), {f.kind for f in findings}
    found = [text for kind, text in _OF_FINDINGS.items() if kind in kinds]
    if true is not None and _BITS in kinds:
        with np.errstate(over="ignore", invalid="ignore"):
            outside = float((np.abs(np.expm1(true.trainer - true.engine)) > _CLIP).mean())
        found = [text.replace("OUTSIDE", f"{outside:.0%}") for text in found]
    findings = [f for f in findings if f.kind not in (_RANKS, _TRAINER, _BITS)]
    first = displaced if all(f.where == DISPLACED for f in findings) else true or displaced
    if not findings or first is None:
        return found

    def mean(kind: str) -> float:
        mask = first.kinds.get(kind)
        return gap(first.engine[mask], first.trainer[mask]).mean if mask is not None else 0.0

    def grows(small: str, large: str) -> bool:
        return 0 < _FAR * mean(small) < mean(large)

    beside = alone is not None and _FAR * alone < gap(first.engine, first.trainer).mean
    late = grows(EARLY, LATE)
    patterns = (
        (
            _scaled(first),
            "the log-probs differ by a constant factor, as with another temperature: "
            "rollout.temperature must be that of the engine's log-probs "
            "(logprobs_mode=processed_logprobs in rollout.engine_kwargs)",
        ),
        (
            first is true and (grows(FEW, MANY) or beside),  # wrong graphs: wrong with all weights
            "the gap grows with the requests that run at once, as with wrong CUDA graphs: "
            "rollout.engine_kwargs={compilation_config:{cudagraph_mode:PIECEWISE}}, or "
            "rollout.enforce_eager=true",
        ),
        (
            grows(ASKED_FIRST, ASKED_AGAIN),
            "prompts that were asked before are worse, as with old KV in the prefix cache: "
            "rollout.enable_prefix_caching=false, or rollout.session_kv_slots=0",
        ),
        (
            grows(STRAIGHT, CONTINUED),
            "tokens after an interruption or a sync are worse, as with old KV: "
            "rollout.kv_on_swap=recompute, async_training.on_sync=drain",
        ),
        (
            first is displaced,
            "only new weights are wrong, so a sync leaves a part as it was: a layer, a head that is "
            "tied in one engine alone, or KV of old weights. model.path must be one model for both; "
            "rollout.enable_prefix_caching=false tells KV from weights",
        ),
        (
            first is not displaced and late,
            "the gap grows along a response, as with wrong positions or a wrong mask: the rope of "
            "model.override_config, or rollout.engine_kwargs={attention_backend:...}",
        ),
        (
            first is not displaced and not late,
            "the gap is there from the first token on, as with graphs or kernels that read prompts "
            "wrongly: rollout.enforce_eager=true shows it, and rollout.engine_kwargs chooses others; "
            "or with another model: its positions (rope), mask, or the order of its heads. "
            "rollout.engine=torch shows which engine is wrong",
        ),
    )
    return [*found, *(text for holds, text in patterns if holds)]


def _scaled(drawn: Drawn) -> bool:
    """Return whether the engine's log-probs are nearly a multiple of the trainer's."""
    a, b = drawn.trainer - drawn.trainer.mean(), drawn.engine - drawn.engine.mean()
    power = float((a**2).sum() * (b**2).sum())
    if not (np.isfinite(power) and power > 0):
        return False
    like, slope = float((a * b).sum()) / power**0.5, float((a * b).sum() / (a**2).sum())
    return like > 0.98 and abs(slope - 1) > 0.03
