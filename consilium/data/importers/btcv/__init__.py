"""BTCV: see README.md."""
