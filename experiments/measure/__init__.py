"""Measuring: timing, gates, records and provenance, shared by every experiment."""
