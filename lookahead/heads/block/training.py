"""A block drafter as something to train: fresh for a model, blocks at places drawn in a text, and their losses."""

from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, nll_loss, pad

from jacobi import LookaheadError
from lookahead.heads.block.head import BlockHead
from lookahead.heads.block.network import BlockNetwork, BlockSizes
from lookahead.heads.block.settings import BlockSettings
from lookahead.heads.block.strategy import Block
from lookahead.models.hidden_states import decoder_layers
from lookahead.models.output_layer import output_layer, output_sizes, placement
from lookahead.training.data import IGNORE, Examples
from lookahead.training.drafter import Seen, TrainedHead, in_parts, take_output
from lookahead.training.stage import check_gradient

_SOFT, _HARD = 0.9, 0.1  # weights of the distance to the model's distribution and of the tokens that came (DSpark's)


class TrainedBlock(TrainedHead):
    """A block drafter that is trained."""

    settings, source, strategy, title = BlockSettings, "block", Block, "Block drafter"
    use = """from lookahead.heads.block.strategy import Block

model.generate(**inputs, custom_generate=Block("folder or name of this repository"))"""
    head: BlockHead
    _settings: BlockSettings

    @classmethod
    def fresh(cls, model: Any, settings: Any, examples: Examples = (), name: str | None = None) -> Self:
        """With a float32 drafter that reads the model's embeddings and scores by its output layer; the final norm is
        the model's, and the rest is drawn. A LookaheadError says what the model cannot give."""
        if model.config.is_encoder_decoder:
            raise LookaheadError(f"{type(model).__name__} is an encoder-decoder model: expected a causal one.")
        sizes = _sizes(model, settings, examples, name)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(settings.seed)
            network = BlockNetwork(sizes, output_sizes(model)[1])
            for weight in network.parameters():
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            if network.markov_head is not None:
                network.markov_head.markov_w2.weight.zero_()
        take_output(network.to(placement(model)[0]), model, examples, sizes.draft_vocab_size)
        head = BlockHead(network, sizes.feature_layers, True)
        head.check(model)
        check_gradient(model, sizes.hidden_size)
        return cls(head, settings)

    def losses(self, seen: Seen, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """DSpark's loss at all slots of some blocks whose tokens are to be predicted, each behind the text's own."""
        network, labels = self.head.network, seen.labels
        features = torch.cat([seen.states[f"layer.{index}"] for index in network.sizes.feature_layers], dim=-1)
        places = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
        text, (at, kept) = network.remember(features, places), self._blocks(labels)
        hidden = network(seen.tokens.gather(1, at), at, text, places, model.get_input_embeddings())
        before = at[:, :, None] + torch.arange(hidden.shape[2], device=at.device)
        held = (before + labels.shape[1] * torch.arange(len(at), device=at.device)[:, None, None])[kept]
        given = torch.zeros_like(before).masked_scatter(kept, seen.tokens.flatten()[held])
        vectors = network.after(given, hidden)
        weights = torch.exp((at[:, :, None] - before) / self._settings.fade)[kept]
        rows = hidden[kept], hidden[kept][:, :0] if vectors is None else vectors[kept], held, weights
        loss = partial(self._part, seen=seen, output=output_layer(model))
        total, right = in_parts(loss, rows, seen.logits.shape[-1], hidden.sum() * 0.0)
        total = total / weights.sum().clamp(min=1e-6)
        return total, {"loss_0": total.detach(), "right_0": right / max(1, len(held))}

    def _blocks(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Where blocks begin, drawn by chance ``[row, block]``, and of which slots, ``[row, block, slot]``, the token
        and all before it in the block are to be predicted."""
        told = pad(labels != IGNORE, (0, self._settings.places))
        count = min(self._settings.anchors, labels.shape[1])
        able = told[:, : labels.shape[1]] & told[:, 1 : labels.shape[1] + 1]
        at = (able + torch.rand(able.shape, device=able.device)).topk(count, dim=1).indices
        ahead = at[:, :, None] + 1 + torch.arange(self._settings.places, device=at.device)
        kept = told.gather(1, ahead.flatten(1)).unflatten(1, (count, -1))
        return at, (kept.cumprod(-1) * able.gather(1, at)[:, :, None]).bool()

    def _part(
        self, hidden: Tensor, vectors: Tensor, held: Tensor, weights: Tensor, seen: Seen, output: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """The losses of slots behind tokens ``held``, by their places in the batch, and how many best tokens came."""
        network, tokens = self.head.network, seen.tokens.flatten()
        said = network.added(network.logits(hidden, output), vectors).log_softmax(-1)
        theirs, following = seen.logits.flatten(0, 1)[held].float().softmax(-1), tokens[held + 1]
        ids = torch.arange(theirs.shape[1], device=tokens.device) if network.d2t is None else network.scored()
        theirs, place = theirs[:, ids], torch.searchsorted(ids, following).clamp(max=len(ids) - 1)
        inside = ids[place] == following  # else it is a token without a score
        away = (said.exp() - theirs).abs().sum(-1) + 1.0 - theirs.sum(-1)
        loss = _SOFT * away + _HARD * inside * nll_loss(said, place, reduction="none")
        if (sure := network.confidence(hidden, tokens[held])) is not None:
            loss = loss + binary_cross_entropy_with_logits(sure, 1.0 - away.detach() / 2.0, reduction="none")
        return (loss * weights).sum(), (inside & (said.argmax(-1) == place)).sum().float()


def _sizes(model: Any, settings: Any, examples: Examples, name: str | None) -> BlockSizes:
    """What a fresh drafter of a model looks like: as a layer of it, where settings do not say."""
    (hidden, vocab), config, count = output_sizes(model), model.config.get_text_config(), len(decoder_layers(model))
    heads, markov = config.num_attention_heads, None if settings.markov == "none" else settings.markov
    layers = settings.feature_layers or tuple(sorted({count // 5, count // 2, max(0, count - 3)}))
    rank = settings.rank if markov else 0
    given: dict[str, Any] = {"hidden_size": hidden, "target_size": hidden, "feature_layers": layers, "rank": rank}
    given |= {"feed_forward": settings.feed_forward or getattr(config, "intermediate_size", None) or 4 * hidden}
    given |= {"block_size": settings.places, "anchor_first": True, "sights": ((None, False),) * settings.num_layers}
    given |= {"mask_token": _free_token(model, examples) if settings.mask_token is None else settings.mask_token}
    given |= {"heads": heads, "key_heads": getattr(config, "num_key_value_heads", None) or heads}
    given |= {"head_size": getattr(config, "head_dim", None) or hidden // heads, "markov": markov}
    given |= {"confidence": hidden + rank, "vocab_size": vocab, "draft_vocab_size": settings.draft_vocab}
    given["eps"] = float(getattr(config, "rms_norm_eps", 1e-6))
    return BlockSizes(**given, base_model=name or getattr(model.config, "name_or_path", None) or None)


def _free_token(model: Any, examples: Examples) -> int:
    """The last token that no text has and that ends, begins or pads none."""
    free, config = torch.ones(output_sizes(model)[1], dtype=torch.bool), model.generation_config
    for used in (*(e.ids.long() for e in examples), config.eos_token_id, config.bos_token_id, config.pad_token_id):
        free[[] if used is None else used] = False
    if not bool(free.any()):
        raise LookaheadError("Every token is in some text: expected one for places to be filled. Give mask_token=.")
    return int(free.nonzero()[-1])
