"""Rows of every format, drawn at random, and what they mean, said slowly: one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from pack_torch import ModelConfig, Multimodal, Preference, Sft, SharedPrompt, SmallModel

VOCABULARY = 23
CONFIG = ModelConfig(
    VOCABULARY,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    moe_intermediate_size=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    dense_layers_indices=(0, 1),
)


def small_model(attention: str = "dense", **changes: Any) -> SmallModel:
    return SmallModel(attrs.evolve(CONFIG, **changes), seed=3, dtype=torch.float64, attention=attention)


def no_payloads(payloads: list[Any]) -> dict[str, torch.Tensor]:
    return {}


def lists(low: int, high: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, VOCABULARY - 1), min_size=low, max_size=high)


def branched(low: int = 0) -> st.SearchStrategy[tuple[list[int], list[list[int]]]]:
    return st.tuples(lists(1, 4), st.lists(lists(low, 4), min_size=1, max_size=4))


@attrs.frozen
class Token:
    """One token of a pack: which document it is of, which branch of it (None: the prompt), and where it stands."""

    document: int
    branch: int | None
    position: int


def tokens_of(rows: Sequence[tuple[list[int], list[list[int]]]], shared: bool) -> list[Token]:
    """The tokens of prompts and branches in the order they lie."""
    laid, document = [], 0
    for prompt, branches in rows:
        for number, branch in enumerate(branches):
            if number == 0 or not shared:
                laid += [Token(document, None, place) for place in range(len(prompt))]
            own = number if shared else 0
            laid += [Token(document, own, len(prompt) + place) for place in range(len(branch))]
            document += 0 if shared else 1
        document += 1 if shared else 0
    return laid


def sees(query: Token, key: Token) -> bool:
    """A token sees what stands before it on its own way back to the document's first token."""
    same = query.document == key.document and key.position <= query.position
    return same and (key.branch is None or key.branch == query.branch)


def as_kind(values: list[int], kind: str) -> Any:
    """The same values as a list, an array or a tensor."""
    return {
        "list": lambda: list(values),
        "tuple": lambda: tuple(values),
        "int32": lambda: np.array(values, np.int32),
        "int64": lambda: np.array(values, np.int64),
        "tensor": lambda: torch.tensor(values, dtype=torch.int64),
        "tensor32": lambda: torch.tensor(values, dtype=torch.int32),
    }[kind]()


KINDS = ["list", "tuple", "int32", "int64", "tensor", "tensor32"]


def same(one: Any, two: Any) -> bool:
    """Equal in value and in kind, all the way down."""
    if type(one) is not type(two):
        return False
    if isinstance(one, (np.ndarray, torch.Tensor)):
        return one.dtype == two.dtype and one.shape == two.shape and bool((one == two).all())
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


@st.composite
def rows_of(draw: Any, name: str) -> tuple[Any, list[dict[str, Any]]]:
    """A format and one to four rows of it, with all that may come along."""
    count = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(KINDS))

    def held(values: list[int]) -> Any:
        return as_kind(values, kind)

    if name in ("sft", "multimodal"):
        mode = draw(st.sampled_from(["aligned", "tokens"]))
        labelled = mode == "aligned" or draw(st.booleans())
        text = Sft(label_mode=mode, token_fields={"weights": 0.0})
        rows = []
        for number in range(count):
            tokens = draw(lists(1, 6))
            row: dict[str, Any] = {"note": f"n{number}", "input_ids": held(tokens)}
            if labelled:
                row["labels"] = held(draw(lists(len(tokens), len(tokens))))
            row["completion_mask"] = [1] * len(tokens)
            row["weights"] = [0.5 * place for place in range(len(tokens))]
            row["prompt_length"] = draw(st.integers(0, len(tokens)))
            if name == "multimodal":
                stop = draw(st.integers(0, len(tokens)))
                row["images"], row["spans"] = ([{"pixels": number}], [(0, stop)]) if stop else ([], [])
            rows.append(row)
        return (text if name == "sft" else Multimodal(no_payloads, text)), rows
    if name == "preference":
        rows = []
        for number in range(count):
            prompt, one, two = draw(lists(1, 4)), draw(lists(0, 4)), draw(lists(0, 4))
            row = {"id": number, "prompt_ids": held(prompt), "chosen_ids": held(one), "rejected_ids": held(two)}
            row |= {"chosen_ref_log_probs": [-1.5] * len(one), "rejected_ref_log_probs": [-0.5] * len(two)}
            row |= {"chosen_mask": [1] * len(one), "rejected_mask": [0] * len(two), "margin": 0.25}
            rows.append(row)
        return Preference(shared=draw(st.booleans())), rows
    rows = []
    for number in range(count):
        prompt, branches = draw(branched())
        row = {"completion_ids": [held(one) for one in branches], "prompt_ids": held(prompt), "answer": f"{number}"}
        row |= {"advantages": [0.5] * len(branches), "old_log_probs": [[-1.0] * len(one) for one in branches]}
        rows.append(row)
    return SharedPrompt(shared=draw(st.booleans())), rows
