"""What the tests on models of transformers share: sizes small enough to build from a configuration in no time."""

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
#: Of models that take the width of a head on its own.
DECODER = SIZES | {"head_dim": 8}

#: Eager flex attention warns that it is slow; on a CPU it is all there is.
FLEX_IS_SLOW = "ignore:flex_attention called without torch.compile"
