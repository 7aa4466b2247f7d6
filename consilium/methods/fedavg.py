"""FedAvg: sites train the shared model, the server averages by numbers of cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from consilium.learning.fit import Job, fit
from consilium.method import GlobalModel
from consilium.methods.shares import WithShares
from consilium.site import Round, Site
from consilium.weights import SiteName


@dataclass(frozen=True)
class FedAvg(WithShares, GlobalModel):
    """One shared model, averaged by numbers of cases: w = Σ (n_k / n) w_k over the sites that answered."""

    paper: ClassVar[str] = "McMahan et al., Communication-efficient learning of deep networks (AISTATS 2017)"
    private: ClassVar[bool] = True

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        fits = fit(site, {"global": Job(got.global_)}, round, memory.states)
        done = fits["global"]
        return self.Uplink(done.weights, done.loss, done.steps), self.Memory(states=fits.states)

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        models = {name: reply.global_ for name, reply in replies.items()}
        return self.Server(self.average(models, server.n, server.global_), server.n)
