"""Where a run stands, read from its journal: for a page, for JSON, for Prometheus."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

RECENT = 20  # rounds whose length forecasts the time left
POINTS = 200  # of a curve, at most: the page is asked for every two seconds
LATEST = 50  # events about missing or rejected sites
NEVER = ("away", "lost", "refused", "dropped", "left out", "rejoined", "absent", "undelivered", "unscored")
Event = Mapping[str, Any]
SiteName = str
Labels = tuple[tuple[str, str], ...]  # of a Prometheus series


@dataclass
class SiteStatus:
    """One site, as the journal tells it."""

    cases: int = 0
    state: str = "waiting"  # "trained", "away", "rejected", "left out"
    round: int = 0  # of its last merged update
    why: str = ""  # it is not "trained"
    loss: float | None = None
    score: float | None = None  # the last on its validation cases
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0  # of training


@dataclass
class ScoreCurve:
    """A validation score over rounds: the site mean, and every site's own (None where it has none)."""

    metric: str = ""
    model: str = ""
    rounds: list[int] = field(default_factory=list)
    site_mean: list[float | None] = field(default_factory=list)
    sites: dict[SiteName, list[float | None]] = field(default_factory=dict)


@dataclass
class RunStatus:
    """A run at one moment."""

    run: str
    state: str  # "starting", "running", "finished", "interrupted", "not begun"
    method: str = ""
    phase: str = ""
    round: int = 0  # of the paper's
    rounds: int = 0
    began: str = ""
    updated: str = ""
    seconds_per_round: float | None = None
    seconds_left: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    sites: dict[SiteName, SiteStatus] = field(default_factory=dict)
    curve: ScoreCurve = field(default_factory=ScoreCurve)
    losses: ScoreCurve = field(default_factory=lambda: ScoreCurve(metric="loss"))  # of training
    # who was away or rejected, and why; the latest last. What repeats in the next rounds is one, "round" to "until"
    events: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def status_of(events: Iterable[Event], run: str, state: str) -> RunStatus:
    """Read a journal.

    Args:
        events: of the journal, the oldest first.
        run: the run's name.
        state: what is known from elsewhere, see `RunStatus.state`.
    """
    status = RunStatus(run, state)
    lengths: list[float] = []
    ends: list[str] = []  # when rounds ended, since the run was last started
    losses: dict[int, dict[SiteName, float]] = {}
    asides: frozenset[str] = frozenset()
    told = _EventLog()
    for event in events:
        what = event["event"]
        status.updated = event.get("time", status.updated)
        if what in ("start", "resume"):
            asides = frozenset(event["aside"])
            ends = [event["time"]] if "time" in event else []
            status.began = status.began or event.get("time", "")
            status.method, status.rounds, status.round = event["method"], event["rounds"], event["round"]
            for name, cases in event["sites"].items():
                status.sites.setdefault(name, SiteStatus()).cases = cases
        elif what == "train":
            _train(status, event, told, event["phase"] in asides)
            if event["phase"] not in asides and event.get("loss") is not None:
                losses.setdefault(event["round"], {})[event["site"]] = event["loss"]
        elif what == "round":
            status.phase = event["phase"]
            if event["phase"] not in asides:
                status.round = event["round"]
                lengths.append(event["seconds"])
                ends += [event["time"]] if "time" in event else []
        elif what == "score" and event["phase"] not in ("best", "last"):
            _score(status.curve, status.sites, event)
        elif what in NEVER:
            _missing(status, event, told)
    status.events = told.last(LATEST)
    if lengths:
        status.seconds_per_round = statistics.median(lengths[-RECENT:])
        if state == "running":
            pace = _pace(ends) or status.seconds_per_round
            status.seconds_left = pace * max(0, status.rounds - status.round)
    status.losses = _loss_curve(losses)
    return status


def _pace(ends: Sequence[str]) -> float | None:
    """Seconds from round to round lately, with the scoring between them."""
    recent = [datetime.datetime.fromisoformat(end) for end in ends[-RECENT - 1 :]]
    if len(recent) < 2:
        return None
    return (recent[-1] - recent[0]).total_seconds() / (len(recent) - 1)


