"""RIGA: see README.md."""
