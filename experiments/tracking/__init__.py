"""Mirrors records to a tracker; the records stay the store, and no failure of a tracker reaches a run."""
