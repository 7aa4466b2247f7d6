"""nnU-Net's layout: see README.md."""
