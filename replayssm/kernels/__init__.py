"""Kernels, one folder a back end (``torch``, ``cpu``), one file a family or operation.

Every back end has the same two calls. ``stored_step(out, state, inputs, slots)`` runs the plain recurrence in place
on ``state [S,H,P,N]``. ``replay_step(out, layer, inputs, slots)`` decodes one token a row against a `CacheLayer`: rows
with a full ring fold and take their output from the folded state, the others read and append. ``slots [B]`` int64 maps
rows to slots; a row of -1 is padding, and neither its memory nor its ``out`` row is touched. ``out [B,H,P]`` is rounded
once, to its own dtype. Cursors are never written here. A state of 16 bits is rounded to the nearest number where it is
written, saturating; the torch and Triton back ends also take ``rounding``, a `replayssm.formats.Rounding`, and round it
stochastically instead.
"""
