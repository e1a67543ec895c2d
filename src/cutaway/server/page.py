"""The page at `/`: one file, with a policy that lets nothing in that is not in it."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.responses import Response


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """(the page, its headers). Its own style and script are named by their hashes; everything else is forbidden."""
    text = resources.files("cutaway.server").joinpath("page.html").read_text("utf-8")

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(f.encode()).digest()).decode()}'" for f in found)

    policy = (
        f"default-src 'none'; style-src {hashes('style')}; script-src {hashes('script')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def page_response() -> Response:
    content, headers = page()
    return Response(content, headers=headers, media_type="text/html")
