"""Scans of recurrent layers over drafts, in a form that follows branches and gives the state at each node.

With queries q, keys k, values v and decays a, all of node t, whose parent is p, such a layer's state and output are::

    S_t = a_t S_p + k_t d_t'          o_t = S_t' q_t
    d_t = v_t                         Mamba-2 (arXiv 2405.21060), whose B, C and x are k, q and v
    d_t = b_t (v_t - (a_t S_p)' k_t)  the gated delta rule (arXiv 2412.06464)

transformers' scans pad a pass to a chunk, often of 64 tokens, and leave the last state alone. Drafts are short, so they
are written out from the state S_0 before them, c being the sum of log a over a node and those before it::

    d_t = b_t (v_t - S_0' (e^c_t k_t) - sum over j before t of (k_t . k_j) e^(c_t - c_j) d_j)     one triangular system
    S_n = e^c_n S_0 + sum over j up to n of e^(c_n - c_j) k_j d_j'                                whichever n is kept

Time steps of Mamba-2 have no bound here: transformers hands ``time_step_limit`` to the scan that reads a prompt, and
not to the update that decodes token by token (Nemotron-H and Zamba-2 have a lower bound of 0.001).
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from jacobi import TokenTree, branch_mask
from lookahead.models.conformance import recorded_routes
from lookahead.models.families.overrides import Override, file_of, in_passes
from lookahead.models.traits import ModelTraits

_FREE = (0.0, float("inf"))
_MAMBA = "mamba2_chunk_scan"


@dataclass(slots=True)
class Scanned:
    """A layer's state before a pass, and what each node adds; ``[batch, head, ...]`` in float32."""

    state: Tensor  # the cache's own, [key, value] channels
    keys: Tensor  # [node, key]
    added: Tensor  # [node, value]
    sums: Tensor  # [node, key], or 1 for all channels: logarithms of the decays on a node's path, summed


class Scans:
    """What the scans and convolutions of one pass are told, and leave.

    Attributes:
        seen: ``[batch, 1, node, node]`` is True where a node follows another one, or is it; ``[1, 1, ...]`` for
            sequences that are drafted for alike. Nodes follow their parents.
        layers: what each layer's scan has left, as they come.
    """

    def __init__(self, parents: Sequence[Sequence[int]], seen: Tensor) -> None:
        self.seen = seen
        self.layers: list[Scanned] = []
        self._parents = parents
        self._inputs: dict[int, Tensor] = {}

    @classmethod
    def over(cls, trees: Sequence[TokenTree], device: torch.device) -> Self:
        """Those of a pass over one tree for each sequence; shorter ones are padded with nodes that follow no other."""
        width = max(map(len, trees))
        parents = [tree.parents + [-1] * (width - len(tree)) for tree in trees]
        return cls(parents, torch.stack([branch_mask(each) for each in parents])[:, None].to(device))

    def inputs(self, size: int) -> Tensor:
        """Which nodes a convolution over ``size`` inputs reads at each node, itself last: ``[batch, node, place]``. -1
        is the text's last token, -2 the one before it."""
        if size not in self._inputs:
            found = []
            for parents in self._parents:
                places: list[list[int]] = []
                for node, parent in enumerate(parents):
                    before = places[parent] if parent >= 0 else list(range(-size, 0))
                    places.append([*before[1:], node])
                found.append(places)
            self._inputs[size] = torch.tensor(found).to(self.seen.device)
        return self._inputs[size]

    def keep(self, last: Tensor) -> None:
        """Put the states behind the node ``last`` ``[batch]`` of each sequence into the cache; -1 = leave them."""
        rows = torch.arange(len(last), device=last.device)
        moves = (last >= 0)[:, None, None, None]
        on = moves & self.seen.expand(len(last), -1, -1, -1)[rows, :, last][..., None]  # [batch, 1, node, 1]
        for layer in self.layers:  # which may lie on several devices
            row, node, moved, seen = (part.to(layer.sums.device) for part in (rows, last, moves, on))
            ends = layer.sums[row, :, node][:, :, None] * moved
            keys = layer.keys * (ends - layer.sums).masked_fill(~seen, -inf).exp()
            layer.state.copy_(layer.state * ends.exp().mT + keys.mT @ layer.added)

    def read(
        self, state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, beta: Tensor | None
    ) -> Tensor:
        """Outputs ``[batch, head, node, value]``. ``decays`` ``[..., node, key or 1]`` are logarithms; with ``beta``
        ``[..., node]`` it is the delta rule."""
        width, seen = keys.shape[-2], self.seen.to(keys.device)
        sums, both = seen.float() @ decays, torch.cat([keys, queries], dim=-2)
        if decays.shape[-1] == 1:
            apart = (sums - sums.mT).masked_fill(~seen, -inf).exp()
            pairs = both @ keys.mT * torch.cat([apart, apart], dim=-2)
        else:
            apart = (sums[..., None, :] - sums[..., None, :, :]).masked_fill(~seen[..., None], -inf).exp()
            apart = apart * keys[..., None, :, :]
            pairs = (torch.cat([apart, apart], dim=-3) @ both[..., None])[..., 0]
        decayed = sums.exp()
        read = both * torch.cat([decayed, decayed], dim=-2) @ state
        added = values
        if beta is not None:
            right = beta[..., None] * (values - read[..., :width, :])
            left = beta[..., None] * pairs[..., :width, :]
            added = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True)
        self.layers.append(Scanned(state, keys, added, sums))
        return read[..., width:, :] + pairs[..., width:, :] @ added


