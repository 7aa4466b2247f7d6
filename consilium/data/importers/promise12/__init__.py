"""PROMISE12: see README.md."""
