"""OLMo-core: its models on packed rows, checked layer by layer, with recorded expert choices replayed."""
