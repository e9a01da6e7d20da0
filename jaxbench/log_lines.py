"""Logs as lines of JSON on standard error (S file)."""

from __future__ import annotations

import json
import logging


class JsonLines(logging.Formatter):
    """A log record as one line of JSON: time, level, event and fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line of JSON."""
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def start(*names: str) -> None:
    """Send messages of the named loggers, from level INFO up, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in names:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.INFO)
