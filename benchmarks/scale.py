"""Where several ranks pay: lookahead parallelism, tensor parallelism, and both, for models that nobody loads here.

    python -m benchmarks.scale --out build/bench/scale.json

Measured on this machine: passes over one decoder layer and one output layer of each size, whole and sharded, at each
width; messages between gloo ranks; and on the bundled model what trees of each size bring, and how evenly they split.
Computed from these: the speed of R ranks, each as fast as this machine alone, against plain decoding on one of them.
Every way takes the tree size that is best for it. ``--link`` adds rows for another link than the measured one.
"""

import statistics
import tempfile
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaModel

import lookahead
from benchmarks import options
from benchmarks.harness import Run, load, quiet_console, texts_of, timed, watched
from jacobi import TokenTree
from lookahead.models.names import CACHE
from lookahead.parallel.split import split

# hidden size, layers, heads, KV heads, intermediate size, vocabulary: as Llama 3 has them
SHAPES = {"1B": (2048, 16, 32, 8, 8192, 128256), "8B": (4096, 32, 32, 8, 14336, 128256)}
SHAPES["70B"] = (8192, 80, 64, 8, 28672, 128256)
SHARDS, WIDTHS, NODES = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64, 128), (2, 4, 8, 16, 32, 64, 128)
RANKS = (2, 4, 8, 16, 32, 64)
_HISTORY = 512  # tokens in the KV cache
_CACHES = 1 << 29  # bytes of weights that a measured pass reads at least: more than caches hold
_SIZES = (1 << 10, 1 << 16, 1 << 20)  # bytes of measured messages

Curve = dict[int, float]  # seconds by width


