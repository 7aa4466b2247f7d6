"""AbdomenCT-1K: see README.md."""
