"""What every forward of OLMo-core must be told, and the calls that are refused."""

import re
from typing import Any

import pytest
import torch
from pack_miles.core.arguments import auxiliary_denominator, check_arguments, document_arguments
from pack_miles.core.model import CoreModel, build_core
from pack_miles.errors import InputError
from pack_torch import Normalization, PackedBatch, build_batch
from support.olmo_cases import dense_config, make_rollouts

ROW = torch.zeros(1, 5, dtype=torch.int64)
LENGTHS = torch.tensor([[3, 2]])


def test_both_arguments_describe_the_row() -> None:
    named = document_arguments(PackedBatch(torch.arange(5), (3, 2)))
    assert named["doc_lens"].tolist() == [[3, 2]]
    assert named["max_doc_lens"] == [3]
    check_arguments(ROW, named)


def test_padded_lengths_of_several_rows_pass() -> None:
    check_arguments(torch.zeros(2, 5), {"doc_lens": torch.tensor([[3, 2], [5, 0]]), "max_doc_lens": [3, 5]})


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"doc_lens": LENGTHS}, "given doc_lens without max_doc_lens; OLMo-core then masks nothing"),
        ({"max_doc_lens": [3]}, "given max_doc_lens without doc_lens"),
        ({"doc_lens": LENGTHS, "max_doc_lens": None}, "given doc_lens without max_doc_lens"),
        ({}, "given no doc_lens and max_doc_lens"),
        ({"cu_doc_lens": torch.tensor([0, 3, 5]), "max_doc_len": 3}, "given no doc_lens and max_doc_lens"),
        ({"doc_lens": torch.tensor([[3, 1]]), "max_doc_lens": [3]}, "[3, 1] and sum to 4, but the row has 5 tokens"),
        ({"doc_lens": torch.tensor([[3, 3]]), "max_doc_lens": [3]}, "sum to 6, but the row has 5 tokens"),
        ({"doc_lens": torch.tensor([[7, -2]]), "max_doc_lens": [7]}, "must cover it exactly"),
        ({"doc_lens": LENGTHS, "max_doc_lens": [2]}, "max_doc_lens of row 0 is 2 but its longest document has 3"),
    ],
)
def test_arguments_that_would_mix_documents_are_refused(named: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        check_arguments(ROW, named)


def test_a_label_across_a_boundary_is_refused() -> None:
    named = {"doc_lens": LENGTHS, "max_doc_lens": [3]}
    check_arguments(ROW, {**named, "labels": torch.tensor([[1, 2, -100, 4, -100]])})
    check_arguments(ROW, {**named, "labels": torch.tensor([[1, 2, 0, 4, 0]]), "ignore_index": 0})
    with pytest.raises(InputError, match="labels of row 0 give position 2, the last of its document, a target"):
        check_arguments(ROW, {**named, "labels": torch.tensor([[1, 2, 3, 4, -100]])})


def test_a_checked_model_refuses_such_a_forward_whoever_calls_it() -> None:
    core = build_core(dense_config(), attention="segment")
    CoreModel(core)
    for named in ({}, {"doc_lens": LENGTHS}, {"max_doc_lens": [3]}):
        with pytest.raises(InputError, match="max_doc_lens"):
            core(ROW, **named)
    assert core(ROW, doc_lens=LENGTHS, max_doc_lens=[3]).shape == (1, 5, 29)


def test_a_row_of_shared_prompts_is_refused_for_lengths_cannot_say_who_sees_whom() -> None:
    model = CoreModel(build_core(dense_config(), attention="segment"))
    tree = PackedBatch(torch.tensor([1, 2, 3]), (3,), reach=torch.tensor([3, 2, 3]))
    with pytest.raises(ValueError, match="knows documents by their lengths alone, but branches share prompts"):
        model(tree)


def test_a_model_for_one_sample_a_row_refuses_rows_of_several() -> None:
    model = CoreModel(build_core(dense_config()), packed=False)
    rollouts = make_rollouts()
    model(build_batch(rollouts, [0]))
    with pytest.raises(ValueError, match="the row has 2 documents but the model was built for one sample a row"):
        model(build_batch(rollouts, [0, 1]))


def test_a_token_outside_the_vocabulary_names_its_sample() -> None:
    model = CoreModel(build_core(dense_config(), attention="segment"))
    rollouts = make_rollouts()
    rollouts[1].tokens[2] = 29
    with pytest.raises(ValueError, match=r"sample 'sample-1': token 29 at row 7 of the pack is outside the vocabulary"):
        model(build_batch(rollouts, [0, 1]))


def test_the_denominator_of_auxiliary_losses_is_the_steps_tokens() -> None:
    counts = Normalization(samples=8, active_tokens=300, model_tokens=1000)
    assert auxiliary_denominator(counts) == 1000
    assert auxiliary_denominator(counts, ranks=4) == 1000
    assert auxiliary_denominator(counts, ranks=4, averaged=True) == 250


@pytest.mark.parametrize(
    ("config", "attention", "words"),
    [
        (lambda: 3, None, "the model configuration is int"),
        (dense_config, "sdpa", "attention 'sdpa' is not one of segment"),
    ],
)
def test_what_is_no_configuration_is_refused(config: Any, attention: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_core(config(), attention=attention)
