"""Several ranks: each has the whole model and scores a part of each tree, or (--shard) a part of the model.

    torchrun --nproc-per-node 2 examples/parallel.py [--shard] [--model DIR] [--prompt TEXT] [--temperature T]

Each rank makes the same call; rank 0 prints the text, and what it took.
"""

import argparse

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from jacobi import TokenTree
from lookahead import Lookahead, watching
from lookahead.bundled import BUNDLED
from lookahead.generation.watch import Pass
from lookahead.parallel.split import split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--shard", action="store_true", help="tensor parallelism in place of lookahead parallelism")
    parser.add_argument("--prompt", default="def read_json(path):\n")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, nargs=3, metavar=("W", "N", "G"), help="as published; default: automatic")
    asked = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if not on_gpu:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    if asked.shard:
        model = AutoModelForCausalLM.from_pretrained(asked.model, tp_plan="auto", dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(asked.model)
    else:
        model, tokenizer = lookahead.load_model(asked.model, device=f"cuda:{rank}" if on_gpu else "cpu")
    lookahead.augment_all()

    names = ("window_size", "ngram_size", "verification_set_size")
    sizes = {} if asked.window is None else dict(zip(names, asked.window, strict=True))
    strategy = Lookahead(parallel="lookahead" if ranks > 1 and not asked.shard else None, **sizes)
    sampling = (
        {"do_sample": False} if asked.temperature is None else {"do_sample": True, "temperature": asked.temperature}
    )
    inputs = tokenizer(asked.prompt, return_tensors="pt").to(model.device)
    passes: list[Pass] = []
    torch.manual_seed(asked.seed)
    with watching(passes.append):
        output = model.generate(
            **inputs,
            max_new_tokens=asked.new_tokens,
            lookahead_strategy=strategy,
            return_dict_in_generate=True,
            **sampling,
        )
    if rank == 0:
        print(tokenizer.decode(output.sequences[0]))
        trees = [TokenTree.from_parents(each.rows[0].tokens, each.rows[0].parents) for each in passes[1:]]
        nodes = sum(map(len, trees)) / len(trees)
        busiest = sum(max(map(len, split(tree, ranks))) for tree in trees) / len(trees)
        print(f"{ranks} ranks: S = {output.stats.mean_acceptance_length:.2f}, {nodes:.1f} nodes a pass,", end=" ")
        print(f"{nodes if asked.shard else busiest:.1f} of them on the busiest rank.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
