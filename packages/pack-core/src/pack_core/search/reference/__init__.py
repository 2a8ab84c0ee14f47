"""The search of the reference, as it behaves: selectable, measured against, not improved."""
