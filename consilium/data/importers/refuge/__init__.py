"""REFUGE: see README.md."""
