"""What a study may take at a hospital: found before anything of it is allocated, and said with the cap's name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from consilium import caps
from consilium.caps import needs_of, too_large
from consilium.errors import StudyError
from consilium.hospital import Limits, read_hospital
from consilium.hospital_policy import HospitalPolicy
from consilium.messages import POLICY, REASONS
from consilium.methods import METHODS
from consilium.policy import Refused
from consilium.stopwatch import OverTime, Stopwatch
from consilium.study import Study
from consilium.timeline import first_rounds, timeline
from consilium.validation import check_size
from tests.core.test_rehearsal import events, hospital, rehearse
from tests.toy import toy_study

GIANT = {"task__widths": [400_000, 400_000]}


def words(limits: Limits, study: Study, cases: int = 0) -> list[str]:
    return [word for word, _ in too_large(limits, study, cases)]


def test_the_numbers_of_a_network_by_hand(federation: Path) -> None:
    """Counted on the meta device, they are those of the network itself."""
    study = toy_study(federation)
    network = study.task.network()
    size = needs_of(study).network
    assert size.parameters == sum(p.numel() for p in network.parameters())
    assert size.bytes == 4 * size.parameters
    assert size.layers == sum(any(True for _ in m.parameters(recurse=False)) for m in network.modules())


def test_a_giant_network_passes_no_roll_call_and_is_never_allocated(federation: Path, tmp_path: Path) -> None:
    """Limits that nobody wrote hold too: hospital.toml of an earlier version knows nothing of them."""
    study = toy_study(federation, **GIANT)
    policy = HospitalPolicy(read_hospital(hospital(tmp_path)).limits, ("blob",), b"k", tmp_path)
    with pytest.raises(Refused, match=r"\[limits\] model_parameters = 1000000000, and the study's network has") as no:
        policy.check(study, 14)
    assert no.value.word in POLICY
    assert "[limits] model_parameters" in REASONS[no.value.word]
    with pytest.raises(StudyError, match=r"the study's network takes .* GB, and this machine has"):
        check_size(study)


def test_building_stops_at_the_cap(federation: Path) -> None:
    """A study of a million layers costs no more than the layers that are allowed."""
    built = 0

    class Endless(nn.Module):
        def __init__(self) -> None:
            nonlocal built
            super().__init__()
            for number in range(100_000):
                built = number
                setattr(self, f"l{number}", nn.Linear(1, 1))

    class EndlessTask:
        def network(self) -> nn.Module:
            return Endless()

    study = toy_study(federation)
    vars(study)["task"] = EndlessTask()
    assert words(Limits(layers=20), study) == ["layers"]
    assert built == 20


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        ({"model_parameters": 100}, "parameters"),
        ({"model_bytes": 400}, "weights"),
        ({"layers": 2}, "layers"),
        ({"memory_bytes": 1000}, "ram"),
        ({"cache_bytes": 1000}, "cache"),
        ({"disk_bytes": 100}, "storage"),
        ({"message_bytes": 100}, "bytes"),
        ({"memory_bytes": 10**9, "cache_bytes": 10**9, "disk_bytes": 10**9, "layers": 0}, None),
    ],
)
def test_every_cap_is_met_before_training(limits: dict[str, int], word: str | None, federation: Path) -> None:
    found = words(Limits(**limits), toy_study(federation, preprocess__size=[16, 16]), cases=14)
    assert found == ([word] if word else [])
    assert word is None or any(key in REASONS[word] or word == "bytes" for key in limits)


def test_what_a_batch_keeps_for_the_backward_pass_counts(federation: Path) -> None:
    """The inputs of all layers, so a batch twice as large takes twice as much of it."""
    one, two = (toy_study(federation, preprocess__size=[16, 16], local__batch_size=n) for n in (8, 16))
    weights = needs_of(one).network.bytes * 4  # Adam: weights, gradients and two moments
    kept = needs_of(one).memory - weights
    assert kept >= 8 * 16 * 16 * 4  # at the least the images
    assert needs_of(two).memory - weights == 2 * kept


def test_a_cache_is_as_large_as_its_images(federation: Path) -> None:
    study = toy_study(federation, preprocess__size=[16, 16])
    assert needs_of(study, 14).cache == 14 * 16 * 16 * (4 + 1)  # floats, and a mask of bytes


def test_a_study_that_images_of_unknown_size_is_measured_when_they_are_there(federation: Path, tmp_path: Path) -> None:
    folder = rehearse(toy_study(federation), hospital(tmp_path, limits="cache_bytes = 99"), tmp_path / "runs")
    (said,) = events(folder, "left out")
    assert "[limits] cache_bytes" in said["why"]


def test_a_round_that_takes_too_long_is_stopped(federation: Path, tmp_path: Path) -> None:
    folder = rehearse(toy_study(federation), hospital(tmp_path, limits="round_seconds = 1e-9"), tmp_path / "runs")
    lost = events(folder, "lost")
    assert [(event["site"], event["round"]) for event in lost] == [("bea", number) for number in (1, 2, 3)]
    assert all("round_seconds" in event["why"] for event in lost)


def test_a_stopwatch_looks_at_one_piece_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watch = Stopwatch(10.0)
    now = 11.0
    with pytest.raises(OverTime):
        watch.look()
    watch.start()
    watch.look()
    Stopwatch().look()


@pytest.mark.parametrize(
    ("limits", "word"),
    [({"study_seconds": 2.5}, "time"), ({"memory_bytes": 1}, "ram"), ({"disk_bytes": 10}, "storage"), ({}, "")],
)
def test_what_is_used_up_is_refused_before_the_next_round(limits: dict[str, Any], word: str, tmp_path: Path) -> None:
    policy = HospitalPolicy(Limits(**limits), ("blob",), b"k", tmp_path)
    (tmp_path / "file").write_bytes(b"x" * 11)
    here = [{"facts": {"seconds": 1.5}}, {"facts": {"seconds": 1.5}}, {}]
    assert [found for found, _ in policy._used_up(here)] == ([word] if word else [])


def test_the_memory_of_this_machine_is_the_cap_where_none_is_set(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = replace(toy_study(federation), local=replace(toy_study(federation).local, device="cpu"))
    assert words(Limits(), study) == []
    monkeypatch.setattr(caps, "machine_memory", lambda: 1000)
    ((word, why),) = too_large(Limits(), study)
    assert word == "ram"
    assert why.startswith("this machine has 1000 bytes of memory")


@pytest.mark.parametrize("name", METHODS)
def test_the_first_round_of_every_phase_is_that_of_the_whole_line(name: str) -> None:
    method = METHODS[name]()
    firsts = {phase.name: round for phase, round in reversed(timeline(method, 12))}
    assert first_rounds(method, 12) == list(reversed(firsts.values()))


def test_a_study_cannot_make_a_site_list_more_rounds_than_it_can_hold(federation: Path) -> None:
    with pytest.raises(StudyError, match="rounds = 1000000000000: it must be at most 1000000"):
        toy_study(federation, study__rounds=10**12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "[hospital.toml] site, data, memory, labels are required."),
        ('site = "ada"\nmemory = "m"\n[limits]\nrounds = 3', "[hospital.toml] data, labels are required."),
        ('site = "ada"\nmemory = "m"\ndata = "d"', "[hospital.toml] labels is required."),
    ],
)
def test_all_missing_keys_are_named_at_once(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "hospital.toml").write_text(text)
    with pytest.raises(StudyError, match=re.escape(said)):
        read_hospital(tmp_path / "hospital.toml")


def test_limits_must_be_numbers_from_zero(tmp_path: Path) -> None:
    for text in ("round_seconds = -1.0", "layers = -2", "memory_bytes = -1"):
        with pytest.raises(StudyError, match="it must be 0, for no limit, or more"):
            read_hospital(hospital(tmp_path, limits=text))
