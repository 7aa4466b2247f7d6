"""Sites that crash, hang or are slow: the run goes on, nobody waits for them twice, and the bits can be repeated."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from consilium import engine, simulation
from consilium.errors import RunError, StudyError
from consilium.federation.admin import for_federation
from consilium.federation.hospital_site import ClosedSite
from consilium.federation.site_job import open_hospital
from consilium.hospital import Hospital
from consilium.messages import REASONS, Envelope, Request
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.tree import Packet
from consilium.wires.flare import Body, FlareAnswer, FlareWire, RestartJob
from consilium.wires.site_wire import Returned
from tests.federation.test_service_and_wire import Direct, deploy, events, index_of
from tests.toy import SIZES, toy_study


@pytest.fixture
def hospitals(federation: Path, tmp_path: Path) -> dict[str, Hospital]:
    return {
        name: Hospital(name, str(federation / name), str(tmp_path / "hospitals" / name), ("blob",), "cpu")
        for name in SIZES
    }


def run(study: Study, folder: RunFolder, line: Direct) -> None:
    wire = Telling if isinstance(line, Hanging) else FlareWire
    engine.run(study, wire(study, folder, line), folder)


def begun(study: Study, to: Path) -> tuple[Study, RunFolder]:
    travelling = for_federation(study, tuple(SIZES))
    return travelling, RunFolder.create(travelling, to)


def same_bits(study: Study, folder: RunFolder, to: Path) -> bool:
    again = simulation.run(simulation.with_attendance(study, folder.path), to, workers=0).folder
    return (folder.path / "last.safetensors").read_bytes() == (again / "last.safetensors").read_bytes()


# ------------------------------------------------------------------------------------ a site that comes and goes


def test_a_site_that_crashes_again_and_again_does_not_stop_the_others(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """bea starts again before every order: every job still makes a round, and jobs do not become one per round."""
    study = toy_study(federation, "scaffold", study__rounds=8, study__score_every=8)
    travelling, folder = begun(study, tmp_path / "server")
    jobs = 0
    while not folder.finished:
        line = Direct(travelling, hospitals)
        line.returned = {"bea"} if jobs else set()

        def crashes(site: str, request: Request, answer: FlareAnswer, line: Direct = line) -> FlareAnswer:
            if request.do == "train":
                line.returned = {"bea"}
                return FlareAnswer.of("gone") if site == "bea" else answer
            return answer

        line.change = crashes
        jobs += 1
        before = len(events(folder, "round"))
        try:
            run(travelling, folder, line)
        except RestartJob as back:
            folder.note("going on", sites=back.sites)
        folder = RunFolder.open(folder.path)
        assert len(events(folder, "round")) > before
    assert jobs == 2  # back once after the first round; then it has to wait
    assert not [event for event in events(folder, "train") if event["site"] == "bea"]
    assert same_bits(study, folder, tmp_path / "again")


def test_a_job_that_can_make_no_round_without_a_returned_site_goes_on_at_once(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """bea registered again just after the job began: with min_sites = 3 there is no round to make first."""
    study = toy_study(federation, study__min_sites=3)
    travelling, folder = interrupted(study, hospitals, tmp_path / "server")
    line = Direct(travelling, hospitals)
    line.returned = {"bea"}
    with pytest.raises(RestartJob, match="bea"):
        run(travelling, folder, line)
    assert len(events(folder, "round")) == 2
    run(travelling, RunFolder.open(folder.path), Direct(travelling, hospitals))
    assert not events(folder, "lost")


# ------------------------------------------------------------------------------------ a site that hangs


class Hanging(Direct):
    """Sites that take orders and never answer, cid at first; `speaks` is who says that it is back."""

    def __init__(self, study: Study, hospitals: Mapping[str, Hospital]) -> None:
        super().__init__(study, hospitals)
        self.asked: Counter[str] = Counter()
        self.hangs = {"cid"}
        self.speaks: set[str] = set()
        self.asked_again = threading.Event()  # cid, after it hung
        self.now = 0.0  # seconds, for a server that reads this clock
        self.round = -1  # the index of the round that the server is in
        self.open: set[str] = set()  # whose answers to its orders the server has not taken
        self.hung: dict[str, int] = {}  # a hanging site's last order, by the index of its round
        self.closed = dict.fromkeys(hospitals, -1)  # a site's last order that nobody waits for any more, likewise
        self.changed = threading.Condition()

    def ask(self, site: str, request: Request, body: Body, seconds: float, room: int) -> FlareAnswer:
        if request.do != "train":
            return super().ask(site, request, body, seconds, room)
        hangs = site in self.hangs  # before it counts: a test may change who hangs by who was asked
        self.asked[site] += 1
        if hangs:
            with self.changed:
                self.hung[site] = index_of(request)
                self.changed.wait_for(lambda: self.closed[site] >= index_of(request), 300)
            return FlareAnswer.of("late")
        if site == "cid":
            self.asked_again.set()
        return super().ask(site, request, body, seconds, room)

    def stopped(self) -> bool:
        """Asked at every look of the server: a deadline passes when only hanging sites are left to wait for."""
        if self.open and self.open == {site for site in self.hangs if self.hung.get(site) == self.round}:
            self.now += 10.0
        return False

    def give_up(self, site: str) -> None:
        with self.changed:
            self.closed[site] = self.round
            self.changed.notify_all()

    def heard(self) -> set[str]:
        found, self.speaks = self.speaks, set()
        return found


class Telling(FlareWire):
    """A server that tells such a line which answers it has taken."""

    line: Hanging

    def exchange(self, do: str, packets: Mapping[str, Packet], head: Envelope) -> Iterator[tuple[str, Returned]]:
        if do == "train":
            self.line.round, self.line.open = head.round.index, set(packets)
        return super().exchange(do, packets, head)

    def _returned(self, do: str, name: str, answer: FlareAnswer, room: int) -> Returned:
        self.line.open.discard(name)
        return super()._returned(do, name, answer, room)


@pytest.mark.federation
def test_a_site_that_missed_two_rounds_is_asked_again_when_it_says_it_is_back(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = toy_study(federation, "scaffold", study__rounds=6, study__score_every=6, study__deadline=6.0)
    travelling, folder = begun(study, tmp_path / "server")
    line = Hanging(travelling, hospitals)
    monkeypatch.setattr("consilium.wires.flare.time", SimpleNamespace(monotonic=lambda: line.now))

    def wakes(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if request.do == "train" and index_of(request) == 4:
            if line.hangs:
                line.hangs, line.speaks = set(), {"cid"}
            else:
                assert line.asked_again.wait(150)  # the round is still open
        return answer

    line.change = wakes
    run(travelling, folder, line)
    lost = {event["round"]: event["why"] for event in events(folder, "lost")}
    assert lost == {1: REASONS["late"], 2: REASONS["late"], 3: REASONS["resting"], 4: REASONS["resting"]}
    assert line.asked["cid"] == 4  # rounds 1, 2, 5, 6
    assert line.now == 20.0  # two deadlines, in rounds 1 and 2: nobody waited in rounds 3 and 4
    assert same_bits(study, folder, tmp_path / "again")


# ------------------------------------------------------------------------------------ a quorum


@pytest.mark.parametrize(
    ("quorum", "asked", "closes"), [(0.5, 3, 2), (0.5, 4, 2), (0.9, 3, 3), (2, 3, 2), (5, 3, 3), (1, 3, 1)]
)
def test_a_quorum_is_a_share_or_a_number(federation: Path, quorum: float, asked: int, closes: int) -> None:
    plan = toy_study(federation, study__wait="quorum", study__quorum=quorum).plan
    assert plan.quorum_of(asked) == closes
    assert toy_study(federation, study__quorum=quorum).plan.quorum_of(asked) == asked  # wait = "all"
    needy = toy_study(federation, study__wait="quorum", study__quorum=quorum, study__min_sites=3).plan
    assert needy.quorum_of(3) == 3


@pytest.mark.parametrize(("key", "value"), [("wait", "some"), ("quorum", 0.0), ("quorum", 2.5), ("silence", 0.0)])
def test_a_wrong_way_to_wait_is_refused(federation: Path, key: str, value: object) -> None:
    with pytest.raises(StudyError, match=rf"\[study\] {key}"):
        toy_study(federation, **{f"study__{key}": value})


def test_a_quorum_closes_a_round_and_a_simulation_repeats_it_bit_for_bit(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """cid does not answer in the first two rounds: nobody waits for it, though the deadline is an hour."""
    study = toy_study(
        federation, "apfl", study__rounds=4, study__score_every=4, study__wait="quorum", study__quorum=2,
        study__deadline=3600.0,
    )  # fmt: skip
    travelling, folder = begun(study, tmp_path / "server")
    line = Hanging(travelling, hospitals)

    def wakes(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if request.do == "train" and index_of(request) == 1:
            line.hangs = set()
        return answer

    line.change = wakes
    run(travelling, folder, line)
    lost = [event for event in events(folder, "lost") if event["round"] == 1]
    assert [(event["site"], event["why"]) for event in lost] == [
        ("cid", "the round closed with 2 of 3 sites, a quorum")
    ]
    assert {
        e["round"]: sum(t["round"] == e["round"] for t in events(folder, "train")) for e in events(folder, "round")
    }[1] == 2
    assert same_bits(study, folder, tmp_path / "again")


def test_a_resting_site_is_asked_as_soon_as_it_speaks(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """Two rounds closed without cid, which was hardly slower; then bea hangs, and cid completes the quorum."""
    study = toy_study(
        federation, "scaffold", study__rounds=4, study__score_every=4, study__wait="quorum", study__quorum=2,
        study__deadline=3600.0,
    )  # fmt: skip
    travelling, folder = begun(study, tmp_path / "server")
    line = Hanging(travelling, hospitals)

    def changes(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if request.do == "train" and index_of(request) == 1 and line.asked["ada"] == line.asked["bea"] == 2:
            line.hangs = {"bea"}  # from its next order on
        if request.do == "train" and (site, index_of(request)) == ("ada", 2):
            line.speaks = {"cid"}
        return answer

    line.change = changes
    run(travelling, folder, line)
    assert REASONS["late"] not in {event["why"] for event in events(folder, "lost")}  # nobody waited for the deadline
    trained = [event for event in events(folder, "train") if event["round"] == 3]
    assert {event["site"] for event in trained} == {"ada", "cid"}
    assert same_bits(study, folder, tmp_path / "again")


def test_a_site_that_a_quorum_did_not_wait_for_is_scored_at_the_end(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """The last two rounds closed without cid, which was only slow: the run does not end without its scores."""
    study = toy_study(
        federation, study__rounds=2, study__score_every=2, study__wait="quorum", study__quorum=2, study__deadline=3600.0
    )
    travelling, folder = begun(study, tmp_path / "server")
    run(travelling, folder, Hanging(travelling, hospitals))
    assert [event["site"] for event in events(folder, "lost")] == ["cid", "cid"]
    assert "unscored" not in folder.summary()
    assert sorted(folder.summary()["headline"]["sites"]) == ["ada", "bea", "cid"]


def test_a_simulation_waits_for_all_whatever_the_quorum(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, study__wait="quorum", study__quorum=1, study__rounds=1)
    folder = RunFolder.open(simulation.run(study, tmp_path, workers=0).folder)
    assert {event["site"] for event in events(folder, "train")} == set(SIZES)


# ------------------------------------------------------------------------------------ a lost key, a lost memory


def interrupted(study: Study, hospitals: Mapping[str, Hospital], to: Path) -> tuple[Study, RunFolder]:
    """A run that stopped before its third round."""
    travelling, folder = begun(study, to)
    line = Direct(travelling, hospitals)

    def leaves(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if request.do == "train" and index_of(request) == 1:
            line.returned = {"ada"}
        return answer

    line.change = leaves
    with pytest.raises(RestartJob):
        run(travelling, folder, line)
    return travelling, RunFolder.open(folder.path)


@pytest.mark.federation
@pytest.mark.parametrize("rejoin", [False, True])
def test_a_lost_key_is_that_sites_problem_and_the_cause_is_named(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, rejoin: bool
) -> None:
    study = toy_study(federation, "scaffold", study__rounds=4, study__score_every=4, study__rejoin=rejoin)
    travelling, folder = interrupted(study, hospitals, tmp_path / "server")
    (Path(hospitals["bea"].memory) / "key").unlink()
    run(travelling, folder, Direct(travelling, hospitals))
    said = [event["why"] for event in events(folder, "rejoined" if rejoin else "left out")]
    assert said[0].startswith("it has another key than when the run began: its memory folder was lost or replaced")
    own = [event["round"] for event in events(folder, "train") if event["site"] == "bea"]
    assert (max(own) == 4) is rejoin
    assert folder.finished
    if rejoin:
        with pytest.raises(RunError, match="'bea' lost its memory"):
            simulation.with_attendance(study, folder.path)


@pytest.mark.parametrize("rejoin", [False, True])
def test_a_lost_memory_is_that_sites_problem(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, rejoin: bool
) -> None:
    study = toy_study(federation, "scaffold", study__rounds=5, study__score_every=5, study__rejoin=rejoin)
    travelling, folder = interrupted(study, hospitals, tmp_path / "server")
    for path in (Path(hospitals["bea"].memory) / folder.path.name / "memory").glob("*.json"):
        path.unlink()
    run(travelling, folder, Direct(travelling, hospitals))
    lost = {event["round"]: event["why"] for event in events(folder, "lost") if event["site"] == "bea"}
    assert lost[3] == REASONS["memory"]
    own = [event["round"] for event in events(folder, "train") if event["site"] == "bea"]
    assert [round for round in own if round > 2] == ([4, 5] if rejoin else [])
    assert folder.finished


def test_a_site_that_cannot_be_opened_says_so(hospitals: dict[str, Hospital], tmp_path: Path) -> None:
    """Half a key, or no settings: told as such, not as a site that does not answer."""
    place = Path(hospitals["ada"].memory)
    place.mkdir(parents=True)
    (place / "key").write_text("12")
    settings = tmp_path / "hospital.toml"
    settings.write_text(f'site = "ada"\ndata = "{hospitals["ada"].data}"\nmemory = "{place}"\nlabels = ["blob"]\n')
    (tmp_path / "study.toml").write_text("")
    assert open_hospital(settings, tmp_path, "ada", tmp_path / "study.toml") == ClosedSite(place)
    assert "is not a whole key" in (place / "errors.log").read_text()
    closed = open_hospital(tmp_path / "nowhere.toml", tmp_path, "ada", tmp_path / "study.toml")
    assert closed == ClosedSite(None)
    assert closed.turn_away("damaged").head.error == "opening"


def test_why_a_site_cannot_be_opened_reaches_the_admin(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    def closed(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        return FlareAnswer.of("opening") if site == "bea" else answer

    folder = deploy(toy_study(federation, study__rounds=1), hospitals, tmp_path / "server", closed)
    (said,) = events(folder, "left out")
    assert said["site"] == "bea"
    assert said["why"].startswith("its settings or its key cannot be used")
