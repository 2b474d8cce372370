"""A stand-in for the part of vLLM that SGLang imports on a CPU."""
