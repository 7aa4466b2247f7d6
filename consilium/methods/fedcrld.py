"""FedCRLD: local encoders with attention to the shared encoder, and a momentum model per site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from consilium.batch import Batch
from consilium.fields import check_below_one, check_choices, check_from_zero
from consilium.learning.gradients import GradientNetwork, Stepper, Tally, seeded_batches
from consilium.learning.training_networks import training_network
from consilium.method import LossOfBatch, Method, message
from consilium.methods.merged import BACKGROUNDS, check_exclusive
from consilium.methods.partly_local import inverse_loss
from consilium.methods.personal_part import whole
from consilium.methods.shares import WithShares
from consilium.methods.site_models import SiteModels, channels_of, own_channels, personal_predictor
from consilium.networks.attended import Attended, Featured, far_names
from consilium.networks.parts import part_names
from consilium.networks.plain_unet import Supervised
from consilium.predictor import Predictor
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class FedCRLD(WithShares, Method):
    """The server averages everything, but a site keeps its encoder and links it to the global one by attention."""

    share_local_parts: bool = True  # the server keeps each site's model, for all sites; always false between hospitals
    momentum: float = 0.99  # of the momentum model: m ← momentum m + (1 − momentum) w after every step
    predictions: float = 1.0  # weight of the mean squared difference to the momentum model's probabilities
    features: float = 1.0  # weight of the mean squared difference to the momentum model's bottleneck
    distillation: float = 1.0  # weight of the divergence from the received global model's probabilities
    self_attention: bool = True  # at the bottleneck
    cross_attention: bool = True  # from the bottleneck to that of the received global encoder
    background: str = "product"  # of several models' backgrounds; "mean": of their logits, as the paper

    paper: ClassVar[str] = "Qi et al., FedCRLD (MICCAI 2022), as UFPS (Patterns 2024) uses it"
    headline: ClassVar[str] = "personal"
    prediction: ClassVar[str] = "one per site, with its own and the global encoder"
    differences: ClassVar[tuple[str, ...]] = (
        "The losses are those UFPS names: mean squares to the momentum model, of predictions and of features, and "
        "distillation from the global model; the original has cross entropy and a symmetric divergence of features.",
        "Cross-attention asks the received global encoder, which does not learn at the site; the published code never "
        "loads the server's weights.",
        "The momentum model is a running mean of the site's model; the published code trains it on its own.",
        "UFPS gives neither the weights of the losses nor the momentum: 1 each, and 0.99.",
        "A site's loss covers its organs, with everything else as background.",
    )

    @message
    class Server:
        global_: Weights  # of everything but the fixed encoder
        personal: Mapping[SiteName, Weights]  # as last received, before averaging; empty if not shared
        asked: Mapping[SiteName, Weights]  # the fixed encoder that each of them attends to
        encoder: tuple[str, ...]  # the names of the encoder's tensors
        labels: Mapping[SiteName, tuple[str, ...]]
        n: Mapping[SiteName, int]

    @message
    class Downlink:
        global_: Weights

    @message
    class Uplink:
        global_: Weights  # everything, the site's encoder too
        loss: Loss
        steps: Count

    @message
    class Memory(Method.Memory):
        personal: Weights  # the whole trained model, with the fixed encoder
        momentum: Weights  # the running mean of the site's models

    @message
    class Release:
        personal: Mapping[SiteName, Weights]
        asked: Mapping[SiteName, Weights]
        labels: Mapping[SiteName, tuple[str, ...]]
        home: SiteName  # empty for a hospital outside

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, "method", background=BACKGROUNDS)
        check_below_one(self, "method", "momentum")
        check_from_zero(self, "method", "predictions", "features", "distillation")

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        check_exclusive(task, local.batchnorm, "FedCRLD")
        self.task_at(task).shape()
        return []

    def task_at(self, task: Task) -> Task:
        return attended(task, self.self_attention, self.cross_attention)

    def start(self, task: Task, roster: Roster) -> Server:
        n, labels = ({name: getattr(card, key) for name, card in roster.items()} for key in ("n", "labels"))
        own = self.task_at(task)
        common = own.initial().split(lambda name: name not in copies(own))[0]
        return self.Server(common, {}, {}, encoder_names(own), labels, n)

    def remember(self, site: Site) -> Memory:
        first = self.task_at(site.task).initial()
        return self.Memory(first, first)

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(server.global_)

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        task, labels = self.task_at(site.task), site.card.labels
        place = replace(site, task=task)
        encoder = set(encoder_names(task))
        shared = with_asked(task, got.global_, got.global_)
        own, _ = memory.personal.split(encoder.__contains__)  # the site takes over everything except the encoder
        network = GradientNetwork(place, whole(task, own, shared))
        steady = _loaded(place, 1, _with_far(task, memory.momentum, shared))
        common = _loaded(place, 2, shared)
        stepper = Stepper(place, network.parameters, round, memory.states)
        tally = Tally()
        for batch in seeded_batches(place, round):
            with torch.no_grad():
                teachers = steady(batch.images), common(batch.images)

            def loss_of(output: Featured, batch: Batch = batch, teachers: Any = teachers) -> Tensor:
                terms = self.terms(task, labels, output, *teachers)
                return inverse_loss(site.task, labels, output.output, batch) + sum(
                    terms.values(), output.features.new_zeros(())
                )

            gradient, loss = network.gradient(batch, loss_of)
            stepper.step(gradient)
            _follow(steady, network.module, self.momentum)
            tally.add(loss, batch)
        trained = network.weights()
        sent = trained.split(lambda name: name not in copies(task))[0]
        kept = self.Memory(trained, Weights(steady.state_dict()), states=stepper.states)
        return self.Uplink(sent, tally.loss, tally.steps), kept

    def terms(
        self, task: Task, labels: tuple[str, ...], output: Featured, steady: Featured, common: Featured
    ) -> dict[str, Tensor]:
        """The terms added to the segmentation loss, by name; a weight of 0 removes its term."""
        own, before, shared = (_chances(task, labels, one) for one in (output, steady, common))
        divergence = torch.xlogy(shared, shared) - shared * own.clamp_min(1e-12).log()  # KL(global ‖ local)
        found = {
            "predictions": functional.mse_loss(own, before),
            "features": functional.mse_loss(output.features, steady.features),
            "distillation": divergence.sum(1).mean(),
        }
        return {name: getattr(self, name) * term for name, term in found.items() if getattr(self, name)}

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        average = self.average({name: reply.global_ for name, reply in replies.items()}, server.n, server.global_)
        personal, asked = dict(server.personal), dict(server.asked)
        if self.share_local_parts:
            encoder = server.global_.split(set(server.encoder).__contains__)[0] if self.cross_attention else Weights({})
            personal |= {name: reply.global_ for name, reply in replies.items()}
            asked |= dict.fromkeys(replies, encoder)
        return self.Server(average, personal, asked, server.encoder, server.labels, server.n)

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.personal, server.asked, server.labels, site.name if site else "")

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        own = self.task_at(task)
        models = {name: with_asked(own, weights, released.asked[name]) for name, weights in released.personal.items()}
        if memory is not None and released.home:
            models[released.home] = memory.personal
        known = {name: released.labels[name] for name in models}

        def output(name: SiteName, images: Tensor) -> Tensor:
            return own_channels(task, own.infer(models[name], images), known[name], inverse=True)

        together = SiteModels(task, output, known, "trained", background=self.background)
        return personal_predictor(together, released.home, released.labels)

    def trained_loss(self, site: Site, server: Any, memory: Any | None, round: Round) -> LossOfBatch:
        """The segmentation loss alone: the other terms need the models of that round."""
        return lambda batch: lambda output: inverse_loss(site.task, site.card.labels, output, batch)

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        own = self.task_at(task)
        return self.Uplink(own.shape().split(lambda name: name not in copies(own))[0], 0.0, 0)


# ------------------------------------------------------------------------------------------- networks


@lru_cache(maxsize=64)
def attended(task: Task, self_attention: bool, cross_attention: bool) -> Task:
    """The task with attention in its network."""
    given: Any = task
    made: Task = replace(given, model=Attended(given.model, self_attention, cross_attention))
    return made


@lru_cache(maxsize=64)
def copies(task: Task) -> dict[str, str]:
    """The names of the fixed encoder's tensors, with the names of the tensors they copy."""
    with torch.device("meta"):
        return far_names(task.network())


