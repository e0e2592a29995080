"""The model runner: tensors and device work for one step plan."""
