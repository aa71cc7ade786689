"""Measurements of ato_jax beside its peers: `python -m benchmarks` lists the commands."""
