"""Drishti-GS1: see README.md."""
