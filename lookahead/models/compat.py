"""Undocumented parts of transformers and torch that the library uses: one table, checked once. A change in one
of these would show as an odd failure in the middle of a call, or not at all. Only ``models``, ``runtime``,
``generation.transformers_loop`` and ``patch`` use private names; other rooms call the functions below."""

import copy
import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from jacobi import LookaheadError
from lookahead.models.names import CACHE

OLDEST, TOO_NEW = (5, 20), (5, 25)  # of transformers; as setup.py has them
_RANGE = "a version from {}.{} up, below {}.{}".format(*OLDEST, *TOO_NEW)
SUPPORTED = {"transformers": _RANGE, "torch": "a version from 2.8 up"}
# What a model may raise in a pass that it was not made for.
MODEL_ERRORS = (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True, slots=True)
class Private:
    home: str  # its module
    path: str  # name in it, with dots; the last part may be an annotation of a class
    passed: str = ""  # parameters that are given by position, in this order, after self, with spaces between them
    named: str = ""  # parameters that are given by name
    sets: tuple[str, ...] = ()  # attributes that the function sets on objects, and that are read there
    lost: str | None = None  # what does not work without it; None = nothing does, and a version without it is refused


_MASKS, _CACHE = "transformers.masking_utils", "transformers.cache_utils"
_MODELS, _CONFIG = "transformers.modeling_utils", "transformers.configuration_utils"
_GENERATE, _MODULE, TRAINER = "transformers.generation.utils", "torch.nn.modules.module", "transformers.trainer"
_LLAMA = "transformers.models.llama.modeling_llama"
_KEYS = "key_states value_states"
_REPLAYED = "linear drafts replay what was accepted"
_TRACES = "passes are not traced"
_FUSED = "traced passes consist of more operations"
# Of a trace's graph: what is done before others stand for its operations, and after that.
SHAPELESS = ("erase_shape_information", "constant_pooling")
CLEANED = ("constant_propagation", "cse", "peephole", "dce", "constant_pooling")
REPLACED = "_jit_pass_custom_pattern_based_rewrite_graph"
_PACKED = "weights are not packed"
_UNDONE = "a capture that fails leaves the allocator of CUDA memory as if it went on"
_TRAINED = "Medusa's heads cannot be trained"
_NO_MTP = "MTP layers are not read"
_WATCHED = "nobody notices modes that watch every operation"
_MASKED = f"config inputs_embeds attention_mask {CACHE} position_ids"
_OF_MODULES = ("parameters", "buffers", "modules", "forward_hooks", "forward_pre_hooks", "call_impl")


def _mixin(name: str, *uses: Any, **others: Any) -> Private:
    return Private(_GENERATE, f"GenerationMixin.{name}", *uses, **others)