def layer_curve(shape: tuple[int, ...], shards: int) -> tuple[Curve, Curve]:
    """Seconds of one decoder layer and of the output layer, a part of each on one rank."""
    hidden, _, heads, kv_heads, inner, vocab = shape
    sizes = {"num_attention_heads": heads // shards, "num_key_value_heads": kv_heads // shards}
    sizes |= {"hidden_size": hidden, "head_dim": hidden // heads, "intermediate_size": inner // shards}
    one = 2 * hidden * (3 * inner + hidden // heads * 2 * (heads + kv_heads)) // shards
    copies = max(1, -(-_CACHES // one))
    config = LlamaConfig(**sizes, num_hidden_layers=copies, vocab_size=32, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaModel(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    for weight in model.parameters():
        weight.data.fill_(0.01)
    model.rotary_emb = type(model.rotary_emb)(config)
    cache, layers, heads_of = DynamicCache(config=config), {}, {}
    output = [nn.Linear(hidden, vocab // shards, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    model(input_ids=torch.ones(1, _HISTORY, dtype=torch.long), use_cache=True, **{CACHE: cache})
    for width in WIDTHS:
        ids, states = torch.ones(1, width, dtype=torch.long), torch.ones(1, width, hidden, dtype=torch.bfloat16)

        def layer_pass(ids: torch.Tensor = ids) -> None:
            model(input_ids=ids, use_cache=True, **{CACHE: cache})
            cache.crop(_HISTORY - int(cache.get_seq_length()))

        def output_pass(states: torch.Tensor = states) -> None:
            for each in output:
                each(states)

        layers[width] = _median(layer_pass) / copies
        heads_of[width] = _median(output_pass) / len(output)
    return layers, heads_of


def _median(work: Any, repeats: int = 5) -> float:
    work()
    return statistics.median(timed("cpu", work)[1] for _ in range(repeats))


def _rank(rank: int, ranks: int, file: str, told: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    found = []
    for size in _SIZES:
        message = torch.zeros(size // 8, dtype=torch.int64)
        times = [timed("cpu", lambda message=message: dist.all_reduce(message))[1] for _ in range(60)]
        found.append(statistics.median(times[10:]))
    if rank == 0:
        told.put(found)
    dist.barrier()
    dist.destroy_process_group()


def links(ranks: int) -> list[float]:
    """Seconds of an all-reduce among gloo ranks of this machine, by size."""
    context = torch.multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, f"{folder}/ranks", told), nprocs=ranks)
    return list(told.get())


def hop_and_byte(measured: dict[int, list[float]]) -> tuple[float, float]:
    """The two costs of a ring: seconds a hop, and seconds a byte that passes one link. R ranks take 2 (R - 1) hops, and
    2 (R - 1) / R of the message passes each link. Least squares over the relative errors."""
    rows = [
        (2 * (r - 1), 2 * (r - 1) / r * size, time)
        for r, times in measured.items()
        for size, time in zip(_SIZES, times, strict=True)
    ]
    table = np.array([[hops / time, passed / time] for hops, passed, time in rows])
    hop, byte = np.linalg.lstsq(table, np.ones(len(rows)), rcond=None)[0]
    return max(float(hop), 0.0), max(float(byte), 0.0)


def trees(model: Any, tokenizer: Any, prompts: int, mode: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For each tree size: S, and the nodes of the largest part, means over passes, by ranks."""
    for nodes in NODES:
        passes: list[Any] = []
        settings = {"lookahead_strategy": lookahead.Lookahead(nodes=nodes, seed=0, remember=False)}
        settings |= {"max_new_tokens": 96, "return_dict_in_generate": True} | mode
        stats = lookahead.DecodingStats()
        with lookahead.watching(passes.append):
            for text in texts_of("code")[:prompts]:
                ids = torch.tensor([tokenizer(text)["input_ids"][:120]])
                torch.manual_seed(0)
                stats += model.generate(ids, attention_mask=torch.ones_like(ids), **settings).stats
        drawn = [TokenTree.from_parents(each.rows[0].tokens, each.rows[0].parents) for each in passes if each.index]
        parts = {r: statistics.mean(max(map(len, split(tree, r))) for tree in drawn) for r in (1, *RANKS)}
        yield {"nodes": nodes, "S": stats.mean_acceptance_length, "parts": parts}


class Simulation:
    """Seconds of passes and messages, put together."""

    def __init__(self, curves: Any, link: tuple[float, float], found: list[dict[str, Any]]) -> None:
        self._curves, self._link, self._found = curves, link, found

    def message(self, ranks: int, size: float) -> float:
        hop, byte = self._link
        return 2 * (ranks - 1) * (hop + byte * size / ranks) if ranks > 1 else 0.0

    def forward(self, name: str, shards: int, width: float) -> float:
        """A pass over ``width`` nodes on ``shards`` ranks: two all-reduces a layer, and one of the logits' shards."""
        hidden, layers, *_, vocab = SHAPES[name]
        layer, output = (
            float(np.interp(width, list(curve), list(curve.values()))) for curve in self._curves[name, shards]
        )
        reduced = 2 * layers * self.message(shards, 2 * hidden * width) + self.message(shards, 2 * vocab * width) / 2
        return layers * layer + output + reduced

    def best(self, name: str, shards: int, replicas: int) -> dict[str, Any]:
        """The tree size at which ``shards`` x ``replicas`` ranks write fastest, and their speed against plain."""
        plain, found = self.forward(name, 1, 1), []
        for tree in self._found:
            size = 8 * tree["nodes"] * 4  # tokens and parents, choices and best next tokens: 64-bit numbers
            again = (tree["S"] - 1) * (replicas - 1) / replicas  # accepted nodes that a rank has not scored itself
            width = tree["parts"][replicas] + again
            took = self.forward(name, shards, width) + 2 * self.message(replicas, size)
            if shards > 1:
                took += self.message(shards, size)
            speed = tree["S"] * plain / took
            found.append({"speed": round(speed, 3), "shards": shards, "nodes": tree["nodes"], "width": round(width, 1)})
        return max(found, key=lambda each: each["speed"])


def main(
    prompts: options.Prompts = 8,
    link: Annotated[str, typer.Option(help="Another link, by microseconds a hop and GB a second: 5,100.")] = "",
    threads: options.Threads = None,
    out: options.Out = None,
) -> None:
    """Measure passes, messages and trees here, and compute what ranks would bring."""
    console = quiet_console(threads)
    model, tokenizer = load(None, "float32")
    lookahead.augment_all()
    run = Run("scale", out, ranks=RANKS, trees=[], curves=[], links=[], rows=[])
    found: dict[str, list[dict[str, Any]]] = {}
    for mode in ("greedy", "t0.8"):
        found[mode] = list(trees(model, tokenizer, prompts, options.MODES[mode]))
        run.add("trees", [{"mode": mode, **each} for each in found[mode]])
    with torch.inference_mode():
        curves = {}
        for name, shards in watched(console, "Measuring layers", [(n, s) for n in SHAPES for s in SHARDS]):
            curves[name, shards] = layer_curve(SHAPES[name], shards)
            run.add(
                "curves",
                [
                    {
                        "size": name,
                        "shards": shards,
                        "layer_s": curves[name, shards][0],
                        "output_s": curves[name, shards][1],
                    }
                ],
            )
    measured = {ranks: links(ranks) for ranks in (2, 4)}
    costs = {"gloo": hop_and_byte(measured)}
    if link:
        hop, speed = map(float, link.split(","))
        costs[link] = hop * 1e-6, 1 / (speed * 1e9)
    run.add("links", [{"all_reduce_s": measured, "bytes": _SIZES, "hop_s_and_byte_s": costs}])
    for kind, mode, name in [(kind, mode, name) for kind in costs for mode in found for name in SHAPES]:
        made = Simulation(curves, costs[kind], found[mode])
        for ranks in (1, *RANKS):
            row = {"link": kind, "mode": mode, "size": name, "ranks": ranks, "lookahead": made.best(name, 1, ranks)}
            if ranks in SHARDS[1:]:
                row["tensor"] = made.best(name, ranks, 1)
            both = [made.best(name, shards, ranks // shards) for shards in SHARDS[1:] if shards < ranks]
            if both:
                row["both"] = max(both, key=lambda each: each["speed"])
            run.add("rows", [row])
            console.print(row)
    run.finish()


if __name__ == "__main__":
    typer.run(main)
