"""Runs a module of Eclipse paho's interoperability suite against a server on this machine.

suite.py FOLDER MODULE PORT MAXQOS [TEST...] writes a line of JSON for each test. MAXQOS 1 lowers each
quality of service in the module to 1.
"""

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import unittest

PATIENCE = 120  # seconds for a test

folder, name, port, maximum = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chosen = sys.argv[5:]
sys.path.insert(0, folder)
sys.argv = [name]
suite = importlib.import_module(name)
client = suite.mqtt_client.Client

# What the suite's main program sets.
suite.host, suite.port = "127.0.0.1", port
suite.topic_prefix = "client_test5/"
suite.topics = ("TopicA", "TopicA/B", "Topic/C", "TopicA/C", "/TopicA")
suite.wildtopics = ("TopicA/+", "+/C", "#", "/#", "/+", "+/+", "TopicA/#")
suite.nosubscribe_topics = ("test/nosubscribe",)
if hasattr(suite, "setData"):
    set_data = suite.setData

    def set_all():
        set_data()
        suite.host, suite.port = "127.0.0.1", port

    suite.setData = set_all

connect, publish, subscribe = client.connect, client.publish, client.subscribe


def capped_connect(self, *args, **kwargs):
    return connect(self, *args, **{"willQoS": maximum, **kwargs})


def capped_publish(self, topic, payload, qos=0, *args, **kwargs):
    return publish(self, topic, payload, min(qos, maximum), *args, **kwargs)


def capped_subscribe(self, topics, options, *args, **kwargs):
    capped = []
    for option in options:
        if isinstance(option, int):
            option = min(option, maximum)
        else:
            option.QoS = min(option.QoS, maximum)
        capped.append(option)
    return subscribe(self, topics, capped, *args, **kwargs)


if maximum < 2:
    client.connect, client.publish, client.subscribe = capped_connect, capped_publish, capped_subscribe


class Late(Exception):
    pass


def late(*_):
    raise Late("no end within %d s" % PATIENCE)


signal.signal(signal.SIGALRM, late)
for test in chosen or unittest.defaultTestLoader.getTestCaseNames(suite.Test):
    result, printed = unittest.TestResult(), io.StringIO()
    signal.alarm(PATIENCE)
    # A suite for each test: what a failed test leaves must not fail the next one.
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            unittest.TestSuite([suite.Test(test)]).run(result)
        except Late as error:
            result.errors.append((test, str(error)))
    signal.alarm(0)
    faults = [text for _, text in result.failures + result.errors]
    why = (printed.getvalue() + "\n".join(faults)).strip().splitlines()[-12:] if faults else []
    print(json.dumps({"test": test, "ok": not faults, "why": "\n".join(why)}), flush=True)
# The suite's receivers are threads that may never end.
sys.stdout.flush()
os._exit(0)
