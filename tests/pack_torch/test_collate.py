"""Batches of packs: shapes, masks of one's own, what models are told, and what travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from pack_torch import (
    Batch,
    Multimodal,
    Pack,
    PackCollator,
    PackedBatch,
    Preference,
    Sft,
    SharedPrompt,
    build_pack,
    split_row,
    truncate_row,
)
from pack_torch.masks import MaskFunction
from torch import Tensor, nn
from torch.utils.data import DataLoader

SFT = Sft(label_mode="tokens")


def pack(*documents: list[int], capacity: int = 6, **extra: Any) -> Pack:
    return build_pack([{"input_ids": one, **extra} for one in documents], format=SFT, capacity=capacity)


PACKS = [pack([1, 2, 3], [4]), pack([5, 6], [7, 8])]
TREE = build_pack([{"prompt_ids": [1], "completion_ids": [[2], [3, 4]]}], format=SharedPrompt(), capacity=6)


def prefix_mask(batch: Batch) -> MaskFunction:
    """Documents, the first two tokens of each seen by all of its own."""
    documents, positions = batch.document_ids, batch.position_ids

    def allowed(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = documents[b, query] == documents[b, key]
        return inside & ((key <= query) | (positions[b, key] < 2))

    return allowed


@attrs.frozen
class Prefix(Sft):
    """A format with a mask of its own."""

    def mask_mod(self, batch: Batch) -> MaskFunction:
        return prefix_mask(batch)


def test_four_packs_are_four_rows_for_dense_and_flex_and_one_row_for_varlen() -> None:
    four = PACKS * 2
    for mask in ("dense", "flex"):
        batch = PackCollator(mask=mask)(four)
        assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 7, 8, 0, 0]] * 2
        assert batch["labels"].tolist() == [[2, 3, *[-100] * 4], [6, -100, 8, -100, -100, -100]] * 2
        assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 0, 1]] * 2
        assert batch.document_ids.tolist() == [[0, 0, 0, 1, -1, -1], [0, 0, 1, 1, -1, -1]] * 2
        assert batch.reach.tolist() == [[3, 3, 3, 4, 5, 6], [2, 2, 4, 4, 5, 6]] * 2
    batch = PackCollator(mask="varlen")(PACKS)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 2, 2, 3, 3]]
    assert (batch.cu_seqlens.tolist(), batch.cu_seqlens.dtype) == ([0, 3, 4, 6, 8], torch.int32)
    assert (batch.max_seqlen, type(batch.max_seqlen)) == (3, int)


def test_models_are_given_what_they_know_and_nothing_else() -> None:
    padded, flat = PackCollator(mask="flex")(PACKS), PackCollator(mask="varlen")(PACKS)
    usual = {"input_ids", "position_ids"}
    assert padded.model_inputs().keys() == usual | {"attention_mask"}
    assert padded.model_inputs()["attention_mask"].shape == (2, 1, 6, 6)
    allowed = padded.model_inputs("hf")["attention_mask"]
    assert (allowed.dtype, allowed.shape) == (torch.bool, (2, 1, 6, 6))
    added = padded.model_inputs("eager")["attention_mask"]
    assert torch.equal(added == 0, allowed)
    assert torch.isneginf(added[~allowed]).all()
    told = flat.model_inputs("flash")
    assert told.keys() == usual | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert (told["cu_seq_lens_k"].tolist(), told["max_length_q"]) == ([0, 3, 4, 6, 8], 3)
    assert flat.model_inputs("varlen").keys() == usual | {"cu_seqlens", "max_seqlen"}
    assert flat.model_inputs("torchtune").keys() == {"tokens", "input_pos", "mask"}
    nested = PackCollator(mask="nested")(PACKS).model_inputs()
    assert [one.tolist() for one in nested["input_ids"].unbind()] == [[1, 2, 3], [4], [5, 6], [7, 8]]
    (row,) = flat.model_inputs("pack_torch").values()
    assert isinstance(row, PackedBatch)
    assert (row.input_ids.tolist(), row.doc_lens) == ([1, 2, 3, 4, 5, 6, 7, 8], (3, 1, 2, 2))
    assert PACKS[0].model_inputs("flash")["cu_seq_lens_q"].tolist() == [0, 3, 4]
    assert PACKS[0].model_inputs("hf")["attention_mask"].shape == (1, 1, 4, 4)


@pytest.mark.parametrize(("mask", "named"), [("varlen", "flash"), ("dense", "hf")])
def test_what_other_models_would_take_and_get_wrong_is_given_with_a_warning_unless_it_is_named(
    mask: str, named: str
) -> None:
    batch = PackCollator(mask=mask)(PACKS)
    with pytest.warns(UserWarning, match=rf"cannot know the model.* model_inputs\('{named}'\)"):
        told = batch.model_inputs()
    assert told.keys() == batch.model_inputs(named).keys()
    with pytest.warns(UserWarning, match=r"cannot know the model.* model_inputs\('hf'\)") as warned:
        PACKS[0].model_inputs()
    assert warned[0].filename == __file__
    PackCollator(mask="flex")(PACKS).model_inputs()  # any other model refuses a block mask


@pytest.mark.parametrize("mask", ["dense", "varlen"])
@pytest.mark.parametrize("flipped", [False, True])
def test_whole_numbers_in_one_pack_do_not_cut_the_fractions_of_another(mask: str, flipped: bool) -> None:
    format = Sft(label_mode="tokens", token_fields={"weight": 0.0})
    whole = build_pack([{"input_ids": [1, 2], "weight": [1, 3]}], format=format, capacity=2)
    halves = build_pack([{"input_ids": [3, 4], "weight": [0.5, 0.25]}], format=format, capacity=2)
    packs = [halves, whole] if flipped else [whole, halves]
    weights = PackCollator(mask=mask)(packs)["weight"].flatten().tolist()
    assert weights == ([0.5, 0.25, 1, 3] if flipped else [1, 3, 0.5, 0.25])


def test_a_preference_loss_is_the_same_whichever_pack_has_whole_numbers() -> None:
    def pair(chosen: list[float], rejected: list[float]) -> Pack:
        row = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
        row |= {"chosen_ref_log_probs": chosen, "rejected_ref_log_probs": rejected}
        return build_pack([row], format=Preference(), capacity=4)

    batch = PackCollator("dense")([pair([0], [0]), pair([-0.5], [-0.25])])
    assert batch.concat("ref_log_probs").tolist() == [0, 0, -0.5, -0.25]


def test_a_static_row_keeps_its_shapes_and_padding_is_a_stretch_only_for_the_kernel() -> None:
    collate = PackCollator(static=True, max_documents=5)
    batch = collate(PACKS)
    told = batch.model_inputs("flash")
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]]
    assert told["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8, 12, 12]
    assert told["max_length_q"] == 12
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 8]
    assert batch.document_ids[0, 8:].tolist() == [-1] * 4
    other = collate([pack([1]), pack([2, 3, 4, 5, 6, 7])])
    for name, value in other.model_inputs("flash").items():
        assert getattr(value, "shape", value) == getattr(told[name], "shape", told[name])
    full = collate([pack([1, 2, 3], [4], [5, 6]), pack([1, 2], [3, 4, 5, 6])]).model_inputs("flash")
    assert full["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8, 12, 12]
    with pytest.raises(ValueError, match="the batch has 6 documents but max_documents is 5"):
        collate([pack([1], [2], [3]), pack([1], [2], [3])])


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize("own", ["collator", "format"])
def test_a_mask_function_of_ones_own_takes_the_place_of_the_usual_one(own: str) -> None:
    format = SFT if own == "collator" else Prefix(label_mode="tokens")
    packs = [
        build_pack([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}], format=format, capacity=6),
        build_pack([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}], format=format, capacity=6),
    ]
    mask_fn = prefix_mask if own == "collator" else None
    batch = PackCollator(mask="dense", mask_fn=mask_fn)(packs)
    expected = [
        [
            [1, 1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 1, 1],
            [0, 0, 0, 0, 1, 1],
        ],
        [
            [1, 1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0],
            [0, 0, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 1],
            [0, 0, 0, 0, 1, 1],
        ],
    ]
    assert batch.model_inputs("sdpa")["attention_mask"][:, 0].int().tolist() == expected
    blocks = PackCollator(mask="flex", mask_fn=mask_fn)(packs).model_inputs()["attention_mask"]
    grid = torch.meshgrid(torch.arange(2), torch.arange(6), torch.arange(6), indexing="ij")
    assert blocks.mask_mod(grid[0], torch.tensor(0), grid[1], grid[2]).int().tolist() == expected
    assert blocks.shape == (2, 1, 6, 6)
    if own == "format":
        with pytest.raises(ValueError, match="mask function of its own, which lengths cannot say"):
            PackCollator()(packs).model_inputs("flash")


def test_what_lengths_cannot_say_is_refused_with_the_remedy() -> None:
    for form in ("flash", "varlen", "nested"):
        with pytest.raises(
            ValueError, match=r"branches share prompts in this batch, and lengths cannot say .* shared=F"
        ):
            PackCollator()([TREE]).model_inputs(form)
    with pytest.raises(ValueError, match="a PackedBatch is one row of real tokens"):
        PackCollator(mask="flex")(PACKS).model_inputs("pack_torch")
    with pytest.raises(ValueError, match="documents do not lie end to end in rows with padding"):
        PackCollator(mask="flex")(PACKS).model_inputs("flash")
    with pytest.raises(ValueError, match="for_ is 'jax' but must be a model or one of hf, sdpa"):
        PACKS[0].model_inputs("jax")
    with pytest.raises(ValueError, match="mask is 'causal' but must be one of varlen, nested, flex, dense"):
        PackCollator(mask="causal")
    with pytest.raises(ValueError, match="mask is 'varlen', which tells documents by their lengths"):
        PackCollator(mask_fn=prefix_mask)
    with pytest.raises(ValueError, match="max_documents is None with mask 'varlen' and static True"):
        PackCollator(static=True)
    with pytest.raises(ValueError, match="there are no packs"):
        PackCollator()([])
    with pytest.raises(ValueError, match="pack 1 has capacity 8 and pack 0 6"):
        PackCollator()([PACKS[0], pack([1], capacity=8)])
    with pytest.raises(ValueError, match="pack 1 and pack 0 do not have the same fields: weight in one of them only"):
        PackCollator()([PACKS[0], pack([1], weight=2.0)])


class Stand(nn.Module):
    """Takes what causal models take, and is configured as they are."""

    def __init__(self, attention: str = "sdpa", **config: Any) -> None:
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": attention, **config})()

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, **others: Any) -> None: ...


def test_a_model_says_itself_how_it_reads_documents_and_what_would_leak_is_refused() -> None:
    batch = PackCollator(mask="dense")(PACKS)
    assert batch.model_inputs(Stand("sdpa"))["attention_mask"].dtype == torch.bool
    assert batch.model_inputs(Stand("eager"))["attention_mask"].dtype == torch.float32
    assert "cu_seq_lens_q" in PackCollator()(PACKS).model_inputs(Stand("flash_attention_2"))
    recurrent = Stand(layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ValueError, match="recurrent layers, whose state after a prompt would run on"):
        PackCollator(mask="dense")([TREE]).model_inputs(recurrent)
    with pytest.raises(ValueError, match=r"recurrent layers, which read no mask, so documents .* may leak"):
        batch.model_inputs(recurrent)
    alone = PackCollator(mask="dense")([pack([1, 2])])
    assert alone.model_inputs(recurrent).keys() == {"input_ids", "position_ids", "attention_mask"}
    stateful = Stand()
    stateful._is_stateful = True
    with pytest.raises(ValueError, match="recurrent layers"):
        batch.model_inputs(stateful)
    with pytest.raises(ValueError, match="a document has 3 tokens but some layers of Stand see 2"):
        batch.model_inputs(Stand(sliding_window=2))


def test_values_and_counts_travel_with_the_batch() -> None:
    batch = PackCollator()([pack([1, 2], [3], source="a"), pack([4], source="b")])
    assert batch.values == {"source": ("a", "a", "b")}
    assert batch.metrics == {
        "packs": 2,
        "rows": 3,
        "documents": 3,
        "tokens": 4,
        "capacity": 12,
        "padding": 0,
        "longest_document": 2,
    }
    assert PackCollator(mask="dense")(PACKS).metrics["padding"] == 4
    pair = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
    counted = PackCollator()([build_pack([pair], format=Preference())]).metrics
    assert (counted["rows"], counted["documents"]) == (1, 2)


def test_ids_are_the_documents_own_and_never_twice_in_a_batch() -> None:
    packs = [pack([1, 2], [3, 4], id="a"), pack([5, 6], id="a")]
    assert [one.id for one in PackCollator()(packs).rollouts] == ["a", "a#2", "a#3"]


def test_a_batch_on_another_device_takes_everything_along() -> None:
    batch = PackCollator(mask="dense")(PACKS).to("meta")
    assert batch.input_ids.is_meta
    assert batch.position_ids.is_meta
    assert batch.reach.is_meta
    assert batch.score_map()[0].is_meta
    assert [one.response_length for one in batch.rollouts] == [2, 0, 1, 1]


def test_labels_of_a_padded_batch_are_scored_at_their_place() -> None:
    batch = PackCollator(mask="dense")(PACKS)
    rows, targets = batch.score_map()
    assert (rows.tolist(), targets.tolist()) == ([0, 1, 6, 8], [2, 3, 6, 8])
    flat = PackCollator()(PACKS)
    rows, targets = flat.score_map()
    assert (rows.tolist(), targets.tolist()) == ([0, 1, 4, 6], [2, 3, 6, 8])
    assert flat.labels.tolist() == [[2, 3, -100, -100, 6, -100, 8, -100]]


class Listed(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Pack:
        return PACKS[number]


def test_batches_come_whole_out_of_a_loaders_worker() -> None:
    loader = DataLoader(Listed(), batch_size=2, collate_fn=PackCollator(mask="flex"), num_workers=1)
    (batch,) = loader
    here = PackCollator(mask="flex")(PACKS)
    assert torch.equal(batch.input_ids, here.input_ids)
    assert torch.equal(batch.reach, here.reach)
    assert [one.id for one in batch.rollouts] == [0, 1, 2, 3]


# Images: a payload for each run of the token 9.
def joined(images: list[Tensor]) -> Mapping[str, Tensor]:
    return {"pixels": torch.cat(images)}


def thrice(row: Mapping[str, Any]) -> list[Sequence[int]]:
    count = len(row["input_ids"])
    return [range(count), [0] * count, [7] * count]


IMAGES = Multimodal(joined, SFT, placeholder=9, positions=thrice)


def picture(value: float) -> Tensor:
    return torch.full((1, 2), value)


def test_payloads_travel_in_the_order_of_their_spans_and_are_collated_by_the_user() -> None:
    rows = [
        {"input_ids": [9, 1, 9, 9], "images": [picture(0.0), picture(1.0)]},
        {"input_ids": [2, 3], "images": []},
        {"input_ids": [4, 9, 5], "images": [picture(2.0)]},
    ]
    packs = [build_pack(rows[:2], format=IMAGES, capacity=6), build_pack(rows[2:], format=IMAGES, capacity=6)]
    assert packs[0]["labels"].tolist() == [1, -100, -100, -100, 3, -100]
    assert packs[0].documents() == rows[:2]
    assert packs[0].documents()[0]["images"][1] is rows[0]["images"][1]
    batch = PackCollator(mask="dense")(packs)
    told = batch.model_inputs("sdpa")
    assert told["pixels"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert told["position_ids"].tolist() == [
        [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]],
        [[0] * 6, [0] * 6],
        [[7] * 6, [7, 7, 7, 0, 0, 0]],
    ]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]
    assert "images" not in batch.values
    assert "pixels" not in PackCollator()([build_pack(rows[1:2], format=IMAGES)]).model_inputs("flash")
    assert batch.to("meta").model_inputs("sdpa")["pixels"].is_meta


def test_payloads_stay_whole_when_documents_are_cut() -> None:
    row = {"input_ids": [1, 9, 9, 9, 2, 9, 9, 3], "images": ["a", "b"]}
    for format, extra in ((IMAGES, {}), (Multimodal(joined, SFT), {"spans": [(1, 4), (5, 7)]})):
        pieces = split_row(format, row | extra, 4)
        assert [(piece["input_ids"], piece["images"]) for piece in pieces] == [
            ([1, 9, 9, 9], ["a"]),
            ([2, 9, 9, 3], ["b"]),
        ]
        assert [format.spans(piece) for piece in pieces] == [((1, 4),), ((1, 3),)]
        kept = truncate_row(format, row | extra, 6)
        assert (kept["input_ids"], kept["images"]) == ([1, 9, 9, 9, 2], ["a"])
        kept = truncate_row(format, row | extra, 6, side="left")
        assert (kept["input_ids"], kept["images"]) == ([2, 9, 9, 3], ["b"])
        with pytest.raises(ValueError, match="a cut of tokens 0 to 3 goes through the payload at 1 to 4"):
            format.cut(row | extra, 0, 3)
        with pytest.raises(ValueError, match="the payload at token 1 is longer than capacity 2 and must stay whole"):
            split_row(format, row | extra, 2)
    start = {"input_ids": [9, 9, 1], "images": ["a"]}
    with pytest.raises(ValueError, match="no token of 3 is left at capacity 1"):
        truncate_row(IMAGES, start, 1)


def test_payloads_without_a_place_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"the document has 1 images but 2 spans of placeholders, \[\(0, 1\), \(2, 3\)\]"
    ):
        IMAGES.spans({"input_ids": [9, 1, 9], "images": ["a"]})
    with pytest.raises(ValueError, match="no 'spans' and the format no placeholder"):
        Multimodal(joined, SFT).spans({"input_ids": [9], "images": ["a"]})
    with pytest.raises(ValueError, match=r"spans \[\(1, 4\)\] are empty, out of order or outside .* 3 tokens"):
        IMAGES.spans({"input_ids": [9, 1, 9], "images": ["a"], "spans": [(1, 4)]})
    wrong = Multimodal(joined, SFT, placeholder=9, positions=lambda row: [0, 1, 2])
    with pytest.raises(ValueError, match=r"positions have shape \[3\] for a document of 3 tokens"):
        build_pack([{"input_ids": [1, 2, 3], "images": []}], format=wrong)
