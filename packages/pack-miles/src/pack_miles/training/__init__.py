"""The run itself: ranks, rollouts, scoring, updates, checkpoints. Needs torch."""