PRIVATES = (
    # The call of generate: what is patched, what prepares a step, and what it leaves on configs and caches.
    _mixin("_sample", "input_ids logits_processor stopping_criteria generation_config", "synced_gpus streamer"),
    _mixin("_assisted_decoding", "input_ids logits_processor stopping_criteria generation_config", "inputs_tensor"),
    _mixin("_validate_generation_mode", "generation_mode generation_config generation_mode_kwargs"),
    _mixin("_extract_generation_mode_kwargs", "custom_generate kwargs"),
    _mixin("_prefill", "input_ids generation_config model_kwargs"),
    _mixin("_update_model_kwargs_for_generation", "outputs model_kwargs", "is_encoder_decoder num_new_tokens"),
    _mixin("prepare_inputs_for_generation", "input_ids", f"next_sequence_length {CACHE} attention_mask"),
    _mixin("_prepare_position_ids_for_generation"),
    _mixin("_prepare_cache_for_generation", sets=("_is_user_defined",)),
    _mixin("_prepare_special_tokens", sets=("_pad_token_tensor",)),
    _mixin("_supports_logits_to_keep"),
    Private("transformers.integrations.moe", "ExpertsInterface._global_mapping"),
    Private(_GENERATE, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL"),
    # The name of the KV cache, in what passes are given and in what they give.
    Private(_LLAMA, "LlamaForCausalLM.forward", named=f"attention_mask position_ids {CACHE} use_cache logits_to_keep"),
    Private("transformers.modeling_outputs", f"CausalLMOutputWithPast.{CACHE}"),
    Private("transformers.modeling_outputs", f"Seq2SeqLMOutput.{CACHE}"),
    Private(_GENERATE, f"GenerateDecoderOnlyOutput.{CACHE}"),
    Private(_GENERATE, f"GenerateEncoderDecoderOutput.{CACHE}"),
    # Masks, attention and models.
    Private(_MASKS, "create_masks_for_generate", named=_MASKED),
    Private(_MASKS, "AttentionMaskInterface._global_mapping"),
    Private(_MODELS, "AttentionInterface._global_mapping"),
    Private(_CONFIG, "PreTrainedConfig._attn_implementation", sets=("_attn_implementation_internal",)),
    Private(_MODELS, "PreTrainedModel._is_stateful"),
    Private(_MODELS, "PreTrainedModel._supports_sdpa"),
    Private(_MODELS, "PreTrainedModel.from_pretrained", named="config ignore_mismatched_sizes", lost=_NO_MTP),
    Private(_CONFIG, "PreTrainedConfig._experts_implementation", lost="MTP layers choose their experts' kernel"),
    Private(_MODELS, "PreTrainedModel._device_mesh", lost="sharded models are not refused"),
    Private("accelerate.hooks", "add_hook_to_module", sets=("_hf_hook",), lost="offloaded models run on the CPU"),
    # Caches.
    Private(_CACHE, "DynamicLayer.update", _KEYS),
    Private(_CACHE, "DynamicLayer.lazy_initialization", _KEYS),
    Private(_CACHE, "DynamicLayer.get_mask_sizes", "query_length"),
    Private(_CACHE, "DynamicLayer.get_seq_length"),
    Private(_CACHE, "DynamicSlidingWindowLayer.update", _KEYS),
    Private(_CACHE, "StaticLayer.update", _KEYS),
    Private(_CACHE, "Cache.update", f"{_KEYS} layer_idx"),
    Private(_CACHE, "Cache.get_mask_sizes", "query_length layer_idx"),
    Private(_CACHE, "Cache.crop", "tokens_to_remove"),
    Private(_CACHE, "Cache.activate_past_recording"),
    Private(_CACHE, "Cache.is_croppable", lost=_REPLAYED),
    Private(_CACHE, "DynamicSlidingWindowLayer.activate_past_recording", sets=("record_past",), lost=_REPLAYED),
    # torch: what modules hold, who watches them, and how a pass is traced.
    *(Private(_MODULE, f"Module._{name}") for name in (*_OF_MODULES, "compiled_call_impl")),
    *(Private(_MODULE, f"_global_forward_{name}") for name in ("hooks", "pre_hooks")),
    Private("torch._C", "_len_torch_function_stack", lost=_WATCHED),
    Private("torch._C", "_len_torch_dispatch_stack", lost=_WATCHED),
    Private("torch._C", "_create_graph_by_tracing", lost=_TRACES),
    Private("torch._C", "CompilationUnit.create_function", lost=_TRACES),
    Private("torch._C", REPLACED, lost=_FUSED),
    *(Private("torch._C", f"_jit_pass_{name}", lost=_FUSED) for name in (SHAPELESS[0], *CLEANED)),
    Private("torch.utils._python_dispatch", "TorchDispatchMode", lost=_TRACES),
    Private("torch._C", "_cuda_endAllocateToPool", lost=_UNDONE),
    Private("torch._C", "_cuda_releasePool", lost=_UNDONE),
    Private("torch", "Tensor._version"),
    Private("torch", "ops.mkldnn._linear_pointwise", lost=_PACKED),
    Private("torch", "ops.mkldnn._reorder_linear_weight", lost=_PACKED),
    # The trainer: what a checkpoint holds, and on how many GPUs one process trains.
    Private(TRAINER, "Trainer._save", "output_dir state_dict", lost=_TRAINED),
    Private(TRAINER, "Trainer._load_from_checkpoint", "resume_from_checkpoint model", lost=_TRAINED),
    Private("transformers.training_args", "TrainingArguments.n_gpu", lost=_TRAINED),
)


def check_privates() -> None:
    """Raise a LookaheadError that names a transformers too new to be known, or what it or torch lacks or changed."""
    version = transformers.__version__
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= TOO_NEW:
        raise LookaheadError(
            f"transformers {version} is newer than this version of lookahead knows: expected {_RANGE}. Install one "
            f"(pip install 'transformers<{TOO_NEW[0]}.{TOO_NEW[1]}'), or a newer lookahead."
        )
    for private in PRIVATES:
        error = None if private.lost is not None else private_error(private)
        if error is not None:
            library = private.home.partition(".")[0]
            version = importlib.import_module(library).__version__
            raise LookaheadError(
                f"This {library} ({version}) has {error}: expected {SUPPORTED[library]}. Install one, or "
                "decode without use_lookahead."
            )


def private_error(private: Private) -> str | None:
    """Error of one of them; None = it is as expected."""
    try:
        found: Any = importlib.import_module(private.home)
    except ImportError:
        return f"no {private.home}"
    for part in private.path.split("."):
        annotated = [vars(kind).get("__annotations__", {}) for kind in getattr(found, "__mro__", ())]
        if not hasattr(found, part):
            return None if any(part in names for names in annotated) else f"no {private.path}"
        found = getattr(found, part)
    code = getattr(inspect.unwrap(getattr(found, "fset", found)), "__code__", None)
    unset = [name for name in private.sets if code is None or name not in code.co_names]
    if unset:
        return f"another {private.path}, which does not set {', '.join(unset)}"
    passed, named = private.passed.split(), private.named.split()
    if not (passed or named):
        return None
    signature = inspect.signature(found)
    parameters = [name for name in signature.parameters if name not in ("self", "cls")]
    missing = [name for name in named if name not in parameters]
    if missing or parameters[: len(passed)] != passed:
        wanted = ", ".join((*passed, *(f"{name}=" for name in named)))
        return f"another {private.path}, whose parameters are ({', '.join(parameters)}), where ({wanted}) are passed"
    return None


def handing_on(model: PreTrainedModel, tokenizer: Any) -> PreTrainedModel:
    """A twin of ``model`` on the same weights whose ``generate`` hands a tokenizer on to a ``custom_generate``, too:
    transformers, which needs it for stop strings and token healing, takes it away there."""
    twin, extract = copy.copy(model), model._extract_generation_mode_kwargs
    twin._extract_generation_mode_kwargs = lambda *given, **named: extract(*given, **named) | {"tokenizer": tokenizer}
    return twin


def is_users_cache(cache: Any) -> bool:
    """True if ``generate`` was given a cache, and has not made it."""
    return bool(getattr(cache, "_is_user_defined", False))


def expert_registries() -> list[dict[str, Any]]:
    """Where transformers keeps kernels of experts by name, ``grouped_mm`` and ``batched_mm``."""
    kinds = (ExpertsInterface, *ExpertsInterface.__subclasses__())
    return [vars(kind)["_global_mapping"] for kind in kinds if "_global_mapping" in vars(kind)]


def last_logits(model: PreTrainedModel, count: int) -> dict[str, int]:
    """The argument by which ``forward`` makes logits of the last ``count`` tokens only; empty where it takes none."""
    return {"logits_to_keep": count} if model._supports_logits_to_keep() else {}


def pad_token(config: GenerationConfig) -> int:
    """The token that fills finished sequences, of a config that ``generate`` has prepared; 0 if there is none."""
    token = config._pad_token_tensor
    return 0 if token is None else int(token)
