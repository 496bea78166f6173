"""What one rank of a test runs: cases from a JSON file, on a sharded model; its texts go into another file."""

import json
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import lookahead
from lookahead import Jacobi, Lookahead, LookaheadError

torch.set_num_threads(1)
warnings.simplefilter("ignore")

STRATEGIES: dict[str, Any] = {
    "automatic": lambda: Lookahead(),
    "seeded": lambda: Lookahead(seed=0),
    "nodes": lambda: Lookahead(nodes=7),
    "suffix": lambda: Lookahead(sources=("suffix",)),
    "published": lambda: Lookahead(window_size=5, ngram_size=4, verification_set_size=5),
    "jacobi": lambda: Jacobi(),
    "split": lambda: Lookahead(parallel="lookahead"),
    "split nodes": lambda: Lookahead(parallel="lookahead", nodes=7),
    "split wide": lambda: Lookahead(parallel="lookahead", nodes=15),
    "split published": lambda: Lookahead(
        parallel="lookahead", window_size=5, ngram_size=4, verification_set_size=5, seed=0
    ),
}


def prompts(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(case.get("prompt", 0))
    ids = torch.randint(1, 48, (case["batch"], 14), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, case["batch"]):
        ids[row, : 3 * row], mask[row, : 3 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


class Failing(torch.nn.Module):
    """A stopping rule that fails, or dies, once the text has so many tokens."""

    def __init__(self, length: int, dies: bool) -> None:
        super().__init__()
        self.length, self.dies = length, dies

    def forward(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("this rank's own trouble")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def run(model: Any, case: dict[str, Any], rank: int) -> Any:
    settings: dict[str, Any] = {"max_new_tokens": case.get("new", 40), "do_sample": case.get("sample", False)}
    settings |= {"pad_token_id": 0, "eos_token_id": case.get("eos")}
    inputs = prompts(case)
    if case.get("differs") and rank == 1:
        inputs["input_ids"][0, 0] = 40
    settings |= {"repetition_penalty": 1.2} if case.get("penalty") else {}
    if case.get("strategy"):
        settings["lookahead_strategy"] = STRATEGIES[case["strategy"]]()
    if case.get("fails") == rank or case.get("dies") == rank:
        settings["stopping_criteria"] = [Failing(14 + 12, case.get("dies") == rank)]
    elif "fails" in case or "dies" in case:
        settings["stopping_criteria"] = [Failing(1 << 30, False)]
    # Without a seed of their own, ranks draw alike only if lookahead sees to it.
    torch.manual_seed(case.get("seed", 0) + (rank if case.get("apart") else 0))
    try:
        output = model.generate(**inputs, return_dict_in_generate=True, **settings)
        return [output.stats.steps, output.stats.drafted] if case.get("counts") else output.sequences.tolist()
    except (LookaheadError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def main(folder: str) -> None:
    cases = json.loads((Path(folder) / "cases.json").read_text())
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    plan = None if any("split" in case.get("strategy", "") for case in cases) else "auto"
    model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", tp_plan=plan, dtype=torch.float64)
    lookahead.augment_all()
    found = []
    for case in cases:
        found.append(run(model, case, rank))
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