@lru_cache(maxsize=64)
def encoder_names(task: Task) -> tuple[str, ...]:
    """The names of the trained encoder's tensors."""
    with torch.device("meta"):
        network: Any = task.network()
    return tuple(sorted(f"net.{name}" for name in part_names(network.net, "encoder")))


def with_asked(task: Task, weights: Weights, asked: Weights) -> Weights:
    """A whole model from the trained tensors and the fixed encoder, under its names in the network."""
    far = copies(task)
    return Weights.over({name: asked[far[name]] if name in far else weights[name] for name in task.shape()})


def _with_far(task: Task, weights: Weights, other: Weights) -> Weights:
    """A whole model with the fixed encoder of another."""
    return Weights.over({name: (other if name in copies(task) else weights)[name] for name in task.shape()})


def _loaded(site: Site, slot: int, weights: Weights) -> nn.Module:
    network = training_network(site.task, "model", None, slot, site.device)
    network.load(weights)
    return network.module


@torch.no_grad()
def _follow(steady: nn.Module, module: nn.Module, momentum: float) -> None:
    now = module.state_dict()
    for name, tensor in steady.state_dict().items():
        if tensor.is_floating_point():
            tensor.lerp_(now[name], 1 - momentum)


def _chances(task: Task, labels: tuple[str, ...], one: Featured) -> Tensor:
    """Probabilities of background and the site's own organs."""
    logits = one.output.main if isinstance(one.output, Supervised) else one.output
    return logits[:, channels_of(task, labels)].softmax(1)
