"""Trained weights into the user's own ONNX file: the steps of `cross.export_model`, one file each."""
