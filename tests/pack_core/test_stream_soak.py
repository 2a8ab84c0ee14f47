"""Half a million documents streamed: memory stays, and so does the time for documents that hardly fit together."""

import importlib.util
import time
from pathlib import Path

import pytest
from pack_core.stream import Documents, StreamOptions, open_stream, push_many


def soak():
    path = Path(__file__).parents[2] / "scripts" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.soak


@pytest.mark.parametrize("strategy", ["best_fit", "concat_split"])
def test_memory_does_not_grow_over_half_a_million_documents(strategy) -> None:
    growth, astray = soak()(
        500_000, first=100_000, strategy=strategy, capacity=2048, window=256, max_wait=2_000, overlong="drop"
    )
    assert growth < 10_000_000
    assert astray == 0


def test_documents_of_which_no_two_fit_together_take_no_longer() -> None:
    """Whoever looks at every open pack for each of them takes hours; processor time, since machines are shared."""
    options = StreamOptions(capacity=2048, window=256)
    documents = Documents(range(100_000), [1_025 + key * 7_919 % 1_024 for key in range(100_000)])
    begun = time.process_time()
    _, packs = push_many(options, open_stream(options), documents)
    assert time.process_time() - begun < 20
    assert len(packs) > 99_000
