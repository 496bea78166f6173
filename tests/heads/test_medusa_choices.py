"""Trees of choices in all their forms, and their buffers against a slow reference with the published conventions."""

import itertools
import json
import pathlib
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from helpers.refusals import refuses
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import TokenTree
from lookahead.heads.medusa.choices import MAX_NODES, presets, read_tree
from lookahead.medusa import ChoiceTree, buffers, choices_from

GOLDEN = [[0], [0, 0], [0, 1], [0, 2], [1], [1, 0], [1, 1], [1, 2]]


paths = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12, unique=True)


def closure(given: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Every path of small ranks that begins one of the given ones, tried one by one."""
    depth, ranks = max(map(len, given)), 1 + max(map(max, given))
    every = [path for length in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=length)]
    return [path for path in every if any(tuple(other[: len(path)]) == path for other in given)]


def slow_buffers(given: Sequence[Sequence[int]], topk: int) -> dict[str, list]:
    """The published buffers from their definition: one entry after the other, each by looking at all paths."""
    nodes = [(), *closure(given)]
    depth = max(map(len, nodes))
    leaves = [node for node in nodes if not any(other != node and other[: len(node)] == node for other in nodes)]
    return {
        "tree_indices": [0 if not node else 1 + (len(node) - 1) * topk + node[-1] for node in nodes],
        "medusa_position_ids": [len(node) for node in nodes],
        "retrieve_indices": [
            [nodes.index(leaf[:length]) if length <= len(leaf) else -1 for length in range(depth + 1)]
            for leaf in reversed(leaves)
        ],
        "medusa_attn_mask": [[[[float(a[: len(b)] == b) for b in nodes] for a in nodes]]],
    }


def as_lists(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def document(**changes: object) -> dict[str, object]:
    """The content of a calibrated tree's file."""
    return {"format": 1, "kind": "lookahead-medusa-tree", "paths": GOLDEN, "accuracies": [[0.5]]} | changes


def test_buffers_of_the_published_example() -> None:
    made = buffers(GOLDEN, topk=10)
    assert made["tree_indices"].tolist() == [0, 1, 2, 11, 12, 13, 11, 12, 13]
    assert made["medusa_position_ids"].tolist() == [0, 1, 1, 2, 2, 2, 2, 2, 2]
    assert made["retrieve_indices"].tolist() == [[0, 2, 8], [0, 2, 7], [0, 2, 6], [0, 1, 5], [0, 1, 4], [0, 1, 3]]
    rows = [
        "T........",
        "TT.......",
        "T.T......",
        "TT.T.....",
        "TT..T....",
        "TT...T...",
        "T.T...T..",
        "T.T....T.",
        "T.T.....T",
    ]
    assert made["medusa_attn_mask"][0, 0].tolist() == [[float(mark == "T") for mark in row] for row in rows]
    # With the candidates 1 | 2 3 | 4 5 6 in a table of three a head, the nodes hold 1 2 3 4 5 6 4 5 6.
    table = torch.tensor([1, 2, 3, 0, 4, 5, 6])
    assert table[buffers(GOLDEN, topk=3)["tree_indices"]].tolist() == [1, 2, 3, 4, 5, 6, 4, 5, 6]


def test_buffers_have_the_published_shapes_and_types() -> None:
    assert choices_from("mc_sim_7b_63").widths == (10, 28, 23, 2)
    assert choices_from("vicuna_33b_stage1").depth == 3
    made = buffers("mc_sim_7b_63")
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()} == {
        "tree_indices": ((64,), torch.int64),
        "medusa_position_ids": ((64,), torch.int64),
        "retrieve_indices": ((42, 5), torch.int64),
        "medusa_attn_mask": ((1, 1, 64, 64), torch.float32),
    }


@pytest.mark.parametrize("name", presets())
def test_buffers_of_the_presets(name: str) -> None:
    tree = choices_from(name)
    assert len(tree.paths) == 63
    assert list(tree.paths) == closure(tree.paths)
    assert as_lists(buffers(name)) == slow_buffers(tree.paths, 10)


@given(paths, st.integers(5, 7))
@examples(60)
def test_buffers_equal_the_slow_reference(given_paths: list[tuple[int, ...]], topk: int) -> None:
    assert as_lists(buffers(given_paths, topk)) == slow_buffers(given_paths, topk)


@given(paths, st.randoms(use_true_random=False))
@examples(60)
def test_prefixes_are_added_whatever_the_order(given_paths: list[tuple[int, ...]], random: object) -> None:
    tree = choices_from(given_paths)
    assert list(tree.paths) == closure(given_paths)
    random.shuffle(given_paths)  # type: ignore[attr-defined]
    assert choices_from([list(path) for path in given_paths]) == tree
    assert choices_from(tree.paths) == tree
    leaves = [path for path in tree.paths if not any(other[:-1] == path for other in tree.paths)]
    assert choices_from(leaves) == tree


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
@examples(30)
def test_counts_are_all_combinations(counts: list[int]) -> None:
    tree = choices_from(counts)
    every = [path for depth in range(1, len(counts) + 1) for path in itertools.product(*map(range, counts[:depth]))]
    assert list(tree.paths) == every
    assert tree.candidates == tuple(counts)


