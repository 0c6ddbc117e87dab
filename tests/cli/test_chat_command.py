"""`chat` with releases, as a person in a terminal and a program at a pipe meet it."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import hivetune
from serve.hive import add_release, stored

pytestmark = pytest.mark.slow
SMALL = ("--quant", "q8_0", "--threads", "1", "--max-tokens", "3")


def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    done = hivetune("chat", *arguments, *SMALL, stdin=stdin)
    return done.returncode, done.stdout, done.stderr


def test_a_release_answers_and_what_it_said_is_in_the_store(own_home: Path, tmp_path: Path) -> None:
    first = add_release(tmp_path, "helpdesk", 1, champion=True)
    second = add_release(tmp_path, "helpdesk", 2)
    answers = []
    for name in ("helpdesk", second):
        code, out, err = call(name, "--prompt", "hello", "--json")
        assert code == 0, err
        answers.append(json.loads(out))
    assert [answer["label"] for answer in answers] == [first, second]
    assert answers[0]["answer"] != answers[1]["answer"], "each adapter changes the base in its own way"
    code, _, err = call("helpdesk", "--capture", stdin='"""\nhello\nyou\n"""\n+\n/exit\n')
    assert code == 0 and "1 answer saved in the store" in err
    ((_, source, row),) = stored()
    assert source == f"gateway:{first}" and json.loads(row)["feedback"] == 1
    assert json.loads(row)["messages"][0] == {"role": "user", "content": "hello\nyou"}
    for arguments, words in (
        (("helpdesk@9", "--prompt", "x"), "no such release"),
        (("helpdesk", "--capture", "--prompt", "x"), "--capture can't be used with --prompt"),
    ):
        code, _, err = call(*arguments)
        assert code == 2 and words in err and "Traceback" not in err, err


def test_in_a_terminal_ctrl_c_ends_the_answer_and_not_the_chat(own_home: Path, tmp_path: Path) -> None:
    add_release(tmp_path, "helpdesk", 1, champion=True)
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "hivetune", "chat", "helpdesk", *SMALL[:4], "--max-tokens", "100000"]
    environment = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True)
    os.close(slave)

    def read_until(text: str, interrupt: bool = False) -> str:
        """What is shown up to `text`. With `interrupt` Ctrl-C is pressed, and again while nothing is shown: one that
        comes just before readline waits is only seen with the next key (Modules/readline.c)."""
        found, deadline = "", time.monotonic() + 60
        while text not in found:
            assert time.monotonic() < deadline, found
            if interrupt and not found:
                process.send_signal(signal.SIGINT)
            if select.select([master], [], [], 2)[0]:
                found += os.read(master, 65536).decode(errors="replace")
        return found

    try:
        assert "/exit or Ctrl-D ends the chat" in (shown := read_until("> ")) and "+ or -" not in shown
        read_until("> ", interrupt=True)  # at the prompt: what was typed is taken back
        os.write(master, b"hello\n")
        if not read_until("hello\r\n").partition("hello\r\n")[2]:
            assert select.select([master], [], [], 60)[0], "the answer does not begin"
        read_until("> ", interrupt=True)
        os.write(master, b"/exit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