def scanned_layers(model: nn.Module, config: Any) -> list[type] | None:
    """Kinds of all layers of the cache of a model with recurrent ones; [] = it has none of these. None = a tree cannot
    follow them, because what they do is not known, or because no layer has keys."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if all("attention" in kind and "linear" not in kind for kind in kinds):  # known at once, as calls ask often
        return []
    layers = DynamicCache(config=config).layers
    found = {at: layer for at, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}
    if not found:
        return []
    states = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
    usual = all(type(layer) in states and layer.number_of_states == 1 for layer in found.values())
    classes = set(filter(_is_known, set(map(type, model.modules()))))
    known = {vars(module).get("layer_idx") for module in model.modules() if type(module) in classes}
    if not usual or not found.keys() <= known or not any(isinstance(layer, DynamicLayer) for layer in layers):
        return None
    return list(map(type, layers))


def unscanned(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Why a model's recurrent states cannot follow a tree; None = they can."""
    changes = traits.rope_limit is not None or traits.index_limit is not None
    if traits.is_encoder_decoder or traits.is_sharded or changes or not scanned_layers(model, traits.config):
        return "a recurrent state cannot follow a tree"
    if traits.dtype.itemsize > 2 or recorded_routes(model) == {"tree"}:
        return None
    name = str(traits.dtype).removeprefix("torch.")
    return f"in {name} a lost state cannot be told from rounding, and its class is not on record as one of route tree"


def _is_known(kind: Any) -> bool:
    """Whether modules of a class keep the inputs of a known convolution, and states only of a known scan."""
    home, code = vars(sys.modules[kind.__module__]), getattr(inspect.unwrap(kind.forward), "__code__", None)
    names = code.co_names if code is not None else ()
    if _CONVOLUTION not in home or "update_conv_state" not in names:
        return False
    return "update_recurrent_state" not in names or bool(home.keys() & _SCANS.keys())


def scans_of(model: nn.Module) -> list[Override]:
    """Overrides of the scans and convolutions that are known in a model's files; in a pass they heed its
    :class:`Scans`, and leave the states as they were."""
    homes = {id(home): home for home in map(file_of, model.modules())}
    return [
        Override(home, name, in_passes(scan))
        for home in homes.values()
        for name, scan in (_SCANS | _STEPS).items()
        if hasattr(home, name)
    ]


def bound_error(model: nn.Module) -> str | None:
    """Which bound a pass over several tokens keeps and a pass over one does not, if it cannot be lifted."""
    for module in model.modules():
        limit = vars(module).get("time_step_limit")
        if limit is not None and tuple(limit) != _FREE and not hasattr(file_of(module), _MAMBA):
            low, high = limit
            return (
                f"its {type(module).__name__} keeps time steps between {low:g} and {high:g} in passes over several "
                "tokens, and not one by one"
            )
    return None


