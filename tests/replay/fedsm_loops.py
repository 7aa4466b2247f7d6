"""FedSM, FedSM-extra and its ensemble as naive loops: global and personal models, SoftPull, and the selector."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from consilium.batch import Batch
from consilium.learning.discriminant import SHRINKAGES, TEMPERATURES
from consilium.methods.routers import GLOBAL
from consilium.methods.routing import GRID
from consilium.networks.parts import encoder_convolutions
from consilium.site import Round
from tests.replay.naive import Descent, Hospital, Play, State, average, combined, leaves, slope
from tests.replay.personal_loops import Models, fedavg, named

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


def other_personal(play: Play, loop: Callable[[Play], Models]) -> Models:
    """Table 6: personal models by another method, which has a common model of its own where it needs one."""
    partner = Play(play.study)
    partner.method = play.method.personaliser.how
    theirs = loop(partner)
    if play.method.personal in ("finetune", "apfl"):  # theirs is the global model
        return theirs
    return {**theirs, "shared": theirs["global"], **fedavg(play)}


# ------------------------------------------------------------------------------------------------ in closed form


@dataclass
class ClosedForm:
    """A linear discriminant, by explicit inverses, and γ by trying every one of the grid."""

    means: dict[str, Tensor]
    within: Tensor  # the covariance that all sites share
    shrinkage: float = 0.0
    temperature: float = 1.0
    limits: dict[str, float] = field(default_factory=dict)
    gamma: float = 1.0

    def distances(self, x: Tensor, shrinkage: float) -> Tensor:
        """Squared Mahalanobis distances (cases, sites); the covariance is shrunk towards its diagonal."""
        between = torch.stack([*self.means.values()]).var(0, unbiased=False)
        spread = torch.diag(self.within.diagonal() + 1e-6 * between + 1e-12)
        inverse = torch.linalg.inv((1 - shrinkage) * self.within + shrinkage * spread)
        gaps = [x - mean for mean in self.means.values()]
        return torch.stack([torch.einsum("ni,ij,nj->n", gap, inverse, gap) for gap in gaps], 1)

    def chances(self, x: Tensor, shrinkage: float, temperature: float) -> Tensor:
        return (-self.distances(x, shrinkage) / (2 * temperature)).softmax(1)


def closed_form(play: Play, models: Models) -> ClosedForm:
    """From the features of the last global model: classes from training cases, all else from validation cases."""
    w, names = models["global"], list(play.sites)
    train = {k: features(site, w, "train") for k, site in play.sites.items()}
    valid = {k: features(site, w, "valid") for k, site in play.sites.items()}
    centred = torch.cat([x - x.mean(0) for x in train.values()])
    found = ClosedForm({k: x.mean(0) for k, x in train.items()}, centred.T @ centred / (len(centred) - len(names)))

    def surprise(shrinkage: float, temperature: float) -> float:  # the mean over sites of their cases' log loss
        chances = [found.chances(x, shrinkage, temperature)[:, i] for i, x in enumerate(valid.values())]
        return float(torch.stack([-(0.999 * own + 0.001 / len(names)).log().mean() for own in chances]).mean())

    tried = {pair: surprise(*pair) for pair in product(SHRINKAGES, TEMPERATURES)}
    equal = [pair for pair, loss in tried.items() if loss <= min(tried.values()) + 1e-3]
    first = oas(found.within, len(centred) - len(names))
    found.shrinkage, found.temperature = min(equal, key=lambda pair: (abs(pair[0] - first), abs(math.log(pair[1]))))

    logs = [found.distances(x, found.shrinkage)[:, i].log() / 2 for i, x in enumerate(valid.values())]
    free = sum(map(len, logs)) - len(logs)
    spread = math.sqrt(sum(float((log - log.mean()).square().sum()) for log in logs) / free)
    reach = NormalDist().inv_cdf(play.method.outlier_quantile) * spread
    found.limits = {k: math.exp(float(log.mean()) + reach) for k, log in zip(names, logs)}
    found.gamma = best_gamma(play, models, found)
    return found


def features(site: Hospital, w: State, split: str) -> Tensor:
    return torch.cat([features_of(site, w, batch) for batch in site.whole(split)])


def features_of(site: Hospital, w: State, batch: Batch) -> Tensor:
    """Mean and standard deviation of every channel of the first convolution of every encoder stage."""
    stages: list[Tensor] = []
    hooks = [
        conv.register_forward_hook(lambda _, __, out: stages.append(out.detach().flatten(2)))
        for conv in encoder_convolutions(site.module)
    ]
    site.output(w, batch.images)
    for hook in hooks:
        hook.remove()
    return torch.cat([part for out in stages for part in (out.mean(2), out.std(2, unbiased=False))], 1).double()


def oas(within: Tensor, n: int) -> float:
    """The shrinkage of Chen, Wiesel, Eldar & Hero (2010), of the correlations."""
    R, p = within / torch.outer(within.diagonal().sqrt(), within.diagonal().sqrt()), len(within)
    square, trace = float((R @ R).trace()), float(R.trace())
    return min(1.0, ((1 - 2 / p) * square + trace**2) / ((n + 1 - 2 / p) * (square - trace**2 / p)))


def best_gamma(play: Play, models: Models, found: ClosedForm) -> float:
    """The γ with the best mean over sites of validation Dice, which must gain its standard error over γ = 1."""
    gains: dict[float, list[Tensor]] = {}  # by γ and site: of every case, over the global model
    for gamma in GRID:
        gains[gamma] = [
            torch.tensor([routed_dice(play, site, models, found, batch, gamma) for batch in single(site)])
            - torch.tensor([routed_dice(play, site, models, found, batch, 1.0) for batch in single(site)])
            for site in play.sites.values()
        ]
    mean = {gamma: float(torch.stack([each.mean() for each in of]).mean()) for gamma, of in gains.items()}
    for gamma, of in gains.items():
        cases = sum(map(len, of))
        variance = sum(float((each - each.mean()).square().sum()) for each in of) / (cases - len(of))
        error = math.sqrt(variance * sum(1 / len(each) for each in of)) / len(of)
        if gamma < 1 and mean[gamma] < play.method.needed_gain * error - 1e-9:
            del mean[gamma]
    best = [gamma for gamma, gain in mean.items() if gain >= max(mean.values()) - 1e-9]
    return best[(len(best) - 1) // 2]


def single(site: Hospital) -> list[Batch]:
    return [batch.only(i) for batch in site.whole("valid") for i in range(len(batch.cases))]


def routed_dice(play: Play, site: Hospital, models: Models, found: ClosedForm, case: Batch, gamma: float) -> float:
    """Algorithm 2: max ŷ_s > γ → the model of the arg max, else the global model; an outlier goes there too."""
    x = features_of(site, models["global"], case)
    chances = found.chances(x, found.shrinkage, found.temperature)[0]
    far = found.distances(x, found.shrinkage)[0].sqrt()
    outlier = all(float(d) > limit for d, limit in zip(far, found.limits.values()))
    use = (
        f"personal of {list(play.sites)[int(chances.argmax())]}" if chances.max() > gamma and not outlier else "global"
    )
    with torch.no_grad():
        output = site.output(models[use], case.images)[0]
    (dice,) = [mark.value for mark in play.task.score(output, case.truth[0], full=False) if mark.metric == "dice"]
    return dice


def fedsm_extra(play: Play) -> Models:
    """Algorithm 3: the models first; then only w_s, whose class for a case is arg min_k L(h_k, y), k = 0 the global."""
    found = models_alone(play)
    models = list(found.values())

    def loss(site: Hospital, output: Tensor, batch: Batch) -> Tensor:
        with torch.no_grad():
            losses = [[site.loss(h, batch.only(i), training=False) for h in models] for i in range(len(batch.cases))]
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
        seen = {name: sum(len(batch.cases) for batch in site.batches(round)) for name, site in here.items()}
        means = {name: combined((1 / seen[name], self.summed(site, round))) for name, site in here.items()}
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
            model = Descent(self.w, site.site.local, self.lr)
            for batch in site.batches(round):
                model.step(self.gradient(site, model.now, batch))
            trained[name] = model.now
        self.w = average(trained, self.play.n)

    def gradient(self, site: Hospital, at: State, batch: Batch) -> State:
        here = leaves(at)
        return slope(self.loss(site, functional_call(self.module, here, (batch.images,)), batch), here)

    def summed(self, site: Hospital, round: Round) -> State:
        return combined(*((len(b.cases), self.gradient(site, self.w, b)) for b in site.batches(round)))


def adam(w: State, g: State, m: State, v: State, steps: int, lr: float) -> tuple[State, State, State, int]:
    """One step as Kingma & Ba print it, with their β_1, β_2 and ε."""
    m = combined((0.9, m), (0.1, g))
    v = combined((0.999, v), (0.001, {key: part**2 for key, part in g.items()}))
    first, second = 1 - 0.9 ** (steps + 1), 1 - 0.999 ** (steps + 1)
    new = {key: w[key] - lr * (m[key] / first) / ((v[key] / second).sqrt() + 1e-8) for key in w}
    return new, m, v, steps + 1
