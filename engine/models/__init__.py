"""Model descriptions and weights: configuration, sources (safetensors, GGUF), the one decoder."""
