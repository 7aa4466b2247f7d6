"""FedSM, FedSM-extra and its ensemble as naive loops: global and personal models, SoftPull, and the selector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from consilium.batch import Batch
from consilium.methods.routers import GLOBAL
from consilium.site import Round
from tests.replay.naive import Descent, Hospital, Play, State, average, combined, leaves, slope
from tests.replay.personal_loops import Models, named

SelectorLoss = Callable[[Hospital, Tensor, Batch], Tensor]  # of its output


def fedsm(play: Play) -> Models:
    """Algorithm 1: a site trains w_g, w_{p,k} and w_s on the same batches; w_g is averaged, w_{p,k} pulled."""
    sites = list(play.sites)
    selector = Selector(play, sites, lambda site, output, batch: own_site(output, sites.index(site.site.card.name)))
    w, personal = play.first(), play.all(play.first())
    for round, here in play.rounds():
        w, personal = models_round(play, round, here, w, personal)
        selector.learn(round, here)
    return {"global": w, "selector": selector.w, **named(personal=personal)}


def own_site(output: Tensor, k: int) -> Tensor:
    """Equation 2: every image of site k has the class k."""
    return cross_entropy(output, torch.full((len(output),), k))


def models_round(
    play: Play, round: Round, here: Mapping[str, Hospital], w: State, personal: dict[str, State]
) -> tuple[State, dict[str, State]]:
    trained = {name: site.trained("global", w, round) for name, site in here.items()}
    own = {name: site.trained("personal", personal[name], round) for name, site in here.items()}
    return average(trained, play.n), {**personal, **soft_pulled(own, play.method.pull)}


def soft_pulled(personal: dict[str, State], pull: float) -> dict[str, State]:
    """Equation 11: w_k ← λ w_k + (1 − λ)/(K − 1) Σ_{j≠k} w_j over the sites that answered."""
    rest = (1 - pull) / (len(personal) - 1)
    return {k: combined(*((pull if j == k else rest, w) for j, w in personal.items())) for k in personal}


def models_alone(play: Play) -> Models:
    """The models of FedSM with a selector in closed form, which the rounds do not train."""
    w, personal = play.first(), play.all(play.first())
    for round, here in play.rounds():
        w, personal = models_round(play, round, here, w, personal)
    return {"global": w, **named(personal=personal)}


def fedsm_extra(play: Play) -> Models:
    """Algorithm 3: the models first; then only w_s, whose class for a case is arg min_k L(h_k, y), k = 0 the global."""
    found = models_alone(play)
    models = list(found.values())

    def loss(site: Hospital, output: Tensor, batch: Batch) -> Tensor:
        with torch.no_grad():
            losses = [[site.loss(h, batch.only(i)) for h in models] for i in range(len(batch.cases))]
        return cross_entropy(output, torch.tensor(losses).argmin(1))

    return {**found, "selector": late_selector(play, loss)}


def fedsm_ensemble(play: Play) -> Models:
    """Section 3.1.1: h = Σ_k ŷ_k h_k of probabilities, w_s trained on L(h, y)."""
    found = models_alone(play)

    def loss(site: Hospital, output: Tensor, batch: Batch) -> Tensor:
        with torch.no_grad():
            h = torch.stack([site.output(model, batch.images).softmax(1) for model in found.values()])
        together = torch.einsum("bk,kb...->b...", output.softmax(1), h)
        return site.site.task.loss(together.log(), batch)  # whose softmax is the mixture

    return {**found, "selector": late_selector(play, loss)}


def late_selector(play: Play, loss: SelectorLoss) -> State:
    selector = Selector(play, [GLOBAL, *play.sites], loss)
    for round, here in play.rounds("selector"):
        selector.learn(round, here)
    return selector.w


class Selector:
    """w_s in the study's way of training: one round is `synchronised`, `moments` or `paper`."""

    def __init__(self, play: Play, classes: Sequence[str], loss: SelectorLoss) -> None:
        self.play, self.loss, self.lr = play, loss, play.method.selector_lr
        self.w = play.first("selector", classes)
        self.module = play.task.network("selector", classes)
        self.adam: Any = (combined((0.0, self.w)), combined((0.0, self.w)), 0)  # m, v, steps

    def learn(self, round: Round, here: Mapping[str, Hospital]) -> None:
        rule = self.play.method.selector_training
        {"synchronised": self.synchronised, "moments": self.moments, "paper": self.paper}[rule](round, here)

    def synchronised(self, round: Round, here: Mapping[str, Hospital]) -> None:
        """The server takes one Adam step on Σ (n_k/n) g_k, g_k the mean gradient over the cases of site k."""
        means = {name: combined((1 / site.n, self.summed(site, round))) for name, site in here.items()}
        self.w, *self.adam = adam(self.w, average(means, self.play.n), *self.adam, self.lr)

    def moments(self, round: Round, here: Mapping[str, Hospital]) -> None:
        """Each site takes one Adam step on its summed gradient, from common moments; all three are averaged."""
        found = {k: adam(self.w, self.summed(site, round), *self.adam, self.lr) for k, site in here.items()}
        self.w, m, v = (average({k: each[i] for k, each in found.items()}, self.play.n) for i in range(3))
        self.adam = (m, v, self.adam[2] + 1)

    def paper(self, round: Round, here: Mapping[str, Hospital]) -> None:
        """Algorithm 1 as printed: a step on every batch at the site, weights averaged by n_k/n."""
        trained = {}
        for name, site in here.items():
            model = Descent(self.w, site.site.local.optimizer, self.lr, site.site.local.momentum)
            for batch in site.batches(round):
                model.step(self.gradient(site, model.now, batch))
            trained[name] = model.now
        self.w = average(trained, self.play.n)

    def gradient(self, site: Hospital, at: State, batch: Batch) -> State:
        here = leaves(at)
        return slope(self.loss(site, site.output(here, batch.images, self.module), batch), here)

    def summed(self, site: Hospital, round: Round) -> State:
        return combined(*((len(b.cases), self.gradient(site, self.w, b)) for b in site.batches(round)))


def adam(w: State, g: State, m: State, v: State, steps: int, lr: float) -> tuple[State, State, State, int]:
    """One step as Kingma & Ba print it, with their β_1, β_2 and ε."""
    m = combined((0.9, m), (0.1, g))
    v = combined((0.999, v), (0.001, {key: part**2 for key, part in g.items()}))
    first, second = 1 - 0.9 ** (steps + 1), 1 - 0.999 ** (steps + 1)
    new = {key: w[key] - lr * (m[key] / first) / ((v[key] / second).sqrt() + 1e-8) for key in w}
    return new, m, v, steps + 1
