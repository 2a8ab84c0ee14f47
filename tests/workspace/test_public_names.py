"""The public names of the packages, pinned: adding or taking away one is a decision, not an accident."""

import inspect

import pack_core
import pack_core.stream
import pack_miles
import pack_torch
import pack_torch.offline
import pytest

PACK_CORE = """
    Bounds Certificate CountError DispatchCounts LengthError Lengths PackError Packing Plan RecordError RoutingError
    Sample Schedule Search SearchTrace Topology TopologyError Work WorkReport as_lengths balance bounds certify
    decode digest dispatch_counts dispatch_loads encode equalize fold headroom owners pack plan rebuild record
    samples_of schedule verify work
"""

PACK_CORE_STREAM = """
    BestFit Binned Choice ConcatSplit Counts Document Documents FirstFit LengthGrouped LongestFirst NextFit Part
    Room STRATEGIES Strategy StreamOptions StreamPack StreamState Tally Waiting finish open_stream packs_of push
    push_many
"""

PACK_TORCH = """
    AttentionBackend Availability Batch EvenPacks Field Format GroupSizes Groups Hardware ImportanceWeights
    ModelConfig ModelOutput Multimodal Normalization Pack PackCollator PackedBatch PackedIterable PolicyLoss
    Preference PreferenceLoss Rollout RouterLoss SampleMetrics Sft SharedPrompt SmallModel StreamPacker TokenLoss
    add_metrics available batch_log_probs block_mask build_batch build_groups build_pack check_routes
    choose_attention chunked_log_probs clip_gradients document_causal_mask dpo_loss entropy_bonus even_packs follow
    full_gradients full_state gated_delta_rule get_attention gradient_norm group_sizes grpo_advantages
    importance_weights kimi_delta_attention kl_loss kl_penalty load_balancing_loss load_full_state mask_function mix
    normalization pack_routes policy_loss progress_line reduce_gradients reduce_tokens response_log_probs
    router_z_loss sample_metrics scored_rows scored_targets sft_loss short_convolution shuffle split_row summarize
    target_log_probs token_kl total_metrics truncate_row
"""

OFFLINE = """
    Advice DatasetError Files Layout Losses PackedRows Recipe Rows Trial Written advise find_files lay_out pack_dataset
    pack_source to_dataset write_rows
"""

PACK_MILES = """
    Config Forecast InputError RolloutRow ScoringPass decide forecast load_config read_rows refuse refuse_machine
    to_samples write_rows
"""

#: Of pack_torch: values that others return (their example is there), and what acts on gradients.
WITHOUT_EXAMPLE = """
    AttentionBackend Availability Groups ImportanceWeights ModelOutput PolicyLoss PreferenceLoss RouterLoss TokenLoss
    clip_gradients full_gradients gradient_norm reduce_gradients
"""


@pytest.mark.parametrize(
    ("package", "names"),
    [
        (pack_core, PACK_CORE),
        (pack_core.stream, PACK_CORE_STREAM),
        (pack_torch, PACK_TORCH),
        (pack_torch.offline, OFFLINE),
        (pack_miles, PACK_MILES),
    ],
)
def test_public_names_are_these_and_all_of_them_are_there(package: object, names: str) -> None:
    assert sorted(package.__all__) == sorted(names.split())
    assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("package", [pack_core, pack_core.stream, pack_torch])
def test_every_public_name_is_documented_with_an_example(package: object) -> None:
    for name in package.__all__:
        if name in ("Lengths", "STRATEGIES"):
            continue  # a type alias and a table, which cannot carry a text of their own
        text = inspect.getdoc(getattr(package, name)) or ""
        assert text, name
        assert ">>>" in text or name in WITHOUT_EXAMPLE.split(), name
