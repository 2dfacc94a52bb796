"""``lorimer chat``: talk to a base model or a checkpoint in the terminal.

Answers come over the OpenAI-compatible API of a server, or of the service in this process where none is configured.
Ctrl-C ends an answer and not the program. A model without a chat template completes the text instead.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.connection import find_server, named_server, running_address
from lorimer.cli.failures import sentence
from lorimer.cli.output import Format, note, print_json
from lorimer.errors import InvalidInput, LorimerError

if TYPE_CHECKING:
    from lorimer.client.connection import Connection

HELP = """/reset          forget the conversation
/system TEXT    set the system prompt, and forget the conversation
/model NAME     talk to another model or tinker:// path
/save FILE      write the conversation as JSON
/exit           leave (as does Ctrl-D); Ctrl-C ends an answer"""
PATH = "tinker://"


@cli_command
def chat(
    model: Annotated[
        str | None, typer.Argument(help="A base model or a tinker:// path; the server's first model by default.")
    ] = None,
    system: Annotated[str, typer.Option("--system", "-s", help="What the model is told first.")] = "",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0.0)] = 0.7,
    top_p: Annotated[float, typer.Option(help="Of the likeliest tokens, those that make up this much.", max=1.0)] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="The same answers for the same questions.")] = None,
    once: Annotated[str | None, typer.Option(help="Ask this, print the answer and end; - reads stdin.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the text as it stands, without a chat template.")
    ] = False,
    *,
    options: ServerOptions,
) -> None:
    """Talk to a model or a checkpoint."""
    connection = connect(model, options)
    values = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    given = {name: value for name, value in values.items() if value is not None}
    conversation = Conversation(connection, choose_model(connection, model), system, given, is_raw=raw)
    try:
        if once is not None:
            ask_once(conversation, sys.stdin.read() if once == "-" else once, options.output)
        else:
            Terminal(conversation).run()
    finally:
        connection.close()


def connect(model: str | None, options: ServerOptions) -> "Connection":
    """Connect to the server that the options and the environment name, else to the service in this process."""
    from lorimer.client.connection import Connection

    api_key = options.api_key
    address = named_server(options.base_url, options.data)
    if address not in (None, "local"):
        return Connection(find_server(options.base_url, options.data), api_key)
    from lorimer.cli.settings import effective_settings

    directory = effective_settings({"data": options.data}, None, None).settings.data.expanduser().absolute()
    if url := running_address(directory):
        note(f"lorimer: asking the server at {url}, which has {directory}")
        return Connection(url, api_key)
    os.environ["LORIMER_DATA"] = str(directory)
    return Connection("local", api_key, model=None if model is None or model.startswith(PATH) else model)


def choose_model(connection: "Connection", model: str | None) -> str:
    """The name by which the server knows the model; a file or directory is known by another name than its own."""
    from lorimer.client.transport import decoded

    answer = connection.run(connection.transport.call("GET", "/v1/models", patience=0)).result()
    names = [entry["id"] for entry in decoded(answer)["data"]]
    if model is not None and (model in names or model.startswith(PATH)):
        return model
    if model is None or connection.is_local:
        return str(names[0])
    served = ", ".join(name for name in names if not name.startswith(PATH))
    raise InvalidInput(
        f"model {model!r} is not served at {connection.base_url}; accepted are {served} and {PATH} paths"
    )


@dataclass
class Conversation:
    """What has been said, and how the next answer is asked for."""

    connection: "Connection"
    model: str
    system: str
    options: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    is_raw: bool = False
    usage: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.messages.clear()

    def ask(self, text: str) -> Iterator[tuple[str, str]]:
        """Pieces of the answer as they come: ``content`` or ``reasoning`` and text. What was heard is kept."""
        from lorimer.client.errors import APIStatusError

        self.messages.append({"role": "user", "content": text})
        heard: list[str] = []
        try:
            try:
                yield from self._pieces(heard)
            except APIStatusError as error:
                if self.is_raw or code_of(error) != "no_chat_template":
                    raise
                self.is_raw = True
                note(f"{self.model} has no chat template; it goes on with the text as it stands")
                yield from self._pieces(heard)
        except LorimerError:
            if not heard:
                self.messages.pop()
            raise
        finally:
            if heard:
                self.messages.append({"role": "assistant", "content": "".join(heard)})

    def _pieces(self, heard: list[str]) -> Iterator[tuple[str, str]]:
        for event in follow(self.connection, *self._request()):
            self.usage = event.get("usage") or self.usage
            for choice in event["choices"]:
                if self.is_raw:
                    shown = {"content": choice["text"]}
                else:
                    delta = choice["delta"]
                    shown = {"reasoning": delta.get("reasoning_content"), "content": delta.get("content")}
                for kind, text in shown.items():
                    if text:
                        heard += [text] if kind == "content" else []
                        yield kind, text

    def _request(self) -> tuple[str, dict[str, Any]]:
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **self.options}
        if self.is_raw:
            text = self.system + "".join(message["content"] for message in self.messages)
            return "/v1/completions", {"max_tokens": 256, **body, "prompt": text}
        told = [{"role": "system", "content": self.system}] if self.system else []
        return "/v1/chat/completions", {**body, "messages": told + self.messages}


def code_of(error: Exception) -> str:
    body = getattr(error, "body", None)
    return str(body.get("code", "")) if isinstance(body, dict) else ""


def follow(connection: "Connection", path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of a streaming request, for a thread that waits; leaving off ends the request."""
    from lorimer.client.connection import stream_events

    queue: SimpleQueue[dict[str, Any] | BaseException | None] = SimpleQueue()

    async def read() -> None:
        try:
            async for event in stream_events(connection, path, body):
                queue.put(event)
            queue.put(None)
        except BaseException as error:
            queue.put(error)
            raise

    reading = connection.run(read()).future()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        reading.cancel()


