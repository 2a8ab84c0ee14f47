"""Trainer of transformers over packs: isolation by the oracle for each attention, and training equal to padded rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers
import trl
from pack_torch import (
    PackedBatch,
    PackedIterable,
    Preference,
    Rollout,
    Sft,
    build_batch,
    build_pack,
    scored_rows,
    target_log_probs,
)
from pack_torch.testing import assert_documents_isolated, assert_packing_equivalent, explain
from pack_torch.trainer import TrainerCollator, pack_batches
from support.tiny_transformers import DECODER, FLEX_IS_SLOW, assert_told_documents, flash_stand_in
from torch import Tensor, nn

SIZES = DECODER | {"eos_token_id": None}
FORMAT = Sft(label_mode="tokens")
CLOSE = {"sdpa": 1e-9, "eager": 1e-6}  # eager attention takes its softmax in float32

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning", "ignore::DeprecationWarning")


def llama(attention: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(17)
    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model.config._attn_implementation = attention  # building with flash asks for its kernels
    return model


def gpt2() -> nn.Module:
    torch.manual_seed(17)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, attn_implementation="sdpa", eos_token_id=None, bos_token_id=None)
    return transformers.GPT2LMHeadModel(config).double().eval()


def drawn(lengths: list[int]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(1, 64, (length,), generator=draw).tolist() for length in lengths]


def rollouts() -> list[Rollout]:
    texts = drawn([9, 6, 11, 5])
    return [Rollout(name, text, len(text) - 2) for name, text in zip("abcd", texts, strict=True)]


def through_collator(model: nn.Module, capacity: int = 40, **options: Any) -> Callable[[PackedBatch], Tensor]:
    """The model as Trainer calls it, for the oracle: a row of documents to their log-probabilities."""
    collate = TrainerCollator(model, **options)

    def call(batch: PackedBatch) -> Tensor:
        parts = torch.split_with_sizes(batch.input_ids, list(batch.doc_lens))
        pack = build_pack([{"input_ids": part} for part in parts], format=FORMAT, capacity=capacity)
        inputs = collate([pack])
        del inputs["labels"]
        rows = scored_rows(batch.doc_lens, batch.response_lens)
        return target_log_probs(model(**inputs).logits[0, rows], batch.input_ids[rows + 1])

    return call


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_oracle_finds_documents_isolated_and_packing_equivalent(attention: str) -> None:
    model = llama(attention)
    call = through_collator(model)
    assert_packing_equivalent(call, rollouts(), parameters=model, tolerance=CLOSE[attention])
    assert_documents_isolated(call, build_batch(rollouts(), [0, 1, 2, 3]), module=model)


def test_the_oracle_finds_an_older_model_isolated_too() -> None:
    model = gpt2()
    assert_packing_equivalent(through_collator(model), rollouts(), parameters=model, tolerance=1e-9)
    assert_documents_isolated(through_collator(model), build_batch(rollouts(), [3, 1, 0]), module=model)


@pytest.mark.filterwarnings(FLEX_IS_SLOW)
def test_the_oracle_finds_flex_attention_isolated() -> None:
    model = llama("flex_attention")
    call, row = through_collator(model, device="cpu"), build_batch(rollouts(), [2, 0, 1])
    assert explain(call, row, tolerance=1e-6, module=model) is None
    assert_documents_isolated(call, row, module=model, tolerance=1e-6)


def test_flash_attention_is_told_lengths_and_one_row_and_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", flash_stand_in(calls))
    model = llama("flash_attention_2")
    call, row = through_collator(model), build_batch(rollouts(), [1, 0])
    assert_packing_equivalent(call, rollouts(), parameters=model, tolerance=1e-9)
    calls.clear()
    with torch.no_grad():
        call(row)
    assert_told_documents(calls, [0, 6, 15], longest=9)


def test_rows_by_hand() -> None:
    model = llama("sdpa")
    parts = [[{"input_ids": [1, 2]}, {"input_ids": [3]}], [{"input_ids": [4, 5, 6]}]]
    packs = [build_pack(part, format=FORMAT, capacity=5) for part in parts]
    inputs = TrainerCollator(model)(packs)
    assert sorted(inputs) == ["attention_mask", "input_ids", "labels", "position_ids"]
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 0, 0]]
    assert inputs["labels"].tolist() == [[-100, 2, -100, -100, -100], [-100, 5, 6, -100, -100]]
    assert inputs["position_ids"][0, :3].tolist() == [0, 1, 0]
    mask = inputs["attention_mask"][:, 0]
    assert mask.dtype == torch.bool
    assert mask[0, :3, :3].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_positions_alone_are_refused_where_the_peer_leaks() -> None:
    model = llama("sdpa")
    texts = [rollout.tokens.tolist() for rollout in rollouts()[:2]]
    flat = transformers.DataCollatorWithFlattening()([{"input_ids": one} for one in texts])
    with torch.no_grad():
        alone = model(input_ids=torch.tensor([texts[1]])).logits[0]
        by_positions = model(input_ids=flat["input_ids"], position_ids=flat["position_ids"]).logits[0, len(texts[0]) :]
        assert float((by_positions - alone).abs().max()) > 1e-3
        packed = [build_pack([{"input_ids": one} for one in texts], format=FORMAT)]
        told = model(**TrainerCollator(model)(packed)).logits[0, len(texts[0]) :]
        torch.testing.assert_close(told, alone, rtol=0, atol=1e-9)
    row = {"input_ids": flat["input_ids"][0].tolist(), "position_ids": flat["position_ids"][0].tolist()}
    with pytest.raises(ValueError, match="input_ids, position_ids but no seq_lengths; where documents end is not read"):
        TrainerCollator(model)([row])


def test_models_and_formats_that_cannot_be_told_are_refused() -> None:
    linear = {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"shared_expert_intermediate_size": 16}
    kinds = ["linear_attention", "full_attention"]
    config = transformers.Qwen3NextConfig(**SIZES, **experts, **linear, layer_types=kinds, attn_implementation="sdpa")
    packs = [build_pack([{"input_ids": [1, 2]}, {"input_ids": [3]}], format=FORMAT)]
    with pytest.raises(ValueError, match="recurrent layers, which read no mask, so documents of one row may leak"):
        TrainerCollator(transformers.Qwen3NextForCausalLM(config))(packs)
    model = llama("sdpa")
    pairs = build_pack([{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}], format=Preference())
    with pytest.raises(ValueError, match="Preference has no labels, but a loss of its own"):
        TrainerCollator(model)([pairs])
    full = build_pack([{"input_ids": [1, 2], "labels": [2, 3]}], format=Sft())
    with pytest.raises(ValueError, match="the last row has a label, which models that shift labels"):
        TrainerCollator(model)([full])
    spare = build_pack([{"input_ids": [1, 2], "labels": [2, 3]}], format=Sft(), capacity=3)
    assert TrainerCollator(model)([spare])["labels"].tolist() == [[-100, 2, 3]]


# Training itself: the same documents in every step, in rows of their own with padding, and packed.
LENGTHS = [9, 4, 7, 12, 3, 5, 8, 6]
STEPS = 3


def trained(model: nn.Module, folder: Path, data: Any, collate: Any, rows: int, **options: Any) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=rows, max_steps=STEPS, learning_rate=1e-2, logging_steps=1,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        optim="sgd", max_grad_norm=0, remove_unused_columns=False, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A row for each document, as tutorials have it."""
    width = max(len(row["input_ids"]) for row in rows)
    tokens = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    real = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": tokens, "attention_mask": real, "labels": tokens.masked_fill(real == 0, -100)}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_trainer_makes_the_steps_that_padded_rows_make(accumulate: int, tmp_path: Path) -> None:
    rows = [{"input_ids": one} for one in drawn(LENGTHS)]
    packs = PackedIterable(rows, format=FORMAT, strategy="best_fit", capacity=30, window=8)
    assert len(list(packs)) == 2  # all of them in every step
    one, two = llama("sdpa", torch.float32), llama("sdpa", torch.float32)
    start = {name: value.clone() for name, value in two.state_dict().items()}
    expected = trained(one, tmp_path, rows, padded, len(rows))
    collate = TrainerCollator(two)
    found = trained(two, tmp_path, packs, collate, 2 // accumulate, gradient_accumulation_steps=accumulate)
    assert found == pytest.approx(expected, abs=2e-4)  # Trainer rounds what it logs
    assert expected[-1] < expected[0]
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=0, atol=2e-6)
    assert any(float((value - start[name]).abs().max()) > 1e-3 for name, value in one.state_dict().items())


