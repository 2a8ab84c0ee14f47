"""What MILES brings and wants: its samples, its rewards, the producer's options and refusals, packed steps."""