def ask_once(conversation: Conversation, prompt: str, output: Format) -> None:
    answer = ""
    for kind, text in conversation.ask(prompt):
        if kind == "content":
            answer += text
            if output is Format.table:
                write(text)
    if output is Format.json:
        print_json({"model": conversation.model, "answer": answer, "usage": conversation.usage})
    elif not answer.endswith("\n"):
        write("\n")


def write(text: str) -> None:
    """Models may say anything; control codes of the terminal are shown and not obeyed."""
    shown = "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
    sys.stdout.write(shown)
    sys.stdout.flush()


class Terminal:
    """Reads lines and commands, and writes answers."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.is_tty = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        if self.is_tty:
            import readline  # noqa: F401 (gives input() its history and editing)

            note(f"{self.conversation.model}; /help lists commands, Ctrl-D leaves")
        while True:
            try:
                line = input("> " if self.is_tty else "")
                if line.startswith("/"):
                    if not self.obey(line):
                        return
                elif line.strip():
                    self.answer(line)
            except EOFError:
                write("\n" if self.is_tty else "")
                return
            except KeyboardInterrupt:  # also one that comes when the answer has just ended
                note("\n/exit or Ctrl-D leaves")

    def answer(self, line: str) -> None:
        text = ""
        try:
            for kind, text in self.conversation.ask(line):
                if kind == "content":
                    write(text)
                else:
                    self.think(text)
        except KeyboardInterrupt:
            note(" (ended)")
        except LorimerError as error:
            note(f"lorimer: {sentence(error)}")
        if not text.endswith("\n"):
            write("\n")

    def think(self, text: str) -> None:
        """Thoughts are dim, and only for people."""
        if self.is_tty:
            sys.stdout.write("\x1b[2m")
            write(text)
            sys.stdout.write("\x1b[0m")
            sys.stdout.flush()

    def obey(self, line: str) -> bool:
        """Do what a command says; false ends the program."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        conversation = self.conversation
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                conversation.reset()
            case "/system":
                conversation.system = rest
                conversation.reset()
            case "/model" if rest:
                self.change_model(rest)
            case "/model":
                note(conversation.model)
            case "/save" if rest:
                self.save(Path(rest).expanduser())
            case "/help":
                note_lines(HELP)
            case _:
                note(f"{name} is no command, or lacks a value; /help lists what is accepted")
        return True

    def change_model(self, model: str) -> None:
        conversation = self.conversation
        try:
            conversation.model = choose_model(conversation.connection, model)
            conversation.is_raw = False
            note(f"talking to {conversation.model}")
        except LorimerError as error:
            note(f"lorimer: {sentence(error)}")

    def save(self, path: Path) -> None:
        conversation = self.conversation
        told = [{"role": "system", "content": conversation.system}] if conversation.system else []
        content = {"model": conversation.model, "messages": told + conversation.messages}
        try:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
            note(f"saved to {path}")
        except OSError as error:
            note(f"lorimer: cannot write {path}: {error.strerror or error}")


def note_lines(text: str) -> None:
    for line in text.splitlines():
        note(line)
