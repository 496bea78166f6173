"""Tiny random models of every family that transformers knows, from its own mappings and default configs."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from helpers import encoder_decoders as seq2seq_toys
from helpers.models import prompts, run
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 64
# Fields that differ from the pattern's, by family. Names with an underscore in front are not the config's:
#   _layers      of each stack
#   _bare        only these fields, no others
#   _part        of the config, which is the class's own
#   _generation  settings of generate that the class cannot do without
#   _without     config classes whose models no text passes through, and which are left out
#   _noise       what the class reads beside texts, or in their stead: shapes of a row
#   _rows        that make up a text, one for each codebook
OVERRIDES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "overrides.json").read_text())

# The first pattern that a field's whole name matches decides its value; "tiny" numbers that fit each other.
_SIZES: list[tuple[str, Any]] = [
    (r"vocab_size|n_vocab|.*_vocab_size", VOCAB),
    (r"hidden_size|d_model|n_embd|dim|emb_dim|embed_dim|embedding_size|word_embed_proj_dim|n_embed", 32),
    (r".*intermediate_size.*|ffn_dim|.*_ffn_dim|d_ff|n_inner|ffn_hidden_size|dim_ff|feed_forward_size|d_inner", 48),
    (r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|depth|num_blocks", 2),
    (r"num_attention_heads|n_heads?|num_heads|.*attention_heads", 4),
    (r"num_key_value_heads|.*_num_key_value_heads|num_kv_heads|.*_num_kv_heads|multi_query_group_num", 2),
    (r"head_dim|.*_head_dim|attention_head_dim|d_kv|.*_head_size|kv_channels|head_size|dim_head", 8),
    (r"q_lora_rank|kv_lora_rank|.*_lora_rank|.*_rank", 16),
    (r"max_position_embeddings|n_positions|max_seq_len|seq_length|n_ctx|max_sequence_length", 128),
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|.*num_experts", 4),
    (r"num_experts_per_tok|moe_k|moe_topk|top_k_experts|.*experts_per_tok|moe_top_k|num_selected_experts", 2),
    (r"n_shared_experts|num_shared_experts|n_group|topk_group|.*n_groups?", 1),
    (r"sliding_window|.*_window_size|window_size|attention_chunk_size|.*sliding_window", 6),
    (r"floor_scale", 5),  # Llama 4's, in a layer without RoPE
    (r"no_rope_layer_interval", 2),
    (r"initializer_range|init_std|.*initializer_range", 0.3),
    (r"num_nextn_predict_layers|num_mtp_layers|first_k_dense_replace|num_dense_layers", 0),
    (r".*dropout.*|.*_pdrop", 0),
    (r"image_size", 8),
    (r"patch_size", 4),
]
_ALWAYS = {"head_dim": 8, "num_key_value_heads": 2}  # where the default None means "like another field"
_WIDE = {32: 128, 8: 32}  # channels in all and of a head, which torch turns as those of real models
_LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers|decoder_layers")


Inputs = Callable[[int], dict[str, Tensor]]  # a batch size, and what a batch of that size reads
_MAPPINGS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "encoder-decoder",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "encoder-decoder",
}
_TOYS = {"encoder-decoder": "bert2bert"} | {name: name for name in seq2seq_toys.TREES}


@dataclass(frozen=True)
class Family:
    """One entry of transformers' mappings: a model type, the class it names, and what the mapping is of."""

    name: str
    architecture: str
    kind: str

    @property
    def key(self) -> str:
        """Stands for the family in the record; a model type may be in several mappings."""
        return f"{self.name}-{self.architecture}"


def _families() -> Iterator[Family]:
    seen = set()
    for mapping, kind in _MAPPINGS.items():
        for name, classes in sorted(getattr(modeling_auto, mapping).items()):
            family = Family(name, classes if isinstance(classes, str) else classes[0], kind)
            if family.key not in seen:
                seen.add(family.key)
                yield family


FAMILIES = list(_families())


