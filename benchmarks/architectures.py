"""What idle drafts cost on other architectures: random weights, texts in which nothing can be gained.

    python -m benchmarks.architectures --threads 2 --out build/bench/architectures.json

Models of six layers of 256 channels (encoder-decoders: four and four) with weights drawn at random write from prompts
of random tokens at temperature 1.5, where no draft is right. So a speedup is that of passes, and what is below 1x is
what drafts cost that are looked for in vain. Greedy texts are compared, too, but random weights soon repeat themselves,
so their speed says little.
"""

from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import lookahead
from benchmarks import options
from benchmarks.contenders import WARM, methods, unit_of
from benchmarks.contest import contest, row
from benchmarks.harness import Run, quiet_console, random_prompt, watched
from benchmarks.options import MODES, chosen
from benchmarks.tables import show

_SIZES = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"intermediate_size": 768, "vocab_size": 8192, "max_position_embeddings": 2048, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen3": _SIZES | {"head_dim": 64},
    "gpt2": {"n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 8192},
    "gpt_neox": _SIZES,
    "opt": {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 768, "num_hidden_layers": 6}
    | {"num_attention_heads": 4, "vocab_size": 8192},
    "mistral": _SIZES | {"sliding_window": 32},
    "gemma3_text": _SIZES | {"head_dim": 64, "sliding_window": 64},
    "gpt_oss": _SIZES | {"head_dim": 64, "num_local_experts": 4, "sliding_window": 32},
    "mixtral": _SIZES | {"num_local_experts": 4},
    "deepseek_v3": _SIZES
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    | {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    | {"moe_intermediate_size": 128, "first_k_dense_replace": 1},
    "bloom": {"hidden_size": 256, "n_layer": 6, "n_head": 4, "vocab_size": 8192},
    "lfm2": _SIZES | {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "qwen3_next": _SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    | {"head_dim": 64, "shared_expert_intermediate_size": 128, "linear_num_key_heads": 4}
    | {"linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "falcon_h1": _SIZES | {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_state": 32, "mamba_d_head": 32},
    "t5": {"d_model": 256, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 4, "d_kv": 64, "d_ff": 768}
    | {"vocab_size": 8192},
    "bart": {"d_model": 256, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4, "vocab_size": 8192}
    | {"decoder_attention_heads": 4, "encoder_ffn_dim": 768, "decoder_ffn_dim": 768},
}


def random_of(family: str, seed: int = 0) -> Any:
    """A model of a family with random weights, large enough for its greedy text not to be one token over and over."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data *= 1.5 if parameter.ndim > 1 else 1.0
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    settings.pad_token_id, settings.decoder_start_token_id = 0, 2 if config.is_encoder_decoder else None
    return model


def main(
    families: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(FAMILIES)}.")] = "all",
    prompts: options.Prompts = 4,
    modes: options.Modes = "t1.5,greedy",
    new_tokens: options.NewTokens = 96,
    rounds: options.Rounds = 5,
    threads: options.Threads = None,
    out: options.Out = None,
) -> None:
    """Measure every family."""
    console = quiet_console(threads)
    names, wanted = chosen(families, FAMILIES, "family"), chosen(modes, MODES, "mode")
    contenders, _ = methods(["auto"], "cpu")
    run = Run("architectures", out, device="cpu", new_tokens=new_tokens, rounds=rounds, rows=[])
    lookahead.augment_all()
    for name in names:
        model = random_of(name)
        vocab = model.config.get_text_config().vocab_size
        drawn = ([max(3, token) for token in random_prompt(index, vocab)] for index in range(prompts + WARM))
        given = [unit_of(index, [tokens], "cpu") for index, tokens in enumerate(drawn)]
        route, _ = lookahead.support.route.verdict(model)
        for mode in wanted:
            turns = rounds if MODES[mode]["do_sample"] else 1
            watch = partial(watched, console, f"{name}, {mode}")
            texts = given[WARM:], given[:WARM]
            results = contest(model, contenders, texts, MODES[mode], new_tokens, turns, watch=watch)
            found, plain = (row(results, method, new_tokens) for method in ("auto", "plain"))
            plain_ms = 1e3 / plain["tokens_per_s_median"]
            run.add("rows", [{"family": name, "mode": mode, "route": route, **found, "plain_token_ms": plain_ms}])
        del model
    show(console, "other architectures", "family, mode, speedup, 95%, S, texts that differ", run.document["rows"])
    run.finish()


if __name__ == "__main__":
    typer.run(main)