def _loss_curve(losses: Mapping[int, Mapping[SiteName, float]]) -> ScoreCurve:
    """Of every site; of a long run some rounds, and the last."""
    rounds = sorted(losses)
    apart = max(1, -(-len(rounds) // POINTS))
    rounds = [round for i, round in enumerate(rounds) if i % apart == 0 or i + 1 == len(rounds)]
    names = sorted({name for round in rounds for name in losses[round]})
    sites: dict[SiteName, list[float | None]] = {name: [losses[r].get(name) for r in rounds] for name in names}
    means: list[float | None] = [statistics.fmean(losses[round].values()) for round in rounds]
    return ScoreCurve("loss", "", rounds, means, sites)


class _EventLog:
    """Events about missing or rejected sites; what repeats in the next round makes the earlier one longer."""

    def __init__(self) -> None:
        self._events: dict[int, dict[str, Any]] = {}
        self._alike: dict[tuple[str | None, ...], int] = {}

    def add(self, what: str, event: Event, why: str | None) -> None:
        told = {"event": what, **{key: event[key] for key in ("round", "phase", "site", "time") if key in event}}
        told |= {} if why is None else {"why": why}
        alike = (what, event.get("phase"), event.get("site"), why)
        before = self._events.get(self._alike.get(alike, 0), {})
        if "round" in before and told.get("round") == before.get("until", before["round"]) + 1:
            del self._events[self._alike[alike]]
            told |= {"round": before["round"], "until": told["round"]}
        self._alike[alike] = number = next(reversed(self._events), 0) + 1
        self._events[number] = told

    def last(self, many: int) -> list[dict[str, Any]]:
        return list(self._events.values())[-many:]


def _train(status: RunStatus, event: Event, told: _EventLog, aside: bool) -> None:
    verdict = event.get("firewall", {})
    if verdict.get("verdict") == "odd":
        told.add("outlier, merged", event, verdict.get("why", ""))
    site = status.sites.setdefault(event["site"], SiteStatus())
    up, down = event.get("bytes_up") or 0, event.get("bytes_down") or 0
    site.state, site.why = "trained", ""
    if not aside:  # what is made beside the model, such as a calibration, has rounds and losses of its own
        site.round = event["round"]
        site.loss = event["loss"] if event.get("loss") is not None else site.loss
    site.bytes_up, site.bytes_down = site.bytes_up + up, site.bytes_down + down
    site.seconds += event.get("seconds") or 0.0
    status.bytes_up, status.bytes_down = status.bytes_up + up, status.bytes_down + down


def _score(curve: ScoreCurve, sites: Mapping[SiteName, SiteStatus], event: Event) -> None:
    valid = event["valid"]
    if (curve.metric, curve.model) != (event["metric"], event["model"]):  # another model has become the headline
        curve.metric, curve.model = event["metric"], event["model"]
        curve.rounds, curve.site_mean, curve.sites = [], [], {}
    own = valid.get("sites", {})
    for name in own:
        curve.sites.setdefault(name, [None] * len(curve.rounds))
        if name in sites:
            sites[name].score = own[name]
    curve.rounds.append(event["round"])
    curve.site_mean.append(valid.get("site_mean"))
    for name, values in curve.sites.items():
        values.append(own.get(name))


def _missing(status: RunStatus, event: Event, told: _EventLog) -> None:
    what = event["event"]
    told.add(what, event, event.get("why"))
    if what in ("dropped", "rejoined", "undelivered", "unscored") or "site" not in event:
        return
    site = status.sites.setdefault(event["site"], SiteStatus())
    site.state = {"refused": "rejected", "left out": "left out"}.get(what, "away")
    site.why = event.get("why", "")


def metrics_of(status: RunStatus) -> str:
    """The status as Prometheus reads it (text format 0.0.4)."""
    lines: list[str] = []

    def gauge(name: str, about: str, values: Mapping[Labels, float | None]) -> None:
        told = {labels: value for labels, value in values.items() if value is not None}
        if not told:
            return
        lines.append(f"# HELP consilium_{name} {about}")
        lines.append(f"# TYPE consilium_{name} gauge")
        for labels, value in told.items():
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            lines.append(f"consilium_{name}{{{inside}}} {value!r}")

    run: Labels = (("run", status.run),)
    gauge("running", "1 while the run is under way.", {run: float(status.state == "running")})
    gauge("round", "The last round that was merged.", {run: float(status.round)})
    gauge("rounds", "The rounds of the study.", {run: float(status.rounds)})
    gauge("round_seconds", "Median length of the last rounds.", {run: status.seconds_per_round})
    gauge("bytes_up", "Bytes from all sites to the server.", {run: float(status.bytes_up)})
    gauge("bytes_down", "Bytes from the server to all sites.", {run: float(status.bytes_down)})
    sites: dict[Labels, SiteStatus] = {(*run, ("site", name)): site for name, site in sorted(status.sites.items())}
    here = {labels: float(site.state == "trained") for labels, site in sites.items()}
    gauge("site_here", "1 if the site's last update was merged.", here)
    rounds = {labels: float(site.round) for labels, site in sites.items()}
    gauge("site_round", "The last round with an update of the site.", rounds)
    gauge("site_loss", "The site's last training loss.", {labels: site.loss for labels, site in sites.items()})
    scores = {labels: site.score for labels, site in sites.items()}
    gauge("site_validation", "The last score on the site's validation cases.", scores)
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
