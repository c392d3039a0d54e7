"""Model families, their files and weights, and the one decoder. Knows tensors and tokens, no slot and no step."""
