"""What a report does not tell: where files lie. The export is named as it was given, its source by its name."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from exporter.manifest import Export

_KEPT = "\0"  # stands where the export's name was, until all else is replaced


def _whole(path: str) -> re.Pattern[str]:
    """A path where it stands for itself, not as a part of a longer name."""
    ends = r"(?![\w-]|\.\w)" if not path.endswith(os.sep) else ""
    return re.compile(rf"(?<![\w./-]){re.escape(path)}{ends}")


class Private:
    """Replaces paths of this machine in every string of a report."""

    def __init__(self, made: Export) -> None:
        given, source = str(made.folder), str(made.data["source"].get("path") or "")
        here = Path(__file__).resolve().parent.parent
        names = {f"{folder}{os.sep}": "" for folder in (Path.cwd(), sys.prefix, here)}
        names |= {str(Path.home()): "~", tempfile.gettempdir(): "TMP"}
        if source:
            names |= dict.fromkeys((source, str(Path(source).absolute()), str(Path(source).resolve())),
                                   Path(source).name)
        names |= dict.fromkeys((str(made.folder.absolute()), str(made.folder.resolve())), _KEPT)
        # the longest first: the export may lie in the folder we run in, or beside its source
        order = sorted((old for old in names if len(old) > 1), key=len, reverse=True)
        self._pairs = [(_whole(old), names[old]) for old in order]
        self._given, self._own = given, _whole(given)

    def text(self, text: str) -> str:
        """One string. The export's own name, as given, is kept whole."""
        text = self._own.sub(_KEPT, text)
        for old, new in self._pairs:
            text = old.sub(new, text)
        return text.replace(_KEPT, self._given)

    def cleaned(self, data: Any) -> Any:
        """Every string of JSON-ready data, keys left as they are."""
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, dict):
            return {key: self.cleaned(value) for key, value in data.items()}
        return [self.cleaned(value) for value in data] if isinstance(data, list | tuple) else data
