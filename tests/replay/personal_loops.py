"""Every personal method as a naive loop, as its paper's algorithm box; each returns its last models by name."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from tests.replay.naive import Descent, Play, State, average, combined, dot, is_trained, leaves, slope, squared

Models = dict[str, State]


def named(**groups: dict[str, State]) -> Models:
    return {f"{group} of {site}": model for group, models in groups.items() for site, model in models.items()}


# ------------------------------------------------------------------------------------------------ one shared model


def fedavg(play: Play) -> Models:
    """Each site trains w_g; w_g = Σ (n_k / n) w_k over those that answered."""
    return {"global": fedavg_local(play)["global"]}


def fedavg_local(play: Play) -> Models:
    """FedAvg, in which a site uses its w_k."""
    w, mine = play.first(), play.all(play.first())
    for round, sites in play.rounds():
        trained = {name: site.trained("global", w, round) for name, site in sites.items()}
        w, mine = average(trained, play.n), {**mine, **trained}
    return {"global": w, **named(personal=mine)}


def fedprox(play: Play, adapts: bool = False) -> Models:
    """The loss of a site is f(w) + (μ/2) ‖w − w_g‖²."""
    w = play.first()
    for round, sites in play.rounds():
        trained = {}
        for name, site in sites.items():
            model = site.descent("global", w, round)
            for batch in site.batches(round):
                here = leaves(model.now)
                model.step(slope(site.loss(here, batch) + play.method.mu / 2 * squared(here, w), here))
            trained[name] = model.now
        w = average(trained, play.n)
    return {"global": w, **(finetuned(play, w) if adapts else {})}


def finetuned(play: Play, w: State) -> Models:
    """From the last w_g, E epochs without the server, with a fresh optimiser and a rate of their own."""
    ((round, sites),) = play.rounds("adapt")
    tuned = {}
    for name, site in sites.items():
        how = {"epochs": play.method.finetune_epochs, "lr": play.method.finetune_lr or site.site.local.lr}
        alone = replace(site, site=replace(site.site, local=replace(site.site.local, **how)))
        tuned[name] = alone.trained("personal", w, round, fresh=True)
    return named(personal=tuned)


def fedavg_finetune(play: Play) -> Models:
    w = fedavg(play)["global"]
    return {"global": w, **finetuned(play, w)}


def scaffold(play: Play) -> Models:
    """Option II: y ← y − η (g − c_i + c); c_i⁺ = c_i − c + (x − y)/(K η); c ← c + |S|/N · mean (c_i⁺ − c_i)."""
    x = play.first()
    c = {key: torch.zeros_like(part) for key, part in x.items() if is_trained(key)}
    mine = play.all(c)
    for round, sites in play.rounds():
        ys, changes = {}, {}
        for name, site in sites.items():
            y, steps, eta = combined((1, x)), 0, site.rate(round)
            for batch in site.batches(round):
                y = combined((1, y), (-eta, site.gradient(y, batch)), (eta, mine[name]), (-eta, c))
                steps += 1
            new = combined((1, mine[name]), (-1, c), (1 / (steps * eta), x), (-1 / (steps * eta), y))
            ys[name], changes[name], mine[name] = y, combined((1, new), (-1, mine[name])), new
        x = average(ys, play.all(1))
        c = combined((1, c), (len(sites) / len(play.sites), average(changes, play.all(1))))
    return {"global": x, "c": c, **named(c=mine)}


def fedasam(play: Play) -> Models:
    """ε = ρ T² g / ‖T g‖ with T = |w| + η on weights and 1 on biases; then a step from w with the gradient at w + ε."""
    w, (rho, eta) = play.first(), (play.method.rho, play.method.eta)
    for round, sites in play.rounds():
        trained = {}
        for name, site in sites.items():
            model = site.descent("global", w, round)
            for batch in site.batches(round):
                now = model.now
                g = site.gradient(now, batch)
                T = {key: torch.ones_like(g[key]) if key.endswith("bias") else now[key].abs() + eta for key in g}
                length = squared({key: T[key] * g[key] for key in g}).sqrt()
                climbed = {key: now[key] + rho * T[key] ** 2 * g[key] / length for key in g}
                model.step(site.gradient(climbed, batch))
            trained[name] = model.now
        w = average(trained, play.n)
    return {"global": w}


# ------------------------------------------------------------------------------------------------ no shared model


def local(play: Play) -> Models:
    """Each site trains alone; `pooled` is the same with one site that holds all cases."""
    mine = play.all(play.first())
    for round, sites in play.rounds():
        mine |= {name: site.trained("local", mine[name], round) for name, site in sites.items()}
    return named(personal=mine)


def fedamp(play: Play, heuristic: bool = False) -> Models:
    """u_i = Σ_j ξ_ij w_j; w_i from u_i on f(w) + (strength/2) ‖w − u_i‖².

    ξ_ij = step/N · exp(−‖w_i − w_j‖²/σ). The heuristic has (1 − ξ_ii) exp(σ cos) / Σ_{h≠i} exp(σ cos), ξ_ii = 1/N.
    """
    how, K = play.method, len(play.sites)
    w = play.all(play.first())
    for round, sites in play.rounds():
        u = {}
        for i in w:
            if heuristic:
                near = {j: math.exp(how.sigma * (float(cosine(w[i], w[j])) - 1)) for j in w if j != i}
                share = {j: (1 - 1 / K) * value / sum(near.values()) for j, value in near.items()}
            else:
                share = {j: how.step / K * math.exp(-float(squared(w[i], w[j])) / how.sigma) for j in w if j != i}
            u[i] = average(w, {**share, i: 1 - sum(share.values())})
        for name, site in sites.items():
            model = site.descent("personal", u[name], round)
            for batch in site.batches(round):
                here = leaves(model.now)
                model.step(slope(site.loss(here, batch) + how.strength / 2 * squared(here, u[name]), here))
            w = {**w, name: model.now}
    return named(personal=w)


def cosine(a: State, b: State) -> Tensor:
    return dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()


def fedfomo(play: Play) -> Models:
    """θ ← θ + Σ_n w_n (θ_n − θ), w_n ∝ max(0, (L(θ) − L(θ_n)) / ‖θ_n − θ‖) on validation; then local training.

    θ is where the site's last training began; the θ_n are the others' last models and the site's own.
    """
    sent, before = play.all(play.first()), play.all(play.first())
    for round, sites in play.rounds():
        came = dict(sent)
        for name, site in sites.items():
            theta = before[name]
            far = {j: float(squared(other, theta)) ** 0.5 for j, other in came.items()}
            gain = {j: site.valid_loss(theta) - site.valid_loss(came[j]) for j in came}
            w = {j: max(0.0, gain[j] / far[j]) for j in came if far[j]}
            if sum(w.values()):
                moves = [(share / sum(w.values()), combined((1, came[j]), (-1, theta))) for j, share in w.items()]
                theta = combined((1, theta), *moves)
            before[name], sent[name] = theta, site.trained("personal", theta, round)
    return named(personal=sent, before=before)


def apple(play: Play) -> Models:
    """w_i = Σ_j p_ij c_j; c_i and p_i descend on F(w_i) + λ(r) (μ/2) ‖p_i − p0‖², by autograd through the mixture."""
    how, names = play.method, list(play.sites)
    cores = {name: play.first(draw=i) for i, name in enumerate(names)}
    held = {name: dict(cores) for name in names}  # as last downloaded
    p0 = torch.tensor([play.n[name] / sum(play.n.values()) for name in names])
    p = play.all(p0)
    for round, sites in play.rounds():
        L = how.scheduler_rounds
        fade = (math.cos(math.pi * round.step / L) + 1) / 2 if round.step < L else 0.0  # λ(r)
        sent = dict(cores)
        for name, site in sites.items():
            held[name] = {**held[name], **sent, name: held[name][name]}
            core = site.descent("core", held[name][name], round, fresh=True)
            eta_2 = how.relation_lr * site.rate(round) / site.site.local.lr  # it decays as η_1 does
            relation = Descent({"p": p[name]}, replace(site.site.local, weight_decay=0.0), eta_2)
            for batch in site.batches(round):
                own, q = leaves(core.now), leaves(relation.now)
                mixture = combined(*((q["p"][j], own if k == name else held[name][k]) for j, k in enumerate(names)))
                pull = fade * how.mu / 2 * (q["p"] - p0).square().sum()
                found = slope(site.loss(mixture, batch) + pull, {**own, **q})
                core.step(found)
                relation.step(found)
            held[name][name], p[name] = core.now, relation.now["p"]
            cores = {**cores, name: core.now}
    return named(core=cores, p={name: {"p": row} for name, row in p.items()})


# ------------------------------------------------------------------------------------------------ shared and own


def fedbn(play: Play) -> Models:
    """FedAvg of all but the normalisation layers, which each site keeps."""
    norms = [
        name
        for name, part in play.task.network().named_modules()
        if isinstance(part, (nn.GroupNorm, nn.InstanceNorm2d, nn.BatchNorm2d))
    ]
    stays = {key for key in play.first() if key.rpartition(".")[0] in norms}
    assert stays
    w, mine = play.first(), play.all(play.first())
    for round, sites in play.rounds():
        trained = {}
        for name, site in sites.items():
            start = {key: mine[name][key] if key in stays else w[key] for key in w}
            trained[name] = site.trained("global", start, round)
        w, mine = average(trained, play.n), {**mine, **trained}
    return {"global": {key: part for key, part in w.items() if key not in stays}, **named(personal=mine)}


def apfl(play: Play, adaptive: bool = False) -> Models:
    """w ← w − η ∇f(w); v ← v − η ∇_v f(v̄); α ← α − η ∂f(v̄)/∂α in [0, 1]; v̄ = α v + (1 − α) w, by autograd."""
    w, v = play.first(), play.all(play.first())
    alpha = play.all(torch.tensor(play.method.mix, dtype=torch.float64))
    mixed = play.all(play.first())
    for round, sites in play.rounds():
        trained = {}
        for name, site in sites.items():
            common, own = site.descent("global", w, round), site.descent("own", v[name], round)
            for batch in site.batches(round):
                here, a = leaves(own.now), alpha[name].clone().requires_grad_()
                found = slope(site.loss(combined((a, here), (1 - a, common.now)), batch), {**here, "α": a})
                common.step(site.gradient(common.now, batch))
                own.step(found)
                if adaptive:
                    alpha[name] = (alpha[name] - site.rate(round) * found["α"]).clamp(0, 1)
            trained[name], v[name] = common.now, own.now
            mixed[name] = combined((alpha[name], v[name]), (1 - alpha[name], trained[name]))
        w = average(trained, play.n)
    mix = {name: {"mix": a} for name, a in alpha.items()}
    return {"global": w, **named(own=v, personal=mixed), **(named(mix=mix) if adaptive else {})}


def per_fedavg(play: Play) -> Models:
    """w ← w − β (I − α ∇²f(w; D'')) ∇f(w − α ∇f(w; D); D'); first order drops the Hessian.

    Hessian-free: ∇²f(w) d ≈ (∇f(w + δ d) − ∇f(w − δ d)) / 2δ, with δ ‖d‖ = `difference`. (A second backward pass would
    not see the bends of PReLU.) At the end each site takes one step of α from w on its own cases.
    """
    w, inner, curved = play.first(), play.method.inner_lr, play.method.hessian == "free"
    for round, sites in play.rounds():
        trained = {}
        for name, site in sites.items():
            meta, batches = site.descent("global", w, round), list(site.batches(round))
            for D, D1, *D2 in groups(batches, 3 if curved else 2):
                now = meta.now
                d = site.gradient(combined((1, now), (-inner, site.gradient(now, D))), D1)
                for other in D2:
                    delta = play.method.difference / float(squared(d)) ** 0.5
                    ahead, back = (site.gradient(combined((1, now), (by, d)), other) for by in (delta, -delta))
                    d = combined((1, d), (-inner / (2 * delta), ahead), (inner / (2 * delta), back))
                meta.step(d)
            trained[name] = meta.now
        w = average(trained, play.all(1))
    ((round, sites),) = play.rounds("adapt")
    first = {name: next(site.batches(round)) for name, site in sites.items()}
    adapted = {k: combined((1, w), (-inner, site.gradient(w, first[k]))) for k, site in sites.items()}
    return {"global": w, **named(personal=adapted)}


def groups(batches: list[Batch], size: int) -> list[list[Batch]]:
    """Whole groups only; what is left is not used."""
    return [batches[i : i + size] for i in range(0, len(batches) - size + 1, size)]


def pfedme(play: Play) -> Models:
    """On a batch K steps of θ on f(θ) + (λ/2) ‖θ − w_i‖², then w_i ← w_i − η λ (w_i − θ); w ← (1 − β) w + β mean."""
    w, how, thetas = play.first(), play.method, play.all(play.first())
    for round, sites in play.rounds():
        trained = {}
        for name, site in sites.items():
            mine, theta = w, w
            for batch in site.batches(round):
                for _ in range(how.inner_steps):
                    here = leaves(theta)
                    found = slope(site.loss(here, batch) + how.strength / 2 * squared(here, mine), here)
                    theta = combined((1, theta), (-how.inner_lr, found))
                pace = how.lr * how.strength
                mine = combined((1 - pace, mine), (pace, theta))
            trained[name], thetas[name] = mine, theta
        w = combined((1 - how.server_mix, w), (how.server_mix, average(trained, play.all(1))))
    return {"global": w, **named(personal=thetas)}
