"""The three ways to train a selector when a site holds a single class; shared by FedSM and FedSM-extra.

"synchronised": sites send their mean gradient and the server takes one Adam step. "moments": one Adam step per epoch at
the site, its moments averaged, as in the authors' published code. "paper": Adam on every batch, as printed; it fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from consilium.errors import StudyError
from consilium.learning.fit import Fit
from consilium.learning.server_step import adam_step
from consilium.method import OptimizerState
from consilium.site import Local, Roster
from consilium.weights import SiteName, Weights, mean

TRAININGS = ("synchronised", "moments", "paper")

Sent = tuple[Weights | None, OptimizerState | None]  # a selector or its gradient, and moments


def check_fields(**fields: tuple[str, tuple[str, ...]]) -> None:
    """Refuse a field's value that is not one of those allowed."""
    for name, (value, allowed) in fields.items():
        if value not in allowed:
            raise StudyError(f"[method] {name} = {value!r}: it must be one of {', '.join(allowed)}.")


def check_sites(roster: Roster, local: Local, name: str) -> None:
    """Refuse a study in which a super model cannot work."""
    if len(roster) < 2:
        raise StudyError(f"{name} needs at least two sites; with one, use 'local'.")
    if local.batchnorm != "average":
        raise StudyError(
            f"[local] batchnorm = '{local.batchnorm}' keeps normalisation at its site, but {name} lets every site use "
            "the other sites' models, which would come with a normalisation nobody trained; use batchnorm = 'average'."
        )


def weak_pull(pull: float, roster: Roster) -> list[str]:
    """The warning that λ is below 1/K."""
    if pull >= 1 / len(roster):
        return []
    return [
        f"pull = {pull} is below 1/K = {1 / len(roster):.3f}: the other sites then weigh more in a personal model than "
        "its own site."
    ]


def selector_reply(training: str, done: Fit, got: Weights, state: OptimizerState | None, lr: float) -> Sent:
    """What a site sends of its round of selector training."""
    if training == "synchronised":
        return done.gradient, None
    if training == "paper":
        return done.weights, None
    # the published code: one Adam step per epoch on the *sum* of the gradients, moments travel
    assert done.gradient is not None
    return adam_step(got, done.gradient * done.cases, state, lr)


def merged_selector(
    training: str,
    selector: Weights,
    state: OptimizerState | None,
    replies: Mapping[SiteName, Sent],
    n: Mapping[SiteName, int],
    lr: float,
) -> tuple[Weights, OptimizerState | None]:
    """The server's new selector and, unless "paper", the state of its Adam."""
    average = mean({name: weights for name, (weights, _) in replies.items()}, n)  # type: ignore[misc]
    if training == "synchronised":
        return adam_step(selector, average, state, lr)
    states = {name: moments for name, (_, moments) in replies.items() if moments is not None}
    if not states:
        return average, None
    first = next(iter(states.values()))
    slots = {slot: mean({k: s.slots[slot] for k, s in states.items()}, n) for slot in first.slots}
    return average, OptimizerState(max(moments.step for moments in states.values()), slots)


def blank_state(training: str, selector: Weights) -> OptimizerState | None:
    """The moments a site is expected to send, by their shape."""
    return OptimizerState(0, {"exp_avg": selector, "exp_avg_sq": selector}) if training == "moments" else None
