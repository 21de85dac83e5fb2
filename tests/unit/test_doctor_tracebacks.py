"""Which tracebacks end something, and is every exception told that does? The excerpts are Ray 2.60's own lines."""

from __future__ import annotations

import json

import pytest

from tests.unit.diagnosed import diagnose, tags

BIND = """\
Traceback (most recent call last):
  File "/srv/venv/lib/python3.11/site-packages/ray/autoscaler/_private/monitor.py", line 207, in __init__
    prometheus_client.start_http_server(
  File "/srv/venv/lib/python3.11/site-packages/prometheus_client/exposition.py", line 260, in start_wsgi_server
    httpd = make_server(addr, port, app, TmpServer, handler_class=_SilentHandler)
            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/socketserver.py", line 472, in server_bind
    self.socket.bind(self.server_address)
OSError: [Errno 98] Address already in use"""
AIO = """\
Traceback (most recent call last):
  File "/usr/lib/python3.11/asyncio/base_events.py", line 1525, in create_server
    raise OSError(err.errno, 'error while attempting '
OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 52365): address already in use"""
MONITOR = f"""\
2026-11-30 14:28:17,065	INFO monitor.py:199 -- Starting autoscaler metrics server on port 44217
2026-11-30 14:28:17,068	ERROR monitor.py:218 -- An exception occurred while starting the metrics server.
{BIND}
2026-11-30 14:28:17,075	INFO monitor.py:226 -- Monitor: Started"""
DASHBOARD = f"""\
2026-11-30 14:28:25,401	INFO head.py:356 -- Starting dashboard metrics server on port 44227
2026-11-30 14:28:25,402	ERROR head.py:368 -- An exception occurred while starting the metrics server.
{BIND}
2026-11-30 14:28:25,432	INFO head.py:516 -- Initialize the http server."""
AGENT = f"""\
2026-11-30 14:28:26,100	WARNING http_server_agent.py:79 -- Failed to bind to port 52365 (attempt 5/6). Retrying in 1.62s. Error: [Errno 98] error while attempting to bind on address ('127.0.0.1', 52365): address already in use
2026-11-30 14:28:27,900	ERROR http_server_agent.py:85 -- Agent port #52365 failed to bind after 6 attempts.
{AIO}
2026-11-30 14:28:27,901	ERROR agent.py:233 -- Failed to start HTTP server with exception: [Errno 98] error while attempting to bind on address ('127.0.0.1', 52365): address already in use. The agent will stay alive but the HTTP service will be disabled.
{AIO}"""
NEXT_PORT = "2026-11-30 14:28:25,500	WARNING http_server_head.py:479 -- Try to use port {}: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8265): address already in use"
STOPPED = "[2026-11-30 14:40:52,223 I 5231 9062] actor_manager.cc:236: received notification on actor, state: DEAD, ip address: 192.0.2.2, port: 12146, num_restarts: 0, death context type=ActorDiedErrorContext actor_id=a031156e6b0eeaafad3c68c201000000"
STARTED_LATE = """\
2026-11-30 14:26:00,386	INFO node.py:438 -- Failed to get node info b'RPC error: Deadline Exceeded'
Traceback (most recent call last):
  File "/srv/venv/bin/ray", line 6, in <module>
    sys.exit(main())
             ^^^^^^
  File "/srv/venv/lib/python3.11/site-packages/click/core.py", line 1653, in __call__
    return self.main(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/srv/venv/lib/python3.11/site-packages/ray/_private/node.py", line 440, in __init__
    raise Exception(
{}"""
CHECK = "[2026-11-30 14:25:45,530 C 2374 2374] (raylet) node_manager.cc:3576:  An unexpected system state has occurred. You have likely discovered a bug in Ray. Check failed: {}\n*** StackTrace Information ***\n/srv/raylet(+0xff770a) [0x5641ead4270a] ray::operator<<()"


# ── what ends nothing ─────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "log", [MONITOR, DASHBOARD, AGENT, NEXT_PORT.format(8266), STOPPED], ids=lambda log: log[-40:]
)
def test_what_ray_goes_on_without_is_no_failure(log):
    """A port that Ray goes on without or replaces, and an actor that was stopped, leave nothing to tell."""
    verdict = diagnose(log)
    assert (verdict.word, verdict.causes, verdict.first_error) == ("nothing", (), None)
    journal = "\n".join(f"Nov 30 14:28:17 h1 ray[12]: {line}" for line in log.splitlines())
    assert diagnose(journal).word == "nothing"


def test_what_ray_goes_on_without_is_no_failure_in_json():
    """A record that holds the message and its traceback counts as little as the lines do."""
    record = {"levelname": "ERROR", "message": MONITOR.splitlines()[1], "exc_text": BIND}
    assert diagnose(json.dumps(record)).word == "nothing"


def test_an_exception_that_came_of_another_is_as_harmless():
    """Of a chain of exceptions below such a message none counts."""
    chain = (
        f"{BIND}\n\nDuring handling of the above exception, another exception occurred:\n\n{AIO}"
    )
    assert tags(MONITOR.replace(BIND, chain)) == []
    assert tags(f"step\n{chain}") == ["ports"]


def test_a_port_that_ends_something_is_found_after_one_that_does_not():
    """The same traceback counts without the message, below another one, and of another process."""
    assert tags(BIND) == ["ports"]
    assert tags(f"{MONITOR}\n{BIND}") == ["ports"]
    assert tags(MONITOR.replace("starting the metrics server", "starting the head")) == ["ports"]
    heading, *rest = MONITOR.splitlines()[1:]
    other = [f"(A pid=1) {heading}", *(f"(B pid=2) {line}" for line in rest)]
    assert tags("\n".join(other)) == ["ports"]


