"""AMOS22: see README.md."""
