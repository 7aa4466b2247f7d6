"""WORD: see README.md."""
