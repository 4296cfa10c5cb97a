"""Arms: one file each, named after the arm (``replay/cpu`` is ``replay_cpu.py``)."""
