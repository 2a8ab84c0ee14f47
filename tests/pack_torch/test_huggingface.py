"""What the adapter tells a model of Hugging Face's kind, seen by a stand-in; real models are asked in tests/peers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pack_torch import PackedBatch, Rollout, build_batch
from pack_torch.huggingface import HuggingFaceModel, boundaries_of
from torch import Tensor, nn

ALLOWED = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


class Lister(nn.Module):
    """Keeps what it is told; row r finds token r three times as likely as each of the four others."""

    def __init__(self, attention: str, **config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.config = SimpleNamespace(_attn_implementation=attention, **config)
        self.told: dict[str, Any] = {}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        logits_to_keep: Any = 0,
        **others: Any,
    ) -> SimpleNamespace:
        self.told = {"attention_mask": attention_mask, "position_ids": position_ids, "rows": logits_to_keep, **others}
        logits = torch.eye(5, dtype=torch.float64) * torch.tensor(3.0).log() + self.weight
        return SimpleNamespace(logits=logits[logits_to_keep][None])


@pytest.fixture
def batch() -> PackedBatch:
    return build_batch([Rollout("a", [4, 4, 1], 2), Rollout("b", [0, 3], 1)], [0, 1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_additive_mask_of_zeros_and_minus_infinity_in_the_models_dtype(attention: str, batch: PackedBatch) -> None:
    model = Lister(attention)
    log_probs = HuggingFaceModel(model)(batch)
    mask = model.told["attention_mask"]
    assert mask.shape == (1, 1, 5, 5)
    assert mask.dtype == torch.float64
    assert mask[0, 0].exp().int().tolist() == ALLOWED
    assert model.told["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert model.told["use_cache"] is False
    # Rows 0, 1 and 3 score tokens 4, 1 and 3; 3 : 1 : 1 : 1 : 1 are the odds of each row.
    assert model.told["rows"].tolist() == [0, 1, 3]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([1 / 7, 3 / 7, 3 / 7], dtype=torch.float64))


def test_temperature_divides_the_logits(batch: PackedBatch) -> None:
    log_probs = HuggingFaceModel(Lister("sdpa"), temperature=0.5)(batch)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([1 / 13, 9 / 13, 9 / 13], dtype=torch.float64))


def test_flex_attention_gets_the_block_mask_and_no_gradient_on_a_cpu(batch: PackedBatch) -> None:
    model = Lister("flex_attention")
    with torch.no_grad():
        HuggingFaceModel(model)(batch)
    assert model.told["attention_mask"] is batch.block_mask()
    with pytest.raises(ValueError, match=r"no backward on a CPU; run under torch.no_grad\(\)"):
        HuggingFaceModel(model)(batch)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn3"])
def test_flash_implementations_get_lengths_and_no_mask(attention: str, batch: PackedBatch) -> None:
    model = Lister(attention, sliding_window=2)  # their kernels keep a window by themselves
    HuggingFaceModel(model)(batch)
    assert model.told["attention_mask"] is None
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert model.told[name].dtype == torch.int32
        assert model.told[name].tolist() == [0, 3, 5]
    assert (model.told["max_length_q"], model.told["max_length_k"]) == (3, 3)


def test_a_window_shorter_than_a_document_is_refused_and_one_as_long_is_not(batch: PackedBatch) -> None:
    HuggingFaceModel(Lister("sdpa", sliding_window=3))(batch)
    HuggingFaceModel(Lister("sdpa", sliding_window=2, layer_types=["full_attention"]))(batch)
    with pytest.raises(ValueError, match="sample 'a' has 3 tokens but some layers of Lister see 2"):
        HuggingFaceModel(Lister("sdpa", sliding_window=2, layer_types=["full_attention", "sliding_attention"]))(batch)
    with pytest.raises(ValueError, match="some layers of Lister see 2"):
        HuggingFaceModel(Lister("sdpa", attention_chunk_size=2))(batch)


def test_what_cannot_be_told_is_refused_by_name() -> None:
    class Wrapper(Lister):
        def forward(self, *given: Any, **named: Any) -> Any:
            return super().forward(*given, **named)

    class Closed(Lister):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
            return super().forward(input_ids, position_ids=position_ids)

    with pytest.raises(
        ValueError, match=r"Wrapper.forward takes no input_ids and no position_ids and no attention_mask"
    ):
        HuggingFaceModel(Wrapper("sdpa"))
    with pytest.raises(ValueError, match=r"Closed.forward takes no attention_mask"):
        HuggingFaceModel(Closed("eager"))
    with pytest.raises(ValueError, match="takes neither cu_seq_lens_q nor other keyword arguments"):
        HuggingFaceModel(Closed("flash_attention_2"))


@pytest.mark.parametrize("attention", [None, "paged|sdpa", "paged|flash_attention_2", "sage"])
def test_an_attention_of_unknown_form_is_refused_unless_its_form_is_said(attention: Any, batch: PackedBatch) -> None:
    with pytest.raises(ValueError, match=r"has attention implementation .* load it with attn_implementation 'sdpa'"):
        boundaries_of(Lister(attention))
    model = Lister(attention)
    HuggingFaceModel(model, boundaries="lengths")(batch)
    assert "cu_seq_lens_q" in model.told


def test_a_forward_that_takes_only_what_is_needed_is_told_no_more(batch: PackedBatch) -> None:
    class Plain(Lister):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
            logits = super().forward(input_ids, attention_mask, position_ids, torch.arange(5)).logits
            return SimpleNamespace(logits=logits)

    log_probs = HuggingFaceModel(Plain("sdpa"))(batch)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([1 / 7, 3 / 7, 3 / 7], dtype=torch.float64))


def test_a_model_without_token_logits_is_refused(batch: PackedBatch) -> None:
    class Classifier(Lister):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, **others: Any) -> Any:
            return SimpleNamespace(logits=torch.zeros(1, 2))

    with pytest.raises(ValueError, match=r"Classifier gave logits of shape \[1, 2\] but \[1, 5, vocabulary\]"):
        HuggingFaceModel(Classifier("sdpa"))(batch)
