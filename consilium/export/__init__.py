"""A trained run as a package for other software: MONAI bundles, ONNX where possible, a model card."""