def test_the_last_port_that_was_tried_is_found():
    """Where no port was left, the traceback right below the last try is the cause."""
    last = "Exception: Failed to find a valid port for dashboard after 2 retries: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8267): address already in use"
    log = f"{NEXT_PORT.format(8266)}\n{NEXT_PORT.format(8267)}\nTraceback (most recent call last):\n  File 'a.py', line 1\n{last}"
    verdict = diagnose(log)
    assert [cause.tag for cause in verdict.causes] == ["ports"]
    assert [one.line for one in verdict.causes[0].evidence] == [5]


def test_a_start_of_ray_that_timed_out_is_named_and_not_its_ports():
    """Of a raylet that waited in vain for its agent, beside metrics ports that were taken, the wait is named."""
    waited = CHECK.format("has_value() Timed out waiting for file /tmp/s/metrics_agent_port_d8f0")
    told = "Exception: The current node timed out during startup. This could happen because some of the raylet failed to startup"
    assert tags(MONITOR, DASHBOARD, waited, STARTED_LATE.format(told)) == ["ray-start"]
    full = "OSError: [Errno 28] No space left on device"
    assert tags(waited, f"2026-11-30 14:26:40,000	ERROR agent.py:1 -- {full}") == [
        "ray-disk",
        "ray-start",
    ]


# ── what is not known ─────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "last",
    [
        "Exception: the flux is gone",
        "Exception",
        "queue.Empty",
        "jinja2.exceptions.Odd: x",
        "ray.exceptions.RayTaskError(OSError): ray::f() (pid=9)",
        "Flux: x",
        "socket.gaierror: [Errno -7] odd",
        "struct.error: x",
    ],
)
def test_an_exception_of_any_name_is_told(last):
    """What stands below the frames is the first error, with and without what a log writes before each line."""
    log = STARTED_LATE.format(last)
    at = len(log.splitlines())
    for before in (
        "",
        "(Engine pid=9) ERROR 09-28 15:47:24 [core.py:718] ",
        "Nov 30 14:28:17 h1 ray[12]: ",
    ):
        verdict = diagnose("\n".join(before + line for line in log.splitlines()))
        assert (verdict.word, verdict.causes) == ("unknown", ())
        assert verdict.first_error is not None
        assert (verdict.first_error.line, verdict.first_error.text) == (at, before + last)


def test_a_traceback_is_read_through_the_lines_of_others():
    """Frames between which another process writes end in their exception; one that was cut is given up."""
    frames = [f"(A pid=1) {line}" for line in STARTED_LATE.format("queue.Empty").splitlines()]
    others = ["(B pid=2) queue.Full", "(B pid=2) step"]
    first = diagnose("\n".join(one for frame in frames for one in (*others, frame))).first_error
    assert first is not None
    assert first.text == "(A pid=1) queue.Empty"
    cut = "\n".join([*frames[:5], *others * 50, "(A pid=1) queue.Empty"])
    assert diagnose(cut).word == "nothing"


def test_a_traceback_that_begins_within_a_line_or_a_group_is_read():
    """What stands before its first line alone, or before each as a group has it, hides no exception."""
    lines = STARTED_LATE.format("queue.Empty").splitlines()[1:]
    for log in (
        ["ERROR 10-01 12:00:00 [a.py:1] a task broke: " + lines[0], *lines[1:]],
        ["  | Odd (1 sub-exception)", *("    | " + line for line in lines)],
    ):
        first = diagnose("\n".join(log)).first_error
        assert first is not None
        assert first.text.endswith("queue.Empty")
        assert diagnose("\n".join(log)).word == "unknown"


@pytest.mark.parametrize(
    "last", ["SystemExit: 0", "and that was all: done", "2026-11-30 12:00:00 x"]
)
def test_what_is_no_exception_is_not_told(last):
    """An end that was asked for, and lines that only follow a traceback, are no failure."""
    assert diagnose(STARTED_LATE.format(last)).word == "nothing"


@pytest.mark.parametrize(
    "line",
    [
        CHECK.format("node_info"),
        "F1130 14:41:01.421419  5264 transport.cc:1403] Check failed: a == b",
        "[2026-11-30 14:25:45,530 C 9 9] store.cc:12: The store is gone.",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_a_crash_of_native_code_is_told(line):
    """A failed check, a line of Ray's fatal level and C++'s own last word are the first error."""
    verdict = diagnose(f"fine\n{line}")
    assert (verdict.word, verdict.causes) == ("unknown", ())
    assert verdict.first_error is not None
    assert verdict.first_error.line == 2


@pytest.mark.parametrize(
    "line",
    [
        "WARNING 10-01 12:00:00 [a.py:1] health check failed: try again",
        "[2026-11-30 14:25:45,530 W 9 9] (raylet) a.cc:12: slow",
        "Traceback (most recent call last):",
        "user: what is a Traceback (most recent call last): ?",
    ],
)
def test_lines_that_only_look_like_a_crash_are_not_told(line):
    """A check that is no assertion, a warning, and a traceback without an end are no failure."""
    assert diagnose(f"{line}\nfine").word == "nothing"


def test_a_deployment_that_failed_is_never_nothing():
    """Serve leaves the exception's name out: the verdict is unknown, unless the next lines tell."""
    failed = "ERROR 2026-12-01 00:05:01,123 controller 7 -- Deploying app 'chat-1' failed with exception:"
    assert diagnose(f"{failed}\nsomething of its own").word == "unknown"
    told = f"{failed}\nthe model's config.json in /srv/models/m\n  found: no such file"
    assert tags(told) == ["weights-missing"]