def _tiny_list(name: str, value: list[Any], layers: int, default_layers: int | None) -> list[Any]:
    """A per-layer list for fewer layers: one of each kind if there is room, else the first ones."""
    if default_layers is None or len(value) != default_layers:
        return value
    kinds = list(dict.fromkeys(str(item) for item in value))
    first = {str(item): item for item in reversed(value)}
    chosen = [first[kind] for kind in kinds][:layers]
    return chosen + value[len(chosen) : layers] if len(chosen) < layers else chosen


def _member(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # some fields differ from layer to layer, and refuse to be read
        return None


def _number(name: str, value: Any, layers: int) -> Any:
    """A tiny number for a field; ``...`` where its name says nothing."""
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), ...)
    if size is ... or not isinstance(value, int | float) or isinstance(value, bool):
        return ...
    size = layers if size == 2 and _LAYERS.fullmatch(name) else size
    return float(size) if isinstance(value, float) else size


def tiny_fields(config: PretrainedConfig, layers: int = 2, *, derived: bool = True) -> dict[str, Any]:
    """Constructor arguments that make a config of this one's class tiny.

    Args:
        config: with its defaults.
        layers: of each stack.
        derived: also pass on the fields that need no change; without, the class derives them from the others.
    """
    given = config.to_dict()
    default_layers = next((v for k, v in given.items() if _LAYERS.fullmatch(k) and isinstance(v, int)), None)
    latent = "kv_lora_rank" in given  # latent attention expands one latent to all heads
    fields: dict[str, Any] = {}
    special = VOCAB
    for name, value in given.items():
        if name in ("model_type", "transformers_version", "architectures", "_name_or_path", "dtype"):
            continue
        sub = _member(config, name)
        if isinstance(sub, PretrainedConfig):
            fields[name] = tiny_fields(sub, layers, derived=derived) | {"model_type": sub.model_type}
        elif re.fullmatch(r".*_token_(id|index)|pad_idx", name) and isinstance(value, int | list):
            special -= 1
            fields[name] = value if isinstance(value, int) and value < 4 else special
        elif name in _ALWAYS and not isinstance(value, list):
            fields[name] = 4 if latent and name == "num_key_value_heads" else _ALWAYS[name]
        elif isinstance(value, list) and default_layers and len(value) == default_layers:
            if derived or name == "layer_types":
                fields[name] = _tiny_list(name, value, layers, default_layers)
        else:
            number = _number(name, value, layers)
            if number is not ... or derived:
                fields[name] = value if number is ... else number
    return fields


