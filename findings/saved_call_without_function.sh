#!/usr/bin/env bash
# torch 2.13.0: a traced function that calls one of a `torch.jit.CompilationUnit` is saved without an error, but the file
# cannot be loaded: it calls the function, and does not hold it. A function of `torch.jit.script`, whose name begins with
# the package of saved code, is written along; one made from the same graph under such a name is, too.
#
# Seen
#       calls a function of a CompilationUnit: not loaded, undefined value twice
#       calls a function of torch.jit.script: loaded, [2.0, 4.0]
#       calls the first one's graph as __torch__.twice: loaded, [2.0, 4.0]
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cat > "$room/calls.py" <<'PYTHON'
import io

import torch


@torch.jit.script
def doubled(values: torch.Tensor) -> torch.Tensor:
    return values + values


unit = torch.jit.CompilationUnit("def twice(values: Tensor) -> Tensor:\n    return values + values\n")
named = torch._C.CompilationUnit().create_function("__torch__.twice", unit.twice.graph)
values = torch.tensor([1.0, 2.0])
for what, function in {
    "a function of a CompilationUnit": unit.twice,
    "a function of torch.jit.script": doubled,
    "the first one's graph as __torch__.twice": named,
}.items():
    traced = torch.jit.trace(lambda given, function=function: function(given), values)
    file = io.BytesIO(traced.save_to_buffer())
    try:
        print(f"calls {what}: loaded,", torch.jit.load(file)(values).tolist())
    except RuntimeError as error:
        print(f"calls {what}: not loaded,", str(error).strip().split(":")[0])
PYTHON
python3 -m venv "$room/venv"
"$room/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2> /dev/null
"$room/venv/bin/python" -W ignore "$room/calls.py" | tee "$room/seen"
diff "$room/seen" - <<'SEEN'
calls a function of a CompilationUnit: not loaded, undefined value twice
calls a function of torch.jit.script: loaded, [2.0, 4.0]
calls the first one's graph as __torch__.twice: loaded, [2.0, 4.0]
SEEN
