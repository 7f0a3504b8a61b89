"""`kvstore engine`: the bundled engine at a terminal, or behind a socket."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.connection import JsonOption
from kvstore.cli.engine_trace import trace
from kvstore.cli.output import count_text, duration_text, emit_json, percent_text, say, styled
from kvstore.errors import InvalidArgument
from kvstore.quantities import parse_bytes

if TYPE_CHECKING:
    from kvstore.cli.engine_text import GgufCodec
    from kvstore.engine.accounts import Account
    from kvstore.engine.engine import Engine
    from kvstore.engine.request import Answer, Usage
    from kvstore.engine.worker import Worker

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="A small engine that shows what the store does for one. Without a daemon it computes everything.",
)

app.command("trace")(trace)

ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="FILE", help="A GGUF file, or smollm2 or gemma3-270m.")
]
AddressOption = Annotated[
    str,
    typer.Option(
        "--address", "-a", envvar="KVSTORE_ADDRESS", help="The daemon. Default: this user's own.",
        show_default=False,
    ),
]  # fmt: skip
NoStoreOption = Annotated[bool, typer.Option("--no-store", help="Do not use a daemon at all.")]
PoolOption = Annotated[str, typer.Option("--pool", metavar="SIZE", help="Device memory for keys and values.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")]
MatchOption = Annotated[
    float,
    typer.Option(
        "--match-seconds",
        min=0.001,
        help="How long the daemon may take to say what it has; then it is a miss.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="A torch device: cpu, cuda, ...")]
NewOption = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Length of an answer.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0: the likeliest token.")]
SeedOption = Annotated[int, typer.Option("--seed", help="For temperatures above 0.")]
ClassOption = Annotated[str, typer.Option("--class", help="Retention class of what is stored.")]
PricesOption = Annotated[
    Path | None, typer.Option("--prices", metavar="FILE", help="TOML with prices: what hits saved, in money.")
]
DropOption = Annotated[
    list[str] | None,
    typer.Option("--drop-answers", metavar="CLASS", help="Do not store answers of this class; repeatable."),
]
PrefillOption = Annotated[
    list[Path] | None,
    typer.Option("--prefill-worker", metavar="SOCKET", help="Let this worker compute prompts; repeatable."),
]
DecodeOption = Annotated[
    list[Path] | None,
    typer.Option("--decode-worker", metavar="SOCKET", help="Let this worker answer; repeatable."),
]


class Role(StrEnum):
    """What a worker is for. Any can do both; a prefill worker answers when its blocks are in the daemon."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The options that every command shares."""

    model: str
    address: str
    no_store: bool
    pool: str
    dtype: str
    device: str
    match_seconds: float
    unsaved_answers: frozenset[str] = frozenset()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    model: ModelOption = "smollm2",
    max_new_tokens: NewOption = 64,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    retention_class: ClassOption = "agent",
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is token ids, separated by spaces.")] = False,
    prefill_worker: PrefillOption = None,
    decode_worker: DecodeOption = None,
    address: AddressOption = "",
    no_store: NoStoreOption = False,
    pool: PoolOption = "1GiB",
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    match_seconds: MatchOption = 0.02,
    prices: PricesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, and say where its prefix came from.

    Examples:

      kvstore engine generate "The capital of France is"

      kvstore engine generate - < prompt.txt --json

      kvstore engine generate "Hello" --prefill-worker p.sock --decode-worker d.sock
    """
    from kvstore.engine.request import Request, Sampling

    text = sys.stdin.read() if prompt == "-" else prompt
    choices = Choices(
        model=model,
        address=address,
        no_store=no_store,
        pool=pool,
        dtype=dtype,
        device=device,
        match_seconds=match_seconds,
    )
    codec = None if ids else _codec(model)
    tokens = tuple(codec.encode(text) if codec else _ids(text))
    request = Request(
        prompt=tokens,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, seed=seed),
        stop_ids=codec.stop_ids if codec else frozenset(),
        retention_class=retention_class,
    )
    with _worker(choices, prefill_worker or [], decode_worker or []) as worker:
        answer = worker.submit(request, on_token=_teller(codec, is_silent=as_json)).result()
    if as_json:
        said = {"text": codec.decode(answer.ids) if codec else None, "ids": answer.ids}
        emit_json(said | {"ended_by": answer.ended_by, "usage": _plain(answer.usage)})
        return
    typer.echo()
    say(_line(answer))
    _say_savings(answer.usage.hit, prices)


@app.command()
def chat(
    model: ModelOption = "smollm2",
    max_new_tokens: NewOption = 256,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    retention_class: ClassOption = "chat",
    system: Annotated[str, typer.Option("--system", help="A system message.")] = "",
    prefill_worker: PrefillOption = None,
    decode_worker: DecodeOption = None,
    address: AddressOption = "",
    no_store: NoStoreOption = False,
    pool: PoolOption = "1GiB",
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    match_seconds: MatchOption = 0.02,
    prices: PricesOption = None,
) -> None:
    """Talk to the model; every turn says what was found where and what was computed. Ctrl-D ends.

    The history is sent again with every turn, as engines get it: the answer
    before is found in the pool, after a restart in the daemon. Where the chat
    template drops the thinking of earlier answers, answers are not stored.
    """
    from kvstore.engine.request import Request, Sampling

    codec = _codec(model)
    choices = Choices(
        model=model,
        address=address,
        no_store=no_store,
        pool=pool,
        dtype=dtype,
        device=device,
        match_seconds=match_seconds,
        unsaved_answers=frozenset({retention_class} if codec.drops_thinking else ()),
    )
    messages = [{"role": "system", "content": system}] if system else []
    with _worker(choices, prefill_worker or [], decode_worker or []) as worker:
        for line in _lines():
            messages.append({"role": "user", "content": line})
            request = Request(
                prompt=tuple(codec.chat(messages)),
                max_new_tokens=max_new_tokens,
                sampling=Sampling(temperature=temperature, seed=seed),
                stop_ids=codec.stop_ids,
                retention_class=retention_class,
            )
            answer = worker.submit(request, on_token=_teller(codec, is_silent=False)).result()
            messages.append({"role": "assistant", "content": codec.decode(answer.ids)})
            typer.echo()
            say(_line(answer))
            _say_savings(answer.usage.hit, prices)


@app.command("serve-worker")
def serve_worker(
    listen: Annotated[Path, typer.Argument(metavar="SOCKET", help="Unix socket to serve at.")],
    role: Annotated[Role, typer.Option("--role", help="What it is for.")] = Role.BOTH,
    model: ModelOption = "smollm2",
    address: AddressOption = "",
    no_store: NoStoreOption = False,
    pool: PoolOption = "1GiB",
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    match_seconds: MatchOption = 0.02,
    drop_answers: DropOption = None,
    prices: PricesOption = None,
) -> None:
    """Serve an engine at a unix socket until SIGTERM; prefill and decode workers meet in the daemon. At the
    end it says per retention class what requests took and what hits saved.
    """
    from kvstore.engine.worker import WorkerServer

    choices = Choices(
        model=model,
        address=address,
        no_store=no_store,
        pool=pool,
        dtype=dtype,
        device=device,
        match_seconds=match_seconds,
        unsaved_answers=frozenset(drop_answers or ()),
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with _engine(choices) as engine:
        server = WorkerServer(engine, listen, flushes=role is not Role.DECODE)
        typer.echo(f"serving {model} at {listen} as {role}: {engine.costs}")
        sys.stdout.flush()
        ended.wait()
        server.close()
        for name, account in sorted(engine.accounts.by_class().items()):
            typer.echo(f"{name}: {_account_text(account)}")
            _say_savings(account.hit, prices)


@contextmanager
def _worker(choices: Choices, prefill: list[Path], decode: list[Path]) -> Iterator[Worker]:
    """Yield the workers that were named, or an engine of this process."""
    if prefill or decode:
        from kvstore.engine.pair import PrefillDecode
        from kvstore.engine.worker import RemoteWorker

        yield PrefillDecode([RemoteWorker(path) for path in prefill], [RemoteWorker(path) for path in decode])
        return
    with _engine(choices) as engine:
        yield engine


@contextmanager
def _engine(choices: Choices) -> Iterator[Engine]:
    from kvstore.client import Client
    from kvstore.engine.assembly import EngineOptions, build_engine, dtype_named, load_model
    from kvstore.models import find_model

    options = EngineOptions(
        pool_bytes=parse_bytes(choices.pool),
        dtype=dtype_named(choices.dtype),
        device=choices.device,
        match_seconds=choices.match_seconds,
        unsaved_answers=choices.unsaved_answers,
    )
    client = None if choices.no_store else Client(choices.address or None)
    engine = build_engine(load_model(find_model(choices.model), options), client, options)
    try:
        yield engine
    finally:
        engine.close()
        if client is not None:
            client.close()


def _codec(model: str) -> GgufCodec:
    from kvstore.cli.engine_text import GgufCodec
    from kvstore.models import find_model

    return GgufCodec.read(find_model(model))


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        raise InvalidArgument(f"--ids: {error}") from error


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input(styled("you> ", "bold") if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _teller(codec: GgufCodec | None, *, is_silent: bool) -> Any:
    """Return what prints an answer as it comes; a character may take more than one token."""
    ids: list[int] = []
    shown = 0

    def tell(token: int) -> None:
        nonlocal shown
        ids.append(token)
        text = codec.decode(ids) if codec else " ".join(map(str, ids))
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)

    return (lambda _: None) if is_silent else tell


def _line(answer: Answer) -> str:
    """Return one turn in a line."""
    usage = answer.usage
    rest = usage.seconds - usage.first_token_seconds
    speed = (usage.generated - 1) / rest if usage.generated > 1 and rest > 0 else 0.0
    return (
        f"prompt {_prompt_text(usage)}, computed {count_text(usage.computed)}, "
        f"first token {duration_text(usage.first_token_seconds)}, "
        f"{speed:.1f} tokens/s" + (f"; prefix ended: {usage.reason}" if usage.reason else "")
    )


def _account_text(account: Account) -> str:
    return (
        f"{count_text(account.requests)} requests, prompts {_prompt_text(account)}, "
        f"computed {count_text(account.computed)}, generated {count_text(account.generated)}; "
        f"hits saved {duration_text(account.saved_seconds)} of this engine"
    )


def _prompt_text(of: Usage | Account) -> str:
    found = ", ".join(f"{tier} {count_text(count)}" for tier, count in of.hits.items()) or "nothing found"
    return f"{count_text(of.input)} tokens ({percent_text(of.hit, of.input)} hit: {found})"


def _say_savings(hit_tokens: int, prices: Path | None) -> None:
    if prices is not None:
        from kvstore.trace.prices import read_prices

        paid = read_prices(prices)
        hours = paid.gpu_hours(hit_tokens)
        say(f"hits saved {hours * 3600:.3g} accelerator-seconds, {hours * paid.gpu_hour:.3g} in money")


def _plain(usage: Usage) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(usage)))
    return plain
