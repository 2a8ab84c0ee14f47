"""What a run is told: options, run files, what they may not be, and what follows from them."""
