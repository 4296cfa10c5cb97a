"""Experiments: one file each. They drive the library and append records."""
