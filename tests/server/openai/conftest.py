"""One server for the tests of the compatible APIs: the small pretrained model, a model whose template knows tools and
thoughts, one without a template, and two that read images; two users. Their clients are the real ones.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from lorimer.models.debug import make_debug_model
from tests.conformance.servers import RunningServer, create_key, running_server
from tests.cookbook import chat_templates
from tests.engine.debug_vision import make_debug_vision_model

HERE = Path(__file__).parent
SERVERS = ExitStack()
TINY, TOOLED, PLAIN = "lorimer/tiny", "test/tooled", "test/plain"
SEEING, LLAVA = "test/seeing", "test/llava"
MAX_IMAGE_BYTES = 100_000

TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one by <tool_call>{"name": "...", "arguments": {}}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """The server ends with the last test of this folder, not with the last of all."""
    if nextitem is None or not nextitem.path.is_relative_to(HERE):
        SERVERS.close()


def write_model(directory: Path, template: str | None) -> Path:
    """A debug model with this template."""
    make_debug_model(directory, max_position_embeddings=2048)
    return with_template(directory, template)


def with_template(directory: Path, template: str | None) -> Path:
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    config.pop("chat_template")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, "utf-8")
    file.write_text(json.dumps(config), "utf-8")
    return directory


@dataclass(frozen=True)
class Compatible:
    """The server and its users' keys."""

    running: RunningServer
    keys: dict[str, str]

    @property
    def url(self) -> str:
        return self.running.url

    def client(self, user: str = "ada", **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.keys[user], max_retries=0, **options)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Compatible:
    folder = tmp_path_factory.mktemp("compatible")
    tooled = write_model(folder / "tooled", TOOL_TEMPLATE)
    plain = write_model(folder / "plain", None)
    keys = {user: create_key(folder / "data", user) for user in ("ada", "bob")}
    models = [TINY, f"{TOOLED}={tooled}", f"{PLAIN}={plain}"]
    for name, architecture, template in (
        (SEEING, "qwen3_vl", chat_templates.QWEN_VL),
        (LLAVA, "llava", chat_templates.LLAVA),
    ):
        make_debug_vision_model(folder / architecture, architecture=architecture)
        models.append(f"{name}={with_template(folder / architecture, template)}")
    settings = {"start_engines": "lazy", "max_image_bytes": MAX_IMAGE_BYTES}
    return Compatible(SERVERS.enter_context(running_server(folder / "data", models, **settings)), keys)


@pytest.fixture(scope="session")
def client(server: Compatible) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made
