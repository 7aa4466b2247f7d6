"""The simulated sites of this process: data stay mapped and networks stay built from round to round."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from consilium import packet_files
from consilium.hospital import RULES, read_hospital
from consilium.hospital_policy import HospitalPolicy
from consilium.learning.training_networks import training_network
from consilium.left_lines import log_failure
from consilium.messages import AnswerHead, Request
from consilium.policy import Permissive, Policy, simulated_secret
from consilium.ranges import Range, Text
from consilium.site_opening import place_in
from consilium.site_service import OpenedStudy, SiteAnswer, SiteService
from consilium.study import Study
from consilium.study_reading import load_study
from consilium.tasks.inference import inference_network
from consilium.tree import Packet, message
from consilium.weights import SiteName

PathText = Annotated[str, Text(1 << 12)]
Bytes = Annotated[int, Range(0, 1 << 50)]


@message
class LocalRequest:
    """A request to a site of this machine; tensors are in files. Without a request, it closes the run."""

    folder: PathText  # of the run
    site: PathText
    request: Request | None
    order: PathText
    replies: PathText  # the beginning of the name of the file for replies of this exchange


@message
class LocalAnswer:
    """An answer on one machine: it may say what failed, and where the traceback is."""

    head: AnswerHead
    why: str = ""
    mistake: bool = False
    full: bool = False
    log: str = ""
    died: bool = False  # the process died before it answered
    reply: PathText = ""  # the file with the reply, and where it is in it
    start: Bytes = 0
    size: Bytes = 0


class LocalSites:
    """Site services by run and site."""

    def __init__(self) -> None:
        self._services: dict[tuple[str, SiteName], SiteService] = {}
        self._runs: dict[str, OpenedStudy] = {}  # the study is read once for all its sites
        self._last: tuple[Path, Packet] | None = None  # the last order read, and its file
        self._rosters: dict[str, str] = {}  # by run, as it was told last; a request without one means this

    def answer(self, asked: LocalRequest) -> LocalAnswer:
        if asked.request is None:
            self._close(asked.folder)
            return LocalAnswer(AnswerHead())
        service = self._service(asked.folder, asked.site)
        roster = asked.request.roster or self._rosters.get(asked.folder, "")
        self._rosters[asked.folder] = roster
        request = replace(asked.request, roster=roster)
        found: SiteAnswer = service.answer(request, lambda: self._order(Path(asked.order)))
        reply, place = "", packet_files.WHOLE
        if found.packet is not None:
            try:
                reply = f"{asked.replies}.{os.getpid()}"  # one for all sites of this process: to make a file takes long
                place = packet_files.append(found.packet, Path(reply))
            except OSError as error:
                found, reply = service.failed(error, asked.request), ""
        said = LocalAnswer(found.head, found.why, found.mistake, found.full, found.log)
        return replace(said, reply=reply, start=place.start, size=place.size)

    def _order(self, path: Path) -> Packet:
        """Read an order. An order for all sites is one file, whose table is read once; file names are never reused."""
        if self._last is not None and self._last[0] == path:
            return packet_files.read_again(self._last[1], path)  # a site may write to what it was sent
        self._last = path, packet_files.read(path)
        return self._last[1]

    def _service(self, folder: str, site: SiteName) -> SiteService:
        key = folder, site
        if key not in self._services:
            place = place_in(Path(folder), site)
            self._services[key] = SiteService(
                site,
                open=lambda: self._open(folder, place),
                place=lambda run: place,
                policy=lambda study: policy_in(place, study, site),
                errors=lambda: place / "errors.log",
                log_failure=partial(log_failure, place) if (place / RULES).exists() else lambda request, head: head,
            )
        return self._services[key]

    def _open(self, folder: str, place: Path) -> OpenedStudy:
        if (place / RULES).exists():  # before code of other packages is imported
            read_hospital(place / RULES).study((Path(folder) / "study.toml").read_text(encoding="utf-8"))
        if folder not in self._runs:
            study = load_study(Path(folder) / "study.toml")
            self._runs[folder] = OpenedStudy(study, study.federation(), study.hash)
        return self._runs[folder]

    def _close(self, folder: str) -> None:
        """Drop a run's sites and cached networks, so that the memory of a pool does not grow from run to run."""
        self._services = {key: service for key, service in self._services.items() if key[0] != folder}
        self._runs.pop(folder, None)
        self._rosters.pop(folder, None)
        self._last = None
        training_network.cache_clear()
        inference_network.cache_clear()


def policy_in(place: Path, study: Study, site: SiteName) -> Policy:
    """The rules of a simulated site: none, or those of the hospital.toml in its folder.

    A rehearsal keeps its counts in the site's own folder, so that it does not use the hospital's real budget. Its key
    is not secret, so that it can be repeated.
    """
    secret = simulated_secret(study, site)
    rules = place / RULES
    if not rules.exists():
        return Permissive(secret, place)
    hospital = read_hospital(rules)
    return HospitalPolicy(hospital.limits, hospital.labels, secret, place)
