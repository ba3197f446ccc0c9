"""What a report does not tell: where files lie. The export is named as it was given, its source by its name."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from exporter.manifest import Export


class Private:
    """Replaces paths of this machine in every string of a report."""

    def __init__(self, made: Export) -> None:
        given, source = str(made.folder), str(made.data["source"].get("path") or "")
        named: dict[str, str] = {}
        if source:
            named |= {str(Path(source).absolute()): Path(source).name, source: Path(source).name}
        named[str(made.folder.resolve())] = named[str(made.folder.absolute())] = given
        here = Path(__file__).resolve().parent.parent
        inner = {f"{folder}{os.sep}": "" for folder in (Path.cwd(), sys.prefix, here)}
        inner |= {str(Path.home()): "~", tempfile.gettempdir(): "TMP"}
        # the longest first: the export may lie in the folder we run in; what the user gave stays as it is
        order = sorted((old for old in {**inner, **named} if len(old) > 1), key=len, reverse=True)
        self._pairs = [(old, {**inner, **named}[old]) for old in order]
        self._given = given

    def text(self, text: str) -> str:
        """One string. The export's own name, as given, is kept whole."""
        kept = "\0"
        if Path(self._given).is_absolute():
            text = text.replace(self._given, kept)
        for old, new in self._pairs:
            text = text.replace(old, kept if new == self._given else new)
        return text.replace(kept, self._given)

    def cleaned(self, data: Any) -> Any:
        """Every string of JSON-ready data, keys left as they are."""
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, dict):
            return {key: self.cleaned(value) for key, value in data.items()}
        return [self.cleaned(value) for value in data] if isinstance(data, list | tuple) else data