def _delta_rule(_: Any, original: Callable[..., Any], scans: Scans, *parts: Tensor, **kwargs: Any) -> Any:
    """The scan of gated delta rules over queries, keys and values ``[batch, token, head, channel]``; ``g`` is one
    number a head, or a channel."""
    state = kwargs.get("initial_state")
    if state is None:
        return original(*parts, **kwargs)
    groups = parts[2].shape[2] // parts[1].shape[2]
    heads = (part.repeat_interleave(groups, dim=2) if groups > 1 else part for part in parts[:2])
    rest = (*heads, parts[2], kwargs["beta"], kwargs["g"])
    queries, keys, values, beta, decays = (part.transpose(1, 2).float() for part in rest)
    if kwargs.get("use_qk_l2norm_in_kernel"):
        queries, keys = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (queries, keys))
    queries = queries * keys.shape[-1] ** -0.5
    outputs = scans.read(state, queries, keys, values, decays if decays.ndim == 4 else decays[..., None], beta)
    return outputs.transpose(1, 2).contiguous().to(parts[0].dtype), state


def _mamba2(_: Any, original: Callable[..., Any], scans: Scans, *parts: Tensor, **kwargs: Any) -> Any:
    """Mamba-2's scan over inputs ``[batch, token, head, channel]``, time steps ``[batch, token, head]``, rates, one a
    head, and B and C ``[batch, token, group, state]``."""
    state, bias, skip = (kwargs.get(name) for name in ("initial_states", "dt_bias", "D"))
    if state is None:
        return original(*parts, **kwargs)
    given, steps, rates, *both = parts
    steps = steps if bias is None else steps + bias.to(steps.dtype)
    steps = (softplus(steps) if kwargs.get("dt_softplus") else steps).float()
    inputs, groups = given.float(), given.shape[2] // both[0].shape[2]
    keys, queries = (part.float().repeat_interleave(groups, dim=2).transpose(1, 2) for part in both)
    decays = (steps * rates.float()).transpose(1, 2)[..., None]
    values = (inputs * steps[..., None]).transpose(1, 2)
    outputs = scans.read(state.mT, queries, keys, values, decays, None).transpose(1, 2)
    return (outputs if skip is None else outputs + skip[..., None] * inputs).contiguous(), state


def _mamba2_step(
    _: Any, original: Callable[..., Any], scans: Scans, state: Tensor, *parts: Tensor, **kwargs: Any
) -> Tensor:
    """Mamba-2's step for one token, of which each head's numbers are given once a channel."""
    inputs, steps, rates, keys, queries, *skip = parts
    gate, bias = kwargs.pop("z", None), kwargs.pop("dt_bias", None)
    kwargs |= {"D": skip[0][..., 0] if skip else None, "dt_bias": None if bias is None else bias[..., 0]}
    steps, rates = steps[:, None, :, 0], rates[:, 0, 0]
    inputs, keys, queries = (part[:, None] for part in (inputs, keys, queries))
    outputs, _ = _mamba2(_, original, scans, inputs, steps, rates, keys, queries, initial_states=state, **kwargs)
    outputs, inputs = outputs[:, 0], inputs[:, 0]
    return (outputs if gate is None else outputs * silu(gate)).to(inputs.dtype)


def _convolution(
    _: Any,
    original: Callable[..., Any],
    scans: Scans,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """A convolution's outputs ``[batch, channel, node]``, of inputs ``[batch, channel, node, place]``."""
    if hidden_states.ndim == 3:
        return original(hidden_states, weight, bias, activation=activation, **kwargs)
    outputs = (hidden_states.float() * weight[:, None].float()).sum(dim=-1)
    outputs = (outputs if bias is None else outputs + bias[:, None].float()).to(weight.dtype)
    return (outputs if activation is None else ACT2FN[activation](outputs)).to(hidden_states.dtype)


_CONVOLUTION = "causal_conv1d_fn"
_SCANS: dict[str, Callable[..., Any]] = {
    _MAMBA: _mamba2,
    "torch_chunk_gated_delta_rule": _delta_rule,  # Qwen3-Next, Qwen3.5, OLMo hybrid
    "chunk_kimi_delta_attention": _delta_rule,  # Kimi Linear, Ling
}
_STEPS: dict[str, Callable[..., Any]] = {
    _CONVOLUTION: _convolution,
    "mamba2_selective_state_update": _mamba2_step,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
}
