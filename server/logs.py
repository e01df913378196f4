"""Logging of the server's processes: text lines for people, JSON lines for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, process, logger, message and, if there is one, exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(process: str, level: str, log_format: Literal["text", "json"]) -> None:
    """Send the root logger of this process to stderr at `level` ("debug" ... "critical")."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
