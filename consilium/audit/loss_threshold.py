"""The simplest attack: members are the cases with the smaller loss (Yeom et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from consilium.audit.signals import CaseKey, Populations, centred
from consilium.audit.statistics import Numbers, Power, best_threshold, decided, power


def threshold_attack(people: Populations, scores: Mapping[CaseKey, float], seed: int) -> Power:
    """Rank all members and non-members by a score, the larger the more a member.

    The threshold of the decisions comes from the half of the members that is known and the known non-members, and is
    used on the other half; where nobody is known not to be a member, the attack only ranks.
    """
    members, others = _apart(scores, people.members, people.others)
    known = sorted(people.known, key=lambda key: (key.site, key.case))
    by_class = None
    if known and people.outsiders and people.unknown:
        keys = [*known, *people.outsiders, *people.unknown, *people.others]
        values = centred(keys, np.array([scores[key] for key in keys]))
        ends = np.cumsum([len(known), len(people.outsiders), len(people.unknown)])
        learned_in, learned_out, tried_in, tried_out = np.split(values, ends)
        edge = best_threshold(learned_in, learned_out)
        by_class = decided(tried_in >= edge, tried_out >= edge)
    return power(members, others, seed, by_class)


def _apart(
    scores: Mapping[CaseKey, float], members: Sequence[CaseKey], others: Sequence[CaseKey]
) -> tuple[Numbers, Numbers]:
    keys = [*members, *others]
    values = centred(keys, np.array([scores[key] for key in keys]))
    return values[: len(members)], values[len(members) :]
