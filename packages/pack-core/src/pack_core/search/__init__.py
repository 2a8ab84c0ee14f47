"""The search for a better order of one optimizer step."""
