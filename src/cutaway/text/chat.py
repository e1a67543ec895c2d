"""`ChatTemplate`: messages -> the prompt text a model was trained on, by its own Jinja template in a sandbox.

A template comes with the weights, from a stranger: `sandbox` keeps it from Python's insides, from running without end and
from making more than a bounded multiple of what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from cutaway.core.errors import BadRequest
from cutaway.core.text_assets import TextAssets
from cutaway.text import sandbox


class ChatTemplate:
    """A model's chat template, compiled at its first use.

    >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}> {{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    'user> Hi'
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._template: jinja2.Template | None = None

    @classmethod
    def open(cls, assets: TextAssets) -> ChatTemplate:
        return cls(assets.chat_template, assets.special_tokens)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt's text. Every failure of the template is a BadRequest that gives its own words, in one line.

        kwargs are more variables of the template (`tools`, `enable_thinking`, ...).
        """
        if self.source is None:
            raise BadRequest(
                "this model has no chat template; use /v1/completions, or a model made for chat",
                param="messages",
                code="no_chat_template",
            )
        try:
            if self._template is None:
                self._template = sandbox.compile_template(self.source)
            variables = {"tools": None, "documents": None} | self._special_tokens | kwargs | {"messages": messages}
            return sandbox.render(self._template, variables | {"add_generation_prompt": add_generation_prompt})
        except sandbox.Refused as error:
            raise self._bad(f"the model's chat template refuses these messages: {_line(error)}") from error
        except SecurityError as error:
            raise self._bad(f"the model's chat template was stopped: {_line(error)}") from error
        except jinja2.TemplateSyntaxError as error:
            raise self._bad(f"the model's chat template is not valid (line {error.lineno}): {_line(error)}") from error
        except Exception as error:  # a template can make any operation of Python fail
            raise self._bad(f"the model's chat template cannot render these messages: {_line(error)}") from error

    @staticmethod
    def _bad(message: str) -> BadRequest:
        return BadRequest(message, param="messages", code="chat_template_error")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
