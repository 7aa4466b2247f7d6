"""I2CVB: see README.md."""
