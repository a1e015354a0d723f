"""Drives cases to records in worker processes; the parent imports no jax."""