def _changed(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Fields with some of them changed, those of configs inside too; "derived" ones are left to the class."""
    fields = dict(fields)
    for name, value in changes.items():
        old = fields.get(name)
        fields[name] = _changed(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return {name: value for name, value in fields.items() if value != "derived"}


def _configs(family: Family) -> Iterator[PretrainedConfig]:
    """Small configs of the family, the one with the most default fields first."""
    if family.kind == "encoder-decoder" and family.name in _TOYS:
        yield seq2seq_toys.config_of(_TOYS[family.name])
        return
    kind = CONFIG_MAPPING[family.name]
    changes = dict(OVERRIDES.get(family.name, {}))
    layers, part, bare = changes.get("_layers", 2), changes.get("_part"), changes.get("_bare", False)
    changes = {name: value for name, value in changes.items() if not name.startswith("_")}
    failed = None
    for derived in (True, False):
        fields = _changed({} if bare else tiny_fields(kind(), layers, derived=derived), changes)
        try:
            config = kind(**fields)
        except Exception as error:
            failed = error
            continue
        if part is not None:
            config = getattr(config, part)
        yield config
        text = None if part is not None else config.get_text_config()
        if text is not None and text is not config:  # the class may be the text model's alone
            yield text
        failed = None
    if failed is not None:
        raise failed


@contextmanager
def wide() -> Iterator[None]:
    """In the block models have as many channels a head as torch turns at a time."""
    sizes = [(pattern, _WIDE.get(size, size)) for pattern, size in _SIZES]
    with mock.patch.dict(_ALWAYS, head_dim=32), mock.patch(f"{__name__}._SIZES", sizes):
        yield


def build(family: Family, seed: int = 0, attention: str | None = None) -> Any:
    """A tiny random model of the family that can run a pass; nothing ends its texts.

    Raises:
        Exception: whatever transformers raised for the last small config that was tried.
    """
    kind = getattr(transformers, family.architecture)
    failed: Exception = RuntimeError("no config")
    configs = _configs(family)
    while True:
        try:
            config = next(configs)
        except StopIteration:
            raise failed from None
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                make = getattr(kind, "_from_config", None) or kind
                with _without(OVERRIDES.get(family.name, {}).get("_without", ())):
                    model = make(config, **({} if attention is None else {"attn_implementation": attention})).eval()
                _settle(family, model)
                inputs_for(family, model)
            except Exception as error:
                failed = error
                continue
        return model


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """While a model is built, its parts with configs of these classes are left out."""
    make = transformers.AutoModel.from_config

    def made(config: PretrainedConfig, **settings: Any) -> nn.Module:
        return nn.Identity() if type(config).__name__ in names else make(config, **settings)

    with mock.patch.object(transformers.AutoModel, "from_config", made):
        yield


def _settle(family: Family, model: Any) -> None:
    """Nothing ends its texts."""
    seq2seq = model.config.is_encoder_decoder
    start = {"decoder_start_token_id": seq2seq_toys.START} if seq2seq else {}
    settings = {"pad_token_id": 1 if seq2seq else 0} | start | OVERRIDES.get(family.name, {}).get("_generation", {})
    model.generation_config = transformers.GenerationConfig(**settings)


def inputs_for(family: Family, model: Any) -> Inputs:
    """What the model reads: texts; or noise, of whatever shape it takes.

    Raises:
        Exception: whatever transformers raised for the last kind of input.
    """
    failed: Exception = RuntimeError("no input")
    for inputs in _inputs(family, model):
        try:
            with torch.random.fork_rng():
                run(model, inputs(1), max_new_tokens=2, do_sample=False)
        except Exception as error:
            failed = error
            continue
        return inputs
    raise failed


def _inputs(family: Family, model: Any) -> Iterator[Inputs]:
    config, name = model.config, model.main_input_name

    def noise(shapes: dict[str, Sequence[int]], texts: Inputs = lambda batch: {}) -> Inputs:
        generator = torch.Generator().manual_seed(7)

        def inputs(batch: int) -> dict[str, Tensor]:
            generator.manual_seed(7)
            made = {key: torch.randn((batch, *shape), generator=generator) for key, shape in shapes.items()}
            return texts(batch) | {key: value.to(model.dtype) for key, value in made.items()}

        return inputs

    known = OVERRIDES.get(family.name, {})
    if "_rows" in known:
        yield lambda batch: _in_rows(batch, known["_rows"])
        return
    if "_noise" in known:
        yield noise(known["_noise"]) if config.is_encoder_decoder else noise(known["_noise"], prompts)
        return
    if not config.is_encoder_decoder or name == "input_ids":
        yield _texts if config.is_encoder_decoder else prompts
        return
    widths = (_field(config, name) for name in ("num_mel_bins", "feature_size", "feature_projection_input_dim"))
    bins = {8, *(int(width) for width in widths if width)}
    for mel in sorted(bins, reverse=True):
        yield noise({name: (mel, 20)})
        yield noise({name: (20, mel)})
    yield noise({name: (2000,)})


def _field(config: Any, name: str) -> Any:
    for part in (config, getattr(config, "encoder_config", None), getattr(config, "audio_config", None)):
        if isinstance(getattr(part, name, None), int):
            return getattr(part, name)
    return None


def _in_rows(batch: int, rows: int) -> dict[str, Tensor]:
    """Texts of several rows each, one for each codebook, under one mask."""
    ids = prompts(batch * rows, ragged=False)["input_ids"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids[::rows])}


def _texts(batch: int, length: int = 9) -> dict[str, Tensor]:
    """Random texts for an encoder; the later rows are shorter, padded on the right."""
    ids = torch.randint(4, 48, (batch, length), generator=torch.Generator().manual_seed(2000))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, length - 2 * row :], ids[row, length - 2 * row :] = 0, 1
    return {"input_ids": ids, "attention_mask": mask}
