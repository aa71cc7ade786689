"""Measurements of ato_jax beside its peers: `python -m benchmarks demo`, `run` or `tune`."""
