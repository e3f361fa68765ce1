"""Reading what an offline W&B run wrote."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def read_wandb(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """History rows and config of an offline run's file: blocks of 32 KiB with records of (crc, length, type)."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), 7, b""
    history, settings = [], {}
    while position + 7 <= len(data):
        if position % 32768 > 32768 - 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            if record.HasField("history"):
                history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
            # The config comes with the run, or in a record of its own where the run was written before it was complete.
            for config in (record.run.config, record.config):
                settings.update({item.key: json.loads(item.value_json) for item in config.update if item.key})
    return history, settings
