"""A site with its data, memory and rules, ready to work for a run."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import torch

from consilium import __version__
from consilium.data.cache import open_site, table_hash
from consilium.data.cache_pieces import Progress
from consilium.data.cases import Cases
from consilium.data.preprocess import fingerprint
from consilium.data.site_arrays import SiteArrays
from consilium.data.site_folder import Federation
from consilium.local_norm import LocalNorm
from consilium.machine import check_compiler, pick_device
from consilium.messages import SCORED, SiteFacts
from consilium.policy import Permissive, Policy, simulated_secret
from consilium.site import POOLED, PatientPrivacy, Roster, Site, SiteCard
from consilium.store import MemoryStore
from consilium.study import Study
from consilium.validation import annotated_at, members_of
from consilium.weights import SiteName
from consilium.worker import Worker


def open_arrays(
    study: Study, federation: Federation, site: SiteName, workers: int = 1, progress: Progress | None = None
) -> SiteArrays:
    return open_site(
        federation,
        federation.sites[site],
        study.preprocess,
        annotated=annotated_at(study, federation, site),
        complete_tests=study.data.test_masks == "complete",
        workers=workers,
        progress=progress,
    )


def place_in(run: Path, site: SiteName) -> Path:
    """The folder of a site in a simulated run, where nobody else writes."""
    return run / "sites" / site


def open_worker(study: Study, federation: Federation, site: SiteName, roster: Roster, place: Path) -> Worker:
    """A site of a simulation: it has no rules of its own and no secrets."""
    return open_at(study, federation, site, roster, place, Permissive(simulated_secret(study, site), place))


def open_at(
    study: Study,
    federation: Federation,
    site: SiteName,
    roster: Roster,
    place: Path,
    policy: Policy,
    hospital: bool = False,
) -> Worker:
    """A site with its data and `place`, its own folder for this run; of the federation it need know only itself.

    At a `hospital` what it keeps is on the disk before it answers, and closed to other users.
    """
    sources = members_of(study, federation) if is_pooled(site, study, federation) else [site]
    arrays = tuple(open_arrays(study, federation, name) for name in sources)
    member = site in roster
    card = roster.get(site) or SiteCard(site, -1, 0, federation.labels)
    device = pick_device(study.local.device, card.index)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # of pinned memory too: else every process would also hold some on the first GPU
    if study.local.compile:
        check_compiler(device)
    task = study.task.on(device) if device != "cpu" else study.task
    fields, slices = study.task_fields, bool(study.preprocess.slices)
    stopwatch = policy.stopwatch
    around = fields.patch_around
    data = Cases(arrays, fields.augment, fields.patch, slices, patch_around=around, stopwatch=stopwatch)
    private = patient_privacy(study, len(data), policy) if member and len(data) else None
    return Worker(
        study,
        Site(card, roster, task, data, study.local, device, study.plan.seed, private),
        MemoryStore(place / "memory", site, durable=hospital, private=hospital),
        LocalNorm.of(task, study.local.batchnorm, site),
        member,
        place,
        policy,
        stopwatch,
    )


def patient_privacy(study: Study, cases: int, policy: Policy) -> PatientPrivacy | None:
    """How a site with so many training cases protects its patients, if the study trains by DP-SGD."""
    privacy, method = study.privacy, study.method
    if not privacy.by_patient:
        return None
    passes, statistics = method.passes(study.plan.rounds, study.local.epochs), method.noised_statistics()
    noise = privacy.noise_at(cases, study.local, passes, statistics)
    key = hmac.new(policy.secret, f"patients {study.hash}".encode(), hashlib.sha256).digest()
    return PatientPrivacy(privacy.clip, noise, privacy.statistics, privacy.feature_clip, key)


def is_pooled(site: SiteName, study: Study, federation: Federation) -> bool:
    """Whether this is the virtual site that holds all cases; runs of version 0.1 called it "pooled"."""
    return site == POOLED or (study.pooled and site == POOLED.strip("()") and site not in federation.sites)


def site_facts(study: Study, federation: Federation, site: SiteName) -> tuple[SiteFacts, int]:
    """What a site says at roll call, its own names and hashes included: they are hidden when it leaves.

    The number is the bytes of its preprocessed images, which it does not say.
    """
    arrays = open_arrays(study, federation, site)
    cases = Cases((arrays,), slices=bool(study.preprocess.slices))
    n, more = len(cases), len(cases.with_unlabelled()) - len(cases)
    profile = None if study.privacy.on else arrays.profile("train")  # noise does not cover it, so it stays
    facts = SiteFacts(
        n=n,
        unlabelled=more,
        labels=annotated_at(study, federation, site),
        cases=len(arrays.cases),
        scored={split: len(arrays.indices(split)) for split in SCORED},
        table=table_hash(arrays.cases),
        arrays=arrays.folder.name,  # content and preprocessing, by hash
        version=__version__,
        study=study.hash,
        preprocessing=fingerprint(study.preprocess),
        profile=profile,
    )
    return facts, sum(path.stat().st_size for path in arrays.folder.glob("*") if path.is_file())
