"""What left each site in a run: counted from its journal and its method's messages, with what the audit found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from consilium.audit.auditing import FILE, FOLDER
from consilium.audit.tables import rows
from consilium.describe import field_sizes
from consilium.errors import UserError
from consilium.federation.forecasting import size_text
from consilium.files import read_json
from consilium.left_log import LOG, left
from consilium.messages import card_from_json
from consilium.method import Maybe
from consilium.outgoing import is_loss
from consilium.privacy.ledger import ledger, totals
from consilium.reports.findings import picture
from consilium.reports.leaks import LeakPage, LeftField, LeftSite
from consilium.reports.reading import RunView
from consilium.run_folder import RunFolder
from consilium.site_opening import place_in
from consilium.study import Study
from consilium.timeline import timeline
from consilium.weights import Weights

MODEL = "who was trained on (see the audit); an update of few cases can show their images"
REVEALS = {
    "core": MODEL,
    "teacher": MODEL + "; what it was taught to draw",
    "selector": "what the site's images look like beside the others'",
    "features": "mean and spread of the training images as the model sees them; of one case, the case itself",
    "routing": "how like the other sites' the validation images are, summed",
    "calibration": "how well each model does on the validation cases, summed, for every threshold",
    "sums": "mean and spread of the training images as the model sees them, and how well each model fits them",
    "holds": "nothing: whether the site has the models",
    "scores": "how hard the validation cases are, summed",
    "cases": "how many cases there are",
    "steps": "how many cases there are",
    "n": "how many cases there are",
    "wants": "which other sites the site finds useful",
    "uncertainty_mean": "how unsure models are of the training cases, summed",
    "uncertainty_variance": "how unsure models are of the training cases, summed",
    "mask": "which weights the training cases move most",
    "matches": "whether the common model does as well as the site's own",
}
ZERO = "nothing: it is always 0 in a private study"
NUMBER = "a number about the training cases, such as how well a model fits them"
BESIDE = (
    (
        "roll call: numbers of cases, labels, versions, keyed hashes of the case table and the arrays",
        "how many cases there are; whether they change between two runs",
    ),
    ("roll call: ranges of sizes, spacings and values over the training images", "which scanner or protocol it may be"),
    (
        "scores of validation and test cases under keyed hashes of their names",
        "how many cases there are and how hard each one is; that the same case is scored again within the run",
    ),
)


def leak_page(view: RunView) -> LeakPage | None:
    """The page of one run; None where its study cannot be opened, for instance for code that is not here."""
    try:
        study = RunFolder.open(view.folder).study
        facts = read_json(view.folder / "origin.json")
        roster = {site: card_from_json(card) for site, card in facts["members"].items()}
    except (UserError, KeyError):
        return None
    sent = [event for event in view.events if event.get("event") == "train"]
    refused = Counter((str(e.get("site", "")), str(e["event"])) for e in view.events if e.get("event") in _NOT_MERGED)
    audit = _audit(view)
    spent, bare = _spent(view, study, roster)
    told = next((event for event in view.events if event.get("event") == "privacy"), None)
    return LeakPage(
        run=view.name,
        fields=tuple(_fields(study, roster, sent)),
        sites=tuple(_sites(roster, sent, refused, spent)),
        privacy=_privacy(study, told, bare),
        beside=BESIDE[:1] + BESIDE[2:] if study.privacy.on else BESIDE,
        bar=str(audit["bar"]) if audit else "",
        audited=tuple((row[0], row[1], row[4], _rate(row), row[-1]) for row in rows(audit)) if audit else (),
        pictures=tuple(
            picture(file, alt)
            for name, alt in PICTURES.items()
            if (file := view.folder / FOLDER / f"{name}.svg").exists()
        ),
    )


def _rate(row: Sequence[str]) -> str:
    return f"{row[5]} at {row[6]}" if row[6] != "–" else "–"


_NOT_MERGED = {"refused": "refused by the server", "lost": "no answer", "left out": "left out", "away": "away"}
PICTURES = {"uncertainty": "How unsure each model is of members and of non-members; the more alike, the less it tells."}


def _fields(study: Study, roster: Mapping[str, Any], sent: list[Mapping[str, Any]]) -> Iterator[LeftField]:
    times = Counter((str(event["phase"]), str(event["site"])) for event in sent)
    card = next(iter(roster.values()))
    for phase, round in timeline(study.method, study.plan.rounds):
        if round.step:
            continue
        blank = study.method.blank(study.task, roster, card, round)
        by_site = [times[phase.name, site] for site in sorted(roster)]
        for name, size in field_sizes(blank).items():
            part = getattr(blank, name, None) if hasattr(blank, name) else getattr(blank, f"{name}_", None)
            if part is None or part == () or (not phase.counts and isinstance(part, float) and not part):
                continue  # the message has the field, but nothing is in it in this phase
            once = isinstance(part, Maybe) and part.once
            counts = [min(1, count) for count in by_site] if once else by_site
            said = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
            total = size_text(size * sum(counts))
            yield LeftField(name, phase.name, said, size_text(size), total, _reveals(name, part, study.privacy.on))


def _reveals(name: str, part: Any, private: bool) -> str:
    if private and is_loss(name):
        return ZERO
    if name in REVEALS:
        return REVEALS[name]
    like = part.like if isinstance(part, Maybe) else part
    return MODEL if isinstance(like, Weights) else NUMBER


def _sites(
    roster: Mapping[str, Any],
    sent: list[Mapping[str, Any]],
    refused: Mapping[tuple[str, str], int],
    spent: Mapping[str, str],
) -> Iterator[LeftSite]:
    for site in sorted({*roster, *(name for name, _ in refused if name)}):
        own = [event for event in sent if event["site"] == site]
        missed = [f"{what}: {refused[site, kind]}" for kind, what in _NOT_MERGED.items() if refused.get((site, kind))]
        total = size_text(sum(int(event.get("bytes_up", 0)) for event in own))
        cases = str(roster[site].n) if site in roster else "–"
        yield LeftSite(site, cases, len(own), total, spent.get(site, "–"), "; ".join(missed) or "nothing")


def _spent(view: RunView, study: Study, roster: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """ε by site, and what left without noise: from the sites' ledgers where they are here, else what the journal told.

    Between hospitals a ledger stays with its hospital, and the journal says what each gives away at most.
    """
    privacy = study.privacy
    if not privacy.on:
        return {}, []
    told = next((event for event in view.events if event.get("event") == "privacy"), None)
    most = {} if told is None else {site: told.get("sites", {}).get(site, told["epsilon"]) for site in roster}
    found, bare = {site: f"at most {epsilon:.3g}" for site, epsilon in most.items()}, set[str]()
    for site in roster:
        place = place_in(view.folder, site)
        entries = ledger(left(place)) if (place / LOG).exists() else []
        if not entries:
            continue
        try:
            total = totals(entries, privacy.delta, privacy.accountant)
        except (UserError, ImportError):  # the accountant is not installed here
            continue
        bare |= set(total["unprotected"])
        found[site] = "no bound" if total["epsilon"] is None else f"{total['epsilon']:.3g}"
    return found, sorted(bare)


def _privacy(study: Study, told: Mapping[str, Any] | None, bare: Sequence[str]) -> str:
    if not study.privacy.on or told is None:
        return "No noise was added to what left (no [privacy]): there is no ε, and no bound on what it reveals."
    whose = "each training patient" if told.get("unit") == "patient" else "all training cases of a site together"
    without = f" Without noise left: {', '.join(bare)}." if bare else ""
    return f"ε at δ {told['delta']:.3g} protects {whose}; at most {told['epsilon']:.3g} over the run.{without}"


def _audit(view: RunView) -> dict[str, Any] | None:
    path = view.folder / FOLDER / FILE
    if not path.exists():
        return None
    found: dict[str, Any] = read_json(path)
    return found
