"""Custom scores and masks: Python functions over positions, traced once into a `Program` that every kernel can run."""
