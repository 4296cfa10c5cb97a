"""Lets Triton's interpreter run loops whose bounds a kernel computes.

Triton 3.6 makes a bound with ``int`` of an array of one element, which NumPy 2.4 refuses.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, scope: Any) -> None:
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor
