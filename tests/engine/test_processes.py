"""Plain scripts, run as a user runs them."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from side_by_side import script

ASK = """
prompt = Prompt([Text("Documents:\\n"), Span("Generators yield values."), Text("What do they do?")])
print("ANSWER", list(engine.generate(prompt, max_tokens=4, temperature=0.0).token_ids))
"""


def answer(done: Any) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    return line


@pytest.fixture(scope="module")
def expected(rigs: object) -> str:
    """What the same engine says in this process."""
    from minipic_backend import Prompt, Span, Text

    engine = rigs.get("bfloat16").engine  # type: ignore[attr-defined]
    spans = Span("Generators yield values.")
    prompt = Prompt([Text("Documents:\n"), spans, Text("What do they do?")])
    return f"ANSWER {list(engine.generate(prompt, max_tokens=4, temperature=0.0).token_ids)}"


INLINE = """
from minipic_backend import Engine, Prompt, Span, Text
engine = Engine({model}, max_model_len=1024, kv_cache_gib=0.05)
{ask}
"""


@pytest.mark.process(run=script(INLINE, ask=ASK))
def test_inline_without_a_main_guard(done: Any, expected: str) -> None:
    """Nor does it need to be closed: the interpreter ends."""
    assert answer(done) == expected


SEPARATE = """
from minipic_backend import *

def main():
    import os, subprocess
    with Engine({model}, max_model_len=1024, kv_cache_gib=0.05, process="separate") as engine:
{ask}
        again = engine.generate(prompt, max_tokens=1)
        assert again.usage.cached_tokens > 0
        assert {{row.state for row in engine.explain(prompt).rows}} == {{"?"}}
        for bad in ([10, engine._config.ssep], [10] * 2000):
            try:
                params = engine._sampling_params({{"max_tokens": 1}}, engine._config.options)
                list(engine._driver.submit(bad, params).deltas())
            except PromptError as error:
                print("REFUSED", type(error).__name__, getattr(error, "token_index", None))
        stream = engine.stream(prompt, max_tokens=200, ignore_eos=True)
        next(stream)
        stream.close()
        assert engine.generate("Hello", max_tokens=1).usage.completion_tokens == 1
        children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid="],
                                  capture_output=True, text=True).stdout.split()
        print("CHILDREN", len(children) - 1)
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="],
                              capture_output=True, text=True).stdout
    print("LEFT", "EngineCore" in children)

if __name__ == "__main__":
    main()
"""


@pytest.mark.process(run=script(SEPARATE, ask=textwrap.indent(ASK, "        ")))
def test_separate_process(done: Any, expected: str) -> None:
    """Same answers; refusals keep their class; the engine's process ends with it."""
    assert answer(done) == expected
    refused = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert refused == ["REFUSED MalformedSpansError 1", "REFUSED PromptError None"]
    assert "LEFT False" in done.stdout


UNGUARDED = """
from minipic_backend import Engine
engine = Engine({model}, max_model_len=1024, kv_cache_gib=0.05, process="separate")
print("STARTED")
"""


@pytest.mark.process(run=script(UNGUARDED))
def test_separate_process_without_a_main_guard_says_so(done: Any) -> None:
    assert done.returncode != 0
    assert "STARTED" not in done.stdout
    assert "__main__" in done.stderr


IMPORT = """
import sys
import minipic_backend
assert not {{"torch", "vllm"}} & set(sys.modules)
print("ANSWER none")
"""


@pytest.mark.process(run=script(IMPORT))
def test_importing_the_package_imports_no_engine(done: Any) -> None:
    assert answer(done) == "ANSWER none"


DIES = """
from minipic_backend import *

def main():
    import os, signal, subprocess, time
    engine = Engine({model}, max_model_len=1024, kv_cache_gib=0.05, process="separate")
    stream = engine.stream("One, two,", max_tokens=800, ignore_eos=True)
    next(stream)
    if {idle}:
        stream.close()
        engine.generate("Three,", max_tokens=1)
        stream = engine.stream("One, two,", max_tokens=800)
    rows = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="],
                          capture_output=True, text=True).stdout.splitlines()
    (core,) = [int(row.split()[0]) for row in rows if "EngineCore" in row]
    os.kill(core, signal.SIGKILL)
    start = time.monotonic()
    if {idle}:
        time.sleep(2)
    again = lambda: engine.generate("Three,", max_tokens=1)
    for ask in (lambda: list(stream), again, again):
        try:
            ask()
            print("ANSWERED")
        except EngineError as error:
            print("ENDED", type(error).__name__, error)
    engine.close()
    print("CLOSED", time.monotonic() - start < 30)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "idle",
    [
        pytest.param(idle, marks=pytest.mark.process(run=script(DIES, idle=idle)), id=name)
        for idle, name in ((False, "at-work"), (True, "idle"))
    ],
)
def test_an_engine_process_that_dies_is_an_error(done: Any, idle: bool) -> None:
    """Not a wait without an end: for who waits for an answer, who asks afterwards, who closes. The
    first to meet it is told that it stopped, all later ones that it is closed."""
    ended = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ENDED")]
    assert ended == ["EngineError", "EngineClosedError", "EngineClosedError"], (
        done.stdout + done.stderr[-3000:]
    )
    assert "ANSWERED" not in done.stdout
    assert "The engine stopped" in done.stdout
    assert "CLOSED True" in done.stdout
