"""The files of a run folder that runs go on from, one module each."""

UNDER_RULES = "policy-"  # begins the name of a folder of runs under hospitals' rules, beside run folders
