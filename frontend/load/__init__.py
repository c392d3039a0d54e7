"""Load on an OpenAI server, and what its clients see. Knows that wire and clocks; leaves workloads to whoever asks."""
