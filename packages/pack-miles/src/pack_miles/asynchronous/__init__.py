"""Rollout workers that sample while the trainer trains: who has which prompt group, and how old its samples may be."""
