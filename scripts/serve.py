"""`llama-sidecar serve`: an OpenAI-compatible server and a page to chat in. Parses and says where it is; the server is runtime/server."""

from __future__ import annotations

import click

from llama_sidecar.runtime import LoadError

from ._options import GroupedCommand, Loader, load_options
from ._show import note


@click.command(cls=GroupedCommand)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at; any but this machine's own lets others in.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen at; 0 takes a free one.",
)
@click.option(
    "-np",
    "--slots",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Answers at a time, each with a context of its own; they take turns at compute, a round at a time.",
)
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=16,
    show_default=True,
    help="Requests that may wait for a slot; more are refused with 429.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    help="Answer only requests that have it; better given as LLAMA_SIDECAR_API_KEY: others can read a command line.",
)
@click.option("-a", "--alias", metavar="NAME", help="The model's name for clients.  [default: MAIN's stem]")
@click.option(
    "--max-prompt", type=click.IntRange(1), metavar="N", help="Tokens of a prompt.  [default: the context]"
)
@click.option(
    "--max-body",
    type=click.FloatRange(0, min_open=True),
    metavar="MIB",
    default=8.0,
    show_default=True,
    help="MiB of a request's body.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="One more name that the server may be called by, where it listens on this machine alone and has no key; may be repeated.",
)
@click.option(
    "--allow-origin",
    multiple=True,
    metavar="URL",
    help="A web page elsewhere that may use the server (CORS); may be repeated.",
)
@click.option(
    "--drain",
    type=click.FloatRange(0),
    metavar="SECONDS",
    default=20.0,
    show_default=True,
    help="That running answers have when the server is told to end.",
)
@load_options
def command(
    open_model: Loader,
    host: str,
    port: int,
    slots: int,
    queue: int,
    api_key: str | None,
    alias: str | None,
    max_prompt: int | None,
    max_body: float,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    drain: float,
) -> None:
    """Serve the model MAIN, a GGUF file, to programs that speak OpenAI's API, and at / to people.

    A sidecar beside MAIN (or a draft head inside it) is found and used by itself. Chat and text completions, streams, tools, JSON
    schemas; what is there and what is not is in docs/SERVER.md. SIGTERM or Ctrl-C let running answers end.

    \b
    llama-sidecar serve models/Qwen3.5-0.8B-Q8_0.gguf
    llama-sidecar serve models/Qwen3.5-0.8B-Q8_0.gguf --port 8000 --slots 4 --ctx 16384
    """
    try:
        from llama_sidecar.runtime.server.serve import bind, is_loopback, serve, url_of
    except ImportError as error:
        raise LoadError(
            f"the server needs {error.name}, which is not installed: pip install 'llama-sidecar[server]'"
        ) from error
    if api_key is not None and (not api_key.strip() or not api_key.isascii() or api_key != api_key.strip()):
        raise click.UsageError("--api-key: letters, digits and signs of ASCII are expected")
    with bind(host, port) as bound:
        if not is_loopback(bound):
            key = "whoever has the key" if api_key else "anyone: --api-key keeps others out"
            note(f"{host} is not this machine alone: the model answers {key}, unencrypted")
        with open_model() as model:
            name = alias or model.main.path.stem

            def ready() -> None:
                url = url_of(bound)
                click.echo(f"serving {name} at {url} (OpenAI API: {url}/v1), {slots} slots; Ctrl-C ends it")

            serve(
                model,
                bound,
                host=host,
                model_id=name,
                slots=slots,
                queue=queue,
                api_key=api_key,
                max_prompt=max_prompt,
                max_body_bytes=int(max_body * 2**20),
                allow_hosts=allow_host,
                allow_origins=allow_origin,
                drain_s=drain,
                on_ready=ready,
            )
