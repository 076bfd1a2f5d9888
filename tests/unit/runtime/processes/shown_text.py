"""IncrementalText that remembers what it has shown."""

from __future__ import annotations

from typing import Any

from runtime.processes.pipeline import detokenizer


class IncrementalText(detokenizer.IncrementalText):
    text = ""

    def feed(self, *ids: Any, **options: Any) -> str:
        added = super().feed(*ids, **options)
        self.text += added
        return added

    def __len__(self) -> int:
        return len(self.text)
