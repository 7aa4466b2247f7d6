"""Cases that are there twice: in training and in a test, in two sites, or under two masks."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from consilium.data.alike import SMALLEST, near_pairs
from consilium.data.seen import DataFinding, SeenCase, SeenFederation

REAL_NAME = 5  # characters: shorter names of patients are counters that every site begins anew
_TESTS = ("valid", "test")


def of_copies(seen: SeenFederation) -> Iterator[DataFinding]:
    """Images that are the same, value by value, or nearly so; between training and a test they are errors."""
    same: dict[str, list[SeenCase]] = defaultdict(list)
    for one in seen.cases:
        same[one.facts.digest].append(one)
    for group in same.values():
        if len(group) > 1:
            yield from (_copy(seen, *pair, near=False) for pair in _pairs(group))
    alone = [group[0] for group in same.values() if min(group[0].facts.shape[-2:]) >= SMALLEST]
    if len(alone) > 1 and len({len(one.facts.small) for one in alone}) == 1:
        thumbnails = np.stack([one.facts.thumbnail() for one in alone])
        for i, j in near_pairs([one.facts.hash for one in alone], thumbnails):
            if alone[i].case.patient != alone[j].case.patient or alone[i].site != alone[j].site:
                yield _copy(seen, alone[i], alone[j], near=True)


def _pairs(group: Sequence[SeenCase]) -> Iterator[tuple[SeenCase, SeenCase]]:
    """One pair for every two places (a site's split): a picture may be there hundreds of times."""
    places: dict[tuple[str, str], SeenCase] = {}
    for one in group:
        places.setdefault((one.site, one.case.split), one)
    others = [one for one in group if one.case.patient != group[0].case.patient]
    if len(places) == 1 and others:  # of one patient it may be meant
        yield group[0], others[0]
    yield from itertools.combinations(places.values(), 2)


def _copy(seen: SeenFederation, one: SeenCase, two: SeenCase, near: bool) -> DataFinding:
    """About the case that is better left out: the one in training, else the later."""
    leak = is_leak(one, two)
    aside, kept = (one, two) if leak and one.case.split == "train" else (two, one)
    how = "nearly the same picture as" if near else "the same picture as"
    where = f"{kept.case.split or 'unsplit'} case {kept.case.name!r} of site {kept.site!r}"
    what = f"it is {how} {where}, and itself in {aside.case.split or 'no split'}"
    if leak:
        effect = "The model is tested on what it was trained on, and the score is too good."
        remedy = "Leave one of them out; --fix leaves out this one." if not near else "Look at both; leave one out."
        return seen.about("error", "near copy" if near else "copy", aside, what, effect, remedy)
    effect = "It counts twice." if one.site == two.site else "Two sites hold the same patient."
    remedy = "Look at both; leave one out."
    return seen.about("warning", "near copy" if near else "copy", aside, what, effect, remedy)


def is_leak(one: SeenCase, two: SeenCase) -> bool:
    """Whether one is trained on and the other tests or chooses the model."""
    splits = {one.case.split, two.case.split}
    return "train" in splits and bool(splits & set(_TESTS))


def of_repeated_masks(seen: SeenFederation) -> Iterator[DataFinding]:
    """One mask for two different images: drawn for one of them at most."""
    same: dict[str, list[SeenCase]] = defaultdict(list)
    for one in seen.cases:
        if one.facts.labels:
            same[one.facts.mask_digest].append(one)
    for group in same.values():
        first = group[0]
        for other in group[1:]:
            if other.facts.digest != first.facts.digest:
                yield seen.about(
                    "warning", "repeated mask", other, f"it is the mask of {first.name} too, whose image is another",
                    "Unless both truly look so, one image is learned with a wrong mask.", "Look at both.", mask=True,
                )  # fmt: skip


def of_patients(seen: SeenFederation) -> Iterator[DataFinding]:
    """Patients of one name in two sites; an error where one is trained on and the other a test.

    Names that most of two sites' patients share are counters, and say nothing. So do short ones.
    """
    sites = {
        name: {case.patient: case for case in reversed(site.cases)} for name, site in seen.federation.sites.items()
    }
    known = {(one.site, one.case.name): one for one in seen.cases}
    for (a, ours), (b, theirs) in itertools.combinations(sites.items(), 2):
        both = [patient for patient in ours if patient in theirs and len(patient) >= REAL_NAME]
        if not both or 2 * len(both) >= min(len(ours), len(theirs)):
            continue
        for patient in both:
            one, two = known.get((a, ours[patient].name)), known.get((b, theirs[patient].name))
            if one is None or two is None:
                continue
            leak = is_leak(one, two)
            yield seen.about(
                "error" if leak else "warning", "patient in two sites", two,
                f"its patient's name is also in site {a!r} ({one.case.split or 'no split'}; here "
                f"{two.case.split or 'no split'})",
                "If it is one person, the model is tested on a patient it was trained on."
                if leak else "If it is one person, it counts twice.",
                "Keep a patient in one site and split, or rename one of two people of the same name.",
            )  # fmt: skip


LEAKS = (of_copies, of_repeated_masks, of_patients)