def test_rows_of_pack_dataset_train_as_packs_do(tmp_path: Path) -> None:
    texts = drawn(LENGTHS)
    packed = pack_batches(datasets.Dataset.from_dict({"input_ids": texts}), 30)
    assert len(packed) == 2
    one, two = llama("sdpa", torch.float32), llama("sdpa", torch.float32)
    expected = trained(one, tmp_path, [{"input_ids": text} for text in texts], padded, len(texts))
    found = trained(two, tmp_path, packed, TrainerCollator(two, capacity=30), 2)
    assert found == pytest.approx(expected, abs=2e-4)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=0, atol=2e-6)


def tokenizer() -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0")


def test_the_sft_trainer_of_trl_takes_the_collator(tmp_path: Path) -> None:
    texts = drawn(LENGTHS)
    one, two = llama("sdpa", torch.float32), llama("sdpa", torch.float32)
    trained(one, tmp_path, [{"input_ids": text} for text in texts], padded, len(texts))
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=STEPS, learning_rate=1e-2, report_to=[],
        lr_scheduler_type="constant", save_strategy="no", use_cpu=True, disable_tqdm=True, optim="sgd", max_grad_norm=0,
        remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True}, activation_checkpointing=False,
        bf16=False,
    )  # fmt: skip
    data = pack_batches(datasets.Dataset.from_dict({"input_ids": texts}), 30)
    collate = TrainerCollator(two, capacity=30)
    trl.SFTTrainer(two, arguments, train_dataset=data, data_collator=collate, processing_class=tokenizer()).train()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=0, atol=2e-6)
