"""BIDS: see README.md."""
