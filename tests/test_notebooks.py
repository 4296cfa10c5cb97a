"""notebooks/: each runs from top to bottom in a fresh kernel, and shows what it is for."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent


def executed(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """The text that a notebook shows, and the kinds of its outputs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs]
    return "\n".join(texts), [kind for o in outputs for kind in o.get("data", {})]


def test_figures_are_all_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text, kinds = executed("01_figures.ipynb", monkeypatch)
    assert "passed every gate" in text
    assert kinds.count("image/svg+xml") == len(list((ROOT / "results" / "figures").glob("*.svg"))) > 0


def test_replay_by_hand_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    text, kinds = executed("02_replay_by_hand.ipynb", monkeypatch)  # its assertions are the test
    assert text.count("mean KL") == 5
    assert "image/png" in kinds


def test_your_model_gets_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = executed("03_your_model.ipynb", monkeypatch)
    assert "do not use: batch 1" in text
    assert "use replay/" in text
    assert "not measured" in text  # the embedded model's layers were timed on no such device
