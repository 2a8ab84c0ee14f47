"""Checkpoints of OLMo-core: read as one whole, whoever wrote them, and trained from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.distributed.checkpoint import save_model_and_optim_state, save_state_dict
from pack_miles.core.model import build_core
from pack_miles.core.weights import load_weights
from pack_miles.errors import InputError
from support.miles_runs import weights
from support.olmo_cases import dense_config, nudge
from support.olmo_experts import expert_config
from support.olmo_runs import pack_miles, write_run

#: OLMo-core saves on one rank here, and torch says so.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def nudged(config: Any) -> Any:
    core = build_core(config, attention="segment")
    nudge(core)
    return core


def saved(folder: Path, core: Any, *, way: str = "trainer") -> Path:
    """Save a checkpoint in one of the ways OLMo-core has, and return the folder of its weights."""
    weights = folder / "model_and_optim"
    if way == "trainer":
        optimizer = torch.optim.AdamW(core.parameters(), lr=1e-3)
        save_model_and_optim_state(weights, core, optimizer, save_overwrite=True)
    else:  # the float32 copies of the optimizer for mixtures of experts, flat, under its own names
        flat = {f"module.{name}.main": value.detach().float().flatten() for name, value in core.named_parameters()}
        flat |= {f"module.{name}.exp_avg": torch.zeros(1) for name, _ in core.named_parameters()}
        save_state_dict(weights, flat, save_overwrite=True)
    return weights


@pytest.mark.usefixtures("cpu_leaves")
@pytest.mark.parametrize(
    ("config", "way"), [(dense_config, "trainer"), (expert_config, "trainer"), (expert_config, "flat")]
)
def test_every_weight_is_what_was_saved(tmp_path: Path, config: Any, way: str) -> None:
    core = nudged(config())
    folder = saved(tmp_path, core, way=way)
    for recompute in (False, True):
        other = build_core(config(), attention="segment", seed=9, recompute=recompute).to(torch.float64)
        load_weights(other, folder)
        found = dict(zip(dict(core.named_parameters()), other.parameters(), strict=True))
        for name, value in core.named_parameters():
            assert torch.equal(found[name], value.double()), name


def test_what_does_not_fit_is_told_and_nothing_moves(tmp_path: Path) -> None:
    folder = saved(tmp_path, nudged(dense_config()))
    wide = build_core(dense_config(d_model=64, n_layers=3), attention="segment")
    before = {name: value.clone() for name, value in wide.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_weights(wide, folder)
    told = "\n".join(caught.value.problems)
    assert "embeddings.weight has shape [29, 32] in it but [29, 64] in the model" in told
    assert "blocks.2.attention.w_q.weight is not in it" in told
    assert all(torch.equal(value, before[name]) for name, value in wide.state_dict().items())


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    folder = saved(tmp_path, nudged(dense_config()))
    core = build_core(dense_config(), attention="segment")
    for file in folder.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match=r"cannot be read: .*copy the checkpoint again"):
        load_weights(core, folder)
    (folder / ".metadata").write_bytes(b"torn")
    with pytest.raises(InputError, match="is no checkpoint of OLMo-core"):
        load_weights(core, folder)


def test_a_run_starts_from_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    config = dense_config()
    core = nudged(config)
    saved(tmp_path / "run" / "step30", core)
    (tmp_path / "run" / "step30" / "config.json").write_text(json.dumps({"model": config.as_config_dict()}))
    still = {"model__source": "step30", "miles__lr": 0.0, "miles__num_rollout": 1, "model__dtype": "float32"}
    file = write_run(tmp_path / "run", config, **still)
    told = pack_miles("train", str(file), "--debug")
    assert told.returncode == 0, told.stderr
    for rank in weights(tmp_path / "run" / "out"):
        for name, value in core.named_parameters():
            assert torch.equal(rank[f"core.{name}"], value), name
