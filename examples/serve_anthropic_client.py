"""Documents as spans from the `anthropic` client as it is: run `minipic serve MODEL` first.

python examples/serve_anthropic_client.py [http://127.0.0.1:8000]    ($MINIPIC_API_KEY: its key)
"""

from __future__ import annotations

import os
import sys
from typing import Any

from anthropic import Anthropic

DOCUMENTS = [
    "Lothair II was king of Lotharingia. In 855 he married Teutberga. So the wife of Lothair II "
    "was Teutberga, a daughter of Boso the Elder.",
    "Lotharingia was a medieval kingdom between the rivers Scheldt, Meuse, Rhine and Saône.",
]


def document(text: str) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": text}
    return {"type": "document", "source": source}


def main(base_url: str) -> None:
    # vLLM's --api-key looks at the Authorization header, which `auth_token` is sent in.
    client = Anthropic(
        base_url=base_url, auth_token=os.environ.get("MINIPIC_API_KEY", "none"), api_key=None
    )
    model = client.models.list().data[0].id
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        content: list[Any] = [document(text) for text in documents]
        content.append({"type": "text", "text": "Who was the wife of Lothair II?"})
        answer = client.messages.create(
            model=model,
            max_tokens=32,
            messages=[{"role": "user", "content": content}],
            extra_body={"temperature": 0.0, "cache_salt": "a tenant's own"},
        )
        usage = answer.usage
        print(
            f"{answer.content[0]}: {usage.cache_read_input_tokens} tokens read from the cache, "
            f"{usage.cache_creation_input_tokens} left in it"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
