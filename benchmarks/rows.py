"""Building packed batches beside one `torch.cat` a field, and updates on packed rows beside one sample a row."""

import statistics
from random import Random

import torch
from measure import Row, in_turn
from pack_core import Sample, Topology, pack, plan, verify
from pack_torch import (
    ModelConfig,
    PackedBatch,
    Rollout,
    SmallModel,
    build_batch,
    normalization,
    policy_loss,
    response_log_probs,
)

#: What an update takes beside tokens, one value a response token.
FIELDS = ("advantages", "old_log_probs", "rollout_log_probs")


def lognormal(count: int, median: int, capacity: int, seed: int) -> list[int]:
    """Return lengths with a long tail, clipped to the capacity."""
    random = Random(seed)
    return [min(capacity, max(1, round(median * random.lognormvariate(0, 0.8)))) for _ in range(count)]


def rollouts_of(lengths: list[int], vocabulary: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, length in enumerate(lengths):
        response = length - max(1, length // 3)
        tokens = torch.randint(vocabulary, (length,), generator=generator)
        fields = {name: torch.randn(response, generator=generator) for name in FIELDS}
        made.append(Rollout(id=number, tokens=tokens, response_length=response, **fields))
    return made


def measure(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    return [*_plans(quick), *_batches(quick), *_updates(quick)]


def _plans(quick: bool) -> list[Row]:
    lengths = lognormal(512, 1500, 6144, seed=2)
    samples = [Sample(id=i, length=length) for i, length in enumerate(lengths)]
    topology = Topology(ranks=8, expert_parallel=2)

    def act() -> object:
        return plan(samples, topology=topology, capacity=6144, step_samples=512)

    chosen = plan(samples, topology=topology, capacity=6144, step_samples=512)
    assert verify(chosen, samples) == []
    step = chosen.work[0]
    said = f"{step.packs_per_rank} packs a rank, bound {chosen.bounds[0].packs_per_rank}"
    return [Row("plan 512 samples, 8 ranks, 6144", "plan", in_turn({"": act}, 5 if quick else 20)[""], said)]


def _batches(quick: bool) -> list[Row]:
    lengths = lognormal(256, 1500, 6144, seed=4)
    rollouts = rollouts_of(lengths, 50_000)
    packs = list(pack(lengths, capacity=6144))
    columns = [[rollout.tokens for rollout in rollouts]]
    columns += [[getattr(rollout, name) for rollout in rollouts] for name in FIELDS]

    def build() -> list[list[torch.Tensor]]:
        batches = [build_batch(rollouts, places) for places in packs]
        return [[batch.input_ids, *map(batch.concat, FIELDS)] for batch in batches]

    def concatenate() -> list[list[torch.Tensor]]:
        return [[torch.cat([column[index] for index in places]) for column in columns] for places in packs]

    for ours, theirs in zip(build(), concatenate(), strict=True):
        assert all(map(torch.equal, ours, theirs))
    seconds = in_turn({"build_batch": build, "torch.cat": concatenate}, 9 if quick else 41)
    pairs = zip(seconds["build_batch"], seconds["torch.cat"], strict=True)
    times = statistics.median(ours / theirs for ours, theirs in pairs)
    work = f"{len(packs)} packs of 6144, four fields"
    return [
        Row(work, "build_batch and its fields", seconds["build_batch"], f"{times:.2f} times", {"times": times}),
        Row(work, "one torch.cat a field", seconds["torch.cat"]),
    ]


def _updates(quick: bool) -> list[Row]:
    """Time forward and backward of one step of short samples, packed and one sample a row, and compare gradients."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    config = ModelConfig(64, **sizes, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2)
    model = SmallModel(config, seed=0)
    lengths = lognormal(64, 24, 128, seed=5)
    rollouts = rollouts_of(lengths, 64)
    total = normalization(rollouts).denominator("token")

    def step(batches: list[PackedBatch]) -> list[torch.Tensor]:
        model.zero_grad()
        for batch in batches:
            log_probs = response_log_probs(model, batch)
            loss = policy_loss(log_probs, batch, old_log_probs=log_probs)
            (loss.numerator / total).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    packed = [build_batch(rollouts, places) for places in pack(lengths, capacity=512)]
    apart = [build_batch(rollouts, [index]) for index in range(len(rollouts))]
    for one, other in zip(step(packed), step(apart), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    names = {f"{len(packed)} packs of 512": lambda: step(packed), "one sample a row": lambda: step(apart)}
    seconds = in_turn(names, 3 if quick else 10)
    return [Row("update of 64 samples", name, each, "same gradients") for name, each in seconds.items()]