def test_a_dense_tree() -> None:
    assert choices_from([10, 7, 3]).widths == (10, 70, 210)
    assert choices_from((2, 1)) == choices_from([[0, 0], [1, 0]])
    assert choices_from(torch.tensor([2, 1])) == choices_from([2, 1])
    assert choices_from(torch.tensor([[0, 0], [1, 0]])) == choices_from([2, 1])


@given(paths)
@examples(30)
def test_the_token_tree_numbers_nodes_like_the_paths(given_paths: list[tuple[int, ...]]) -> None:
    tree = choices_from(given_paths)
    nodes = tree.token_tree()
    assert isinstance(nodes, TokenTree)
    assert len(nodes) == len(tree.paths) + 1
    for node, path in enumerate(tree.paths, start=1):
        assert tuple(nodes.tokens[step] for step in nodes.path(node)[1:]) == path
    assert sum(tree.widths) == len(tree.paths)
    assert len(tree.widths) == len(tree.candidates) == tree.depth == max(nodes.depths)
    assert tree.candidates == tuple(
        max(token for token, depth in zip(nodes.tokens, nodes.depths, strict=True) if depth == at) + 1
        for at in range(1, tree.depth + 1)
    )


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "choices are empty"),
        ([[]], "path is empty"),
        ([[0], []], "path is empty"),
        ([[0], [1], [0]], r"Path \[0\] is given 2 times"),
        ([(0, 1), [0, 1]], r"Path \[0, 1\] is given 2 times"),
        ([[0, -1]], r"Path \[0, -1\] has rank -1: expected integers from 0 on"),
        ([[0.0]], r"Path \[0.0\] has rank 0.0"),
        ([[True]], r"Path \[True\] has rank True"),
        ([["0"]], r"Path \['0'\] has rank '0'"),
        ([[[0]]], r"has rank \[0\]"),
        ([[0], 1], "mix paths with 1"),
        (["0", "00"], "ask for '0' candidates"),
        ([3, 0], "ask for 0 candidates: expected an integer from 1 on"),
        ([2.5], "ask for 2.5 candidates"),
        ([True], "ask for True candidates"),
        (None, "Choices cannot be None: expected a preset's name, paths"),
        (torch.tensor(7), "Choices cannot be 7"),
        ([10, 10, 10, 10], "have 11110 nodes down to depth 4: expected at most 4096"),
        ([10**30], "nodes down to depth 1"),
        ([1] * 5000, "have 4097 nodes down to depth 4097"),
        ([[0] * 5000], "A path has 5000 ranks: expected at most 4096"),
        ([[rank] for rank in range(MAX_NODES + 1)], "The tree has 4097 nodes: expected at most 4096"),
        ("vicuna_7b", "no preset and no file 'vicuna_7b': expected one of mc_sim_7b_63, vicuna_7b_stage2"),
        ("", "no preset and no file ''"),
    ],
)
def test_bad_choices_are_refused(choices: object, message: str) -> None:
    refuses(message, choices_from, choices)


def test_ranks_beyond_the_candidates_are_refused() -> None:
    refuses(r"Path \[0, 2\] asks for rank 2, and topk is 2", buffers, GOLDEN, topk=2)
    for topk in (0, 3.5, "a", None, True):
        refuses(r"buffers\(topk=\) cannot be", buffers, GOLDEN, topk=topk)
    refuses("no preset and no file", buffers, "nothing")
    refuses("A path cannot be 0: expected ranks like", ChoiceTree, (0, 1))
    refuses("A path cannot be '01'", ChoiceTree, ("01",))


def test_a_calibrated_tree_in_all_its_forms(tmp_path: pathlib.Path) -> None:
    tree = choices_from(GOLDEN)
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(document()))
    odd = tmp_path / "tree of mine"
    odd.write_text(json.dumps(document()))
    for form in (file, str(file), odd, str(odd), document(), SimpleNamespace(paths=GOLDEN), tree):
        assert choices_from(form) == tree
    assert choices_from(tree) is tree
    assert read_tree(file)[1] == document()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (document(format=2), "has format 2: expected 1"),
        (document(format=True), "has format True: expected 1"),
        (document(kind="curve"), "has kind 'curve': expected 'lookahead-medusa-tree'"),
        ({"paths": GOLDEN}, "has kind None"),
        (document(paths=None), "has no paths: expected a list"),
        (document(paths="mc_sim_7b_63"), "has no paths: expected a list"),
        (document(paths=[]), "is not valid. The choices are empty"),
        (document(paths=[[0], [0]]), r"is not valid. Path \[0\] is given 2 times"),
        (document(paths=[3, 2]), "is not valid. A path cannot be 3"),
        ([[0]], "holds list: expected a JSON object"),
    ],
)
def test_tree_files_of_another_kind_are_refused(content: object, message: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(content))
    refuses(rf"tree file .*tree\.json {message}", choices_from, file)
    refuses(rf"tree file .*tree\.json {message}", read_tree, str(file))


def test_tree_files_that_cannot_be_read_are_refused(tmp_path: pathlib.Path) -> None:
    broken, binary, deep = (tmp_path / name for name in ("broken.json", "binary.json", "deep.json"))
    broken.write_text("{")
    binary.write_bytes(b"\xff\xfe\x00")
    deep.write_text("[" * 100_000)
    for file in (broken, binary, deep, tmp_path / "missing.json", tmp_path):
        refuses(f"tree file {file} cannot be read", choices_from, file)
    refuses("cannot be read", choices_from, str(tmp_path / "missing.json"))
