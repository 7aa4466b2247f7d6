"""Patients drawn at random, and noise on what they add up to: the two halves of DP-SGD that depend on a secret.

Every step draws each patient of the site by itself with the same chance (Poisson sampling). All cases, slices and
patches of a patient come along or none does, so that one patient is one bounded contribution.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from consilium.batch import Batch
from consilium.local_training import Local
from consilium.privacy.keyed import normal, uniform
from consilium.randomness import derive
from consilium.site import Round, Site, Spent
from consilium.weights import Weights

DP_SGD, GAUSSIAN, UNPROTECTED = "dp-sgd", "gaussian", "none"  # kinds of `Spent`
MOST_VALUES = 1 << 26  # of cases' own gradients at a time, however many cases were drawn


def sampling(cases: int, local: Local) -> tuple[float, int]:
    """The chance of a patient to be in a step, and the steps of one pass: a step holds a batch on average."""
    return min(1.0, local.batch_size / max(1, cases)), local.epochs * math.ceil(cases / local.batch_size)


@dataclass(frozen=True)
class Draw:
    """One step's patients."""

    number: int  # of the step within its pass
    batches: Sequence[Batch]  # their cases, every patient's in a row; none if nobody was drawn
    expected: float  # how many patients a draw has on average: what sums are divided by
    key: bytes  # for the noise of this step


def draws(site: Site, round: Round, start: Sequence[Weights], values: int, what: Sequence[str]) -> Iterator[Draw]:
    """The draws of one pass over a site's cases, and their entry in the site's ledger.

    `start` are the models that the pass begins with. Another order gets other draws, for the sampled patients of two
    different answers must not be the same; so do the same models with another control variate or other teachers.
    `values`: the parameters of the largest model. `what` is trained.
    """
    private = site.private
    assert private is not None
    patients = site.data.patients()
    rate, steps = sampling(len(site.data), site.local)
    models = [weights.digest for weights in start]
    begun = "|".join(
        [str(round.index), round.phase, *models, *(given for given in private.given if given not in models)]
    )
    drawn = hmac.new(private.key, begun.encode(), hashlib.sha256).hexdigest()[:16]
    size = max(1, min(site.local.batch_size, MOST_VALUES // max(1, values)))
    augmented = site.generator(round, "batches").initial_seed()
    private.spent.append(Spent(tuple(what), DP_SGD, private.noise, rate, steps, private.clip, drawn=drawn))
    for number in range(steps):
        key = hmac.new(private.key, f"{begun}|{number}".encode(), hashlib.sha256).digest()
        chosen = np.flatnonzero(uniform(key + b"draw", len(patients)) < rate)
        batches = list(site.data.of_patients([int(i) for i in chosen], size, derive(augmented, number)))
        yield Draw(number, batches, rate * len(patients), key)


def covered(total: Tensor, most: float, noise: float, key: bytes, name: str) -> Tensor:
    """A sum with normal noise on every value, of `noise` times the most that one patient can change it.

    The noise also depends on the sum itself: no noise is ever used for two different sums, so that it cannot be taken
    off by asking twice, and the same sum gets the same noise, so that asking again tells nothing new.
    """
    flat = total.detach().cpu().contiguous()
    content = hashlib.sha256(flat.numpy().data).digest()
    drawn = normal(hmac.new(key, name.encode() + content, hashlib.sha256).digest(), flat.numel())
    return total + (drawn.view(flat.shape) * (noise * most)).to(total)
