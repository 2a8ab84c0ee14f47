"""Every benchmark there is, in the order of the report."""

import demo_step
import growth
import offline
import packing
import rows
import scheduling
import streaming
from measure import Benchmark

REGISTRY = (
    Benchmark("packing", "Lengths to packs, beside the packers of other projects", packing.measure),
    Benchmark("growth", "How time and memory grow with the number of documents", growth.measure, growth.draw),
    Benchmark("scheduling", "One optimizer step for all ranks, and what is lost to waiting", scheduling.measure),
    Benchmark("streaming", "Documents packed on the fly, beside grain, TRL and a plain loop", streaming.measure),
    Benchmark("offline", "A whole dataset to packed rows, beside TRL", offline.measure),
    Benchmark("rows", "Packed batches beside torch.cat, and updates beside one sample a row", rows.measure),
    Benchmark("demo_step", "What packing adds to the demo's steps", demo_step.measure),
)
