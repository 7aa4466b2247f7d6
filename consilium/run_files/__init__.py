"""The files of a run folder that runs go on from, one module each."""
