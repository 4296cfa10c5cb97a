"""The Triton back end, for NVIDIA GPUs; with ``TRITON_INTERPRET=1`` also on a CPU, slowly.

Each family has ``stored_step`` and ``replay_step`` as `replayssm.kernels` describes them, with one argument more:
``launch``, a `replayssm.kernels.triton.launch.Launch`, by default what `replayssm.kernels.triton.launch_table` chooses:
the nearest measurement on the device, else a heuristic; steps of a window have `verify_launch` and
`verify_launch_table` for that. States are float32, bfloat16 or float16; activations and ring float32, bfloat16 or
float16, all of one dtype; the last axis of each tensor is contiguous, the others may be strided. A step allocates
nothing and never waits for the device, so that it can be captured in a CUDA graph; cursors, slots and the numbers of a
`replayssm.formats.Rounding` are read on the device, and a slot number is not checked there.

A step is bound by reading the state once. A program walks its rows in tiles, several on their way at a time; what ring
and token add to its outputs is one vector, computed before. A row whose ring is full takes the other branch of the same
launch: ring and token become one product on tensor cores, added to each tile, which is written back in place. With
``Launch.ahead`` a step is two launches instead: flushes and the products over the ring, then the reads.
"""
