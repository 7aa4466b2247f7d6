"""Speed and memory as ratios of two things measured in one run on one machine; `python -m benchmarks`."""
