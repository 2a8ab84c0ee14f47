"""A packer with the contract of NeMo-RL's `SequencePacker`, by pack-core."""

from pack_core import equalize, pack


class Packer:
    """Best-fit decreasing over capacities and counts as NeMo-RL names them."""

    def __init__(self, bin_capacity, collect_metrics=False, min_bin_count=None, bin_count_multiple=None):
        """Take what `SequencePacker` takes; with `collect_metrics`, `metrics` sums up what was packed."""
        if min_bin_count is not None and min_bin_count < 0:
            raise ValueError("min_bin_count must be nonnegative")
        if bin_count_multiple is not None and bin_count_multiple < 1:
            raise ValueError("bin_count_multiple must be positive")
        self.bin_capacity, self.min_bin_count, self.bin_count_multiple = bin_capacity, min_bin_count, bin_count_multiple
        self.collect_metrics = collect_metrics
        self.metrics = None
        self.reset_metrics()

    def reset_metrics(self):
        """Start counting anew."""
        if self.collect_metrics:
            self.metrics = {"packs": 0, "sequences": 0, "tokens": 0, "fill": 1.0}

    def compute_metrics(self, sequence_lengths, bins):
        """Return what `metrics` would add for these packs."""
        tokens = int(sum(sequence_lengths))
        fill = tokens / (len(bins) * self.bin_capacity) if bins else 1.0
        return {"packs": len(bins), "sequences": len(sequence_lengths), "tokens": tokens, "fill": fill}

    def pack(self, sequence_lengths):
        """Return lists of indices, none over the capacity; raises ValueError where a sequence or a count cannot be."""
        packing = []
        if len(sequence_lengths):  # a list, an array or a tensor; pack_core's errors are ValueErrors
            packing = pack(sequence_lengths, capacity=self.bin_capacity, strategy="best_fit_decreasing")
        multiple = self.bin_count_multiple or 1
        count = -(-max(len(packing), self.min_bin_count or 0) // multiple) * multiple
        if count > len(sequence_lengths):  # in NeMo-RL's words, which its users may look for
            raise ValueError(
                f"Cannot create {count} bins with only {len(sequence_lengths)} sequences, one each at least: reduce "
                "min_bin_count or bin_count_multiple, or give more sequences"
            )
        packs = list(equalize(packing, sequence_lengths, count=count)) if count else []
        if self.metrics is not None and packs:
            new = self.compute_metrics(sequence_lengths, packs)
            self.metrics.update({name: self.metrics[name] + new[name] for name in ("packs", "sequences", "tokens")})
            self.metrics["fill"] = self.metrics["tokens"] / (self.metrics["packs"] * self.bin_capacity)
        return packs
