"""Mixture of experts as configuration: which layers have experts, how tokens choose them, how they get there."""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "ExpertChoice",
    "ExpertsConfig",
    "GShardTop2",
    "Hierarchical",
    "NoisyTopK",
    "Router",
    "SigmoidTopK",
    "SwitchTop1",
    "TopK",
]

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class _Choice(_Part):
    """Keys of routers in which tokens choose experts."""

    z_coefficient: Coefficient = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE, Zoph 2022)."""


class TopK(_Choice):
    """The most probable experts of a softmax (Mixtral, Jiang 2024; Qwen3, Yang 2025)."""

    name: Literal["top_k"] = "top_k"
    experts_per_token: Positive = 2
    """Experts that a token is sent to."""
    normalised: bool = True
    """Divide a token's gates by their sum."""
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The router's input is multiplied by random numbers within 1 ± this while training."""
    balance_coefficient: Coefficient = 0.01
    """Coefficient of experts · Σ (share of choices) · (mean probability), which is 1 at balance."""


class SwitchTop1(_Choice):
    """One expert a token (Fedus 2021), with the probability as its gate."""

    name: Literal["switch"] = "switch"
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """The router's input is multiplied by random numbers within 1 ± this while training."""
    balance_coefficient: Coefficient = 0.01
    """Coefficient of experts · Σ (share of choices) · (mean probability), which is 1 at balance."""
    z_coefficient: Coefficient = 1e-3
    """Coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE, Zoph 2022)."""

    @property
    def experts_per_token(self) -> int:
        """One."""
        return 1

    @property
    def normalised(self) -> bool:
        """The only gate would be 1, and the router would learn nothing from it."""
        return False


class GShardTop2(_Choice):
    """Two experts a token, the second by chance in proportion to its gate (Lepikhin 2020)."""

    name: Literal["gshard"] = "gshard"
    balance_coefficient: Coefficient = 0.01
    """Coefficient of experts · Σ (share of first choices) · (mean gate), which is 1 at balance."""


class NoisyTopK(_Choice):
    """Noisy top-k gating with losses on importance and load (Shazeer 2017)."""

    name: Literal["noisy_top_k"] = "noisy_top_k"
    experts_per_token: Positive = 2
    """Experts that a token is sent to."""
    importance_coefficient: Coefficient = 0.1
    """Coefficient of the squared coefficient of variation of experts' summed gates."""
    load_coefficient: Coefficient = 0.1
    """Coefficient of the squared coefficient of variation of the tokens that experts may expect."""


class SigmoidTopK(_Choice):
    """Sigmoid gates, balanced by a bias on the choice instead of a loss (DeepSeek-V3, Liu 2024)."""

    name: Literal["sigmoid"] = "sigmoid"
    experts_per_token: Positive = 8
    """Experts that a token is sent to."""
    bias_rate: Coefficient = 1e-3
    """After a step the bias of an expert with more than the mean load falls by this, of one with less it rises."""
    num_nodes: Positive = 1
    """Sets of experts, next to each other, of which a token may use some."""
    nodes_per_token: Positive = 1
    """Sets that a token may use: those whose two best experts score highest together."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the gates, whose sum is 1 before."""
    balance_coefficient: Coefficient = 1e-4
    """Coefficient of the balance loss within each group."""


class ExpertChoice(_Part):
    """Experts choose tokens (Zhou 2022): balanced without a loss, but what a token gets depends on later tokens."""

    name: Literal["expert_choice"] = "expert_choice"


class Hierarchical(_Choice):
    """Two levels of noisy top-k gating: branches, then experts within each (Shazeer 2017, appendix B)."""

    name: Literal["hierarchical"] = "hierarchical"
    num_branches: Positive = 4
    """Branches, of num_experts / num_branches experts each."""
    branches_per_token: Positive = 2
    """Branches that a token is sent to."""
    experts_per_branch: Positive = 2
    """Experts that it is sent to in each."""
    importance_coefficient: Coefficient = 0.1
    """Coefficient of the squared coefficient of variation of summed gates, on both levels."""
    load_coefficient: Coefficient = 0.1
    """Coefficient of the squared coefficient of variation of the tokens that may be expected, on both levels."""


Router = Annotated[
    TopK | SwitchTop1 | GShardTop2 | NoisyTopK | SigmoidTopK | ExpertChoice | Hierarchical, Field(discriminator="name")
]


class ExpertsConfig(_Part):
    """Experts in place of feed-forward layers."""

    num_experts: Annotated[int, Field(ge=2)]
    """Experts of a layer."""
    router: Router = TopK()
    """How tokens and experts find each other."""
    every: Positive = 1
    """Every n-th layer has experts, the last of each n (2 in GShard and Switch); 1 is all."""
    mlp_dim: NonNegative = 0
    """Width of an expert; 0 is the model's mlp_dim."""
    num_shared: NonNegative = 0
    """Experts of the same width that every token goes through besides (DeepSeek)."""
    capacity_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.25
    """Tokens of a group that an expert takes, over what it would get at balance; the rest pass by in the residual
    stream."""
    group_tokens: NonNegative = 0
    """Tokens of a sequence within which capacity and balance are counted; 0 is the whole sequence."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of what is within experts set to zero while training."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        router = self.router
        if self.choices > self.num_experts:
            raise ValueError(
                f"router.experts_per_token={self.choices} exceeds num_experts={self.num_experts}; legal values: 1 to "
                f"{self.num_experts}"
            )
        if isinstance(router, SigmoidTopK):
            _divides("router.num_nodes", router.num_nodes, self.num_experts)
            within = self.num_experts // router.num_nodes * router.nodes_per_token
            if router.nodes_per_token > router.num_nodes or within < router.experts_per_token:
                raise ValueError(
                    f"router.nodes_per_token={router.nodes_per_token} of num_nodes={router.num_nodes} have {within} of "
                    f"num_experts={self.num_experts}; a token needs {router.experts_per_token}, and there are "
                    f"{router.num_nodes} nodes"
                )
        if isinstance(router, Hierarchical):
            _divides("router.num_branches", router.num_branches, self.num_experts)
            within = self.num_experts // router.num_branches
            for key, value, most in (
                ("branches_per_token", router.branches_per_token, router.num_branches),
                ("experts_per_branch", router.experts_per_branch, within),
            ):
                if value > most:
                    raise ValueError(f"router.{key}={value} exceeds {most}; legal values: 1 to {most}")
        return self

    @property
    def choices(self) -> int:
        """Experts that a token is sent to; of experts that choose, as many on average at a capacity factor of 1."""
        match self.router:
            case TopK() | SwitchTop1() | NoisyTopK() | SigmoidTopK():
                return self.router.experts_per_token
            case GShardTop2():
                return 2
            case Hierarchical():
                return self.router.branches_per_token * self.router.experts_per_branch
        return 1

    def scaled_down(self, mlp_dim: int) -> "ExpertsConfig":
        """The same experts, narrower, with a group for each sequence."""
        return self.model_copy(update={"mlp_dim": mlp_dim, "group_tokens": 0})

    def capacity(self, group_tokens: int) -> int:
        """Tokens of a group that an expert takes: ceil(factor · choices · tokens / experts), at most all of them.

        >>> ExpertsConfig(num_experts=4).capacity(10)
        7
        """
        return min(group_tokens, math.ceil(self.capacity_factor * self.choices * group_tokens / self.num_experts))


def _divides(key: str, value: int, num_experts: int) -> None:
    if num_experts % value:
        legal = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        raise ValueError(f"{key}={value} must divide num_experts={num_experts}; legal values: {legal}")
