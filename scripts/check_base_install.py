"""Imports all of the base install, sends every message through its bytes, and prints a digest of those bytes.

Run by scripts/base_matrix.sh in environments that hold grpcio, protobuf, numpy and xxhash alone. Equal
digests mean that every generation of protobuf writes the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import MutableSequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

EXTRAS = ("lmdb", "pydantic", "typer", "rich", "prometheus_client", "torch", "transformers", "grpc_health")
PARTS = ("kvstore.rpc", "kvstore.client")
# What runs in an engine's environment besides the client.
ENGINE_SIDE = (
    "engine_adapters.doctor",
    "kvstore.testing.adapter_suite.process",
    "kvstore.testing.adapter_suite.toy",
)
NOT_BASE = ("kvstore.settings", "kvstore.log", "kvstore.metrics")
NESTING_MAX = 4


def import_everything() -> list[str]:
    """Import the foundation, rpc, client and what an engine runs; return the names of the modules."""
    foundation = importlib.import_module("kvstore")
    modules = [module for module in pkgutil.iter_modules(foundation.__path__, "kvstore.") if not module.ispkg]
    names = [module.name for module in modules if module.name not in NOT_BASE]
    for part in PARTS:
        package = importlib.import_module(part)
        names += [part, *(module.name for module in pkgutil.walk_packages(package.__path__, f"{part}."))]
    names += ENGINE_SIDE
    for name in names:
        importlib.import_module(name)
    return names


def sample(field: Any) -> object:
    """Return a value of the field's type that is not its default."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return b"\x00\xff" * 8 if field.type == FieldDescriptor.TYPE_BYTES else "namespace \u00e9"
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return field.enum_type.values[-1].number
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return True
    return 1.5 if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT) else 2**31 - 1


def fill(message: Message, *, depth: int = 0) -> None:
    """Set every field, nested messages down to a fixed depth; of a oneof the last member stays."""
    for field in message.DESCRIPTOR.fields:
        value: Any = getattr(message, field.name)
        is_repeated = isinstance(value, MutableSequence)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            fill_map(value, field.message_type, depth=depth)
        elif field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            if is_repeated:
                value.extend([sample(field)] * 2)
            else:
                setattr(message, field.name, sample(field))
        elif depth < NESTING_MAX:
            nested = value.add() if is_repeated else value
            nested.SetInParent()
            fill(nested, depth=depth + 1)


def fill_map(value: Any, entry: Any, *, depth: int) -> None:
    """Put one entry into a map field."""
    key, item = sample(entry.fields_by_name["key"]), entry.fields_by_name["value"]
    if item.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        fill(value[key], depth=depth + 1)
    else:
        value[key] = sample(item)


def round_trip() -> tuple[int, str]:
    """Send every top-level message through its bytes; return how many there are and a digest of the bytes."""
    digest, count = hashlib.sha256(), 0
    for name in sorted(
        name for name in sys.modules if name.startswith("kvstore.rpc.v1.") and name.endswith("_pb2")
    ):
        for descriptor in sys.modules[name].DESCRIPTOR.message_types_by_name.values():
            message = GetMessageClass(descriptor)()
            fill(message)
            wire = message.SerializeToString(deterministic=True)
            assert type(message).FromString(wire) == message, f"{descriptor.full_name} changed on the way"
            digest.update(wire)
            count += 1
    return count, digest.hexdigest()


def main() -> None:
    """Print one line: what was imported, what was sent, and the digest last."""
    present = [name for name in EXTRAS if importlib.util.find_spec(name) is not None]
    assert not present, f"this environment is not the base install: it has {', '.join(present)}"
    modules = import_everything()
    count, digest = round_trip()
    print(f"{len(modules)} modules imported, {count} messages sent, wire digest {digest[:16]}")


if __name__ == "__main__":
    main()
