"""Documents as spans from the `openai` client as it is: run `minipic serve MODEL` first.

python examples/serve_openai_client.py [http://127.0.0.1:8000/v1]    ($MINIPIC_API_KEY: its key)
"""

from __future__ import annotations

import os
import sys
from typing import Any

from openai import OpenAI

DOCUMENTS = [
    "Lothair II was king of Lotharingia. In 855 he married Teutberga. So the wife of Lothair II "
    "was Teutberga, a daughter of Boso the Elder.",
    "Lotharingia was a medieval kingdom between the rivers Scheldt, Meuse, Rhine and Saône.",
]


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key=os.environ.get("MINIPIC_API_KEY", "none"))
    model = client.models.list().data[0].id
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        content: list[Any] = [
            {"type": "text", "text": text, "minipic": {"span": True}} for text in documents
        ]
        content.append({"type": "text", "text": "Who was the wife of Lothair II?"})
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            max_tokens=32,
            temperature=0.0,
            extra_body={"cache_salt": "a tenant's own"},
        )
        usage = answer.usage
        assert usage is not None
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
        print(f"{answer.choices[0].message.content!r}: {cached} of {usage.prompt_tokens} cached")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
