"""Drives pynsq as tests/clients says; see doc.go there."""

import asyncio
import json
import ssl
import sys
import threading

import nsq
import tornado.ioloop


def say(**event):
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def connection(config):
    options = {"heartbeat_interval": 5}
    if config.get("tls_ca"):
        options["tls_v1"] = True
        options["tls_options"] = {
            "cert_reqs": ssl.CERT_REQUIRED,
            "ca_certs": config["tls_ca"],
        }
    if config.get("compression"):
        options[config["compression"]] = True
    if config.get("auth_secret"):
        options["auth_secret"] = config["auth_secret"]
    return options


def lines(each, end):
    """Calls each with every line of standard input, and then end, on the loop."""
    loop = tornado.ioloop.IOLoop.current()

    def read():
        for line in sys.stdin:
            loop.add_callback(each, json.loads(line))
        loop.add_callback(end)

    threading.Thread(target=read, daemon=True).start()


async def produce(config, finished):
    writer = nsq.Writer([config["tcp"]], reconnect_interval=0.2, **connection(config))
    queue = asyncio.Queue()
    lines(queue.put_nowait, lambda: queue.put_nowait(None))

    async def send(method, *args):
        while True:
            answer = asyncio.get_running_loop().create_future()

            def done(_, data):
                if not answer.done():
                    answer.set_result(data)

            getattr(writer, method)(config["topic"], *args, callback=done)
            data = await answer
            if data == b"OK":
                return
            say(event="retry", error=repr(data))
            await asyncio.sleep(0.1)

    while (bodies := await queue.get()) is not None:
        raw = [body.encode() for body in bodies]
        if config["method"] == "mpub":
            await send("mpub", raw)
        elif config["method"] == "dpub":
            for body in raw:
                await send("dpub", config["delay_ms"], body)
        else:
            for body in raw:
                await send("pub", body)
        say(event="published", count=len(bodies))
    finished.set()  # a writer has no end but the process's


async def consume(config, finished):
    async def touch(message):
        for _ in range(8):
            await asyncio.sleep(config["hold_ms"] / 8 / 1000)
            message.touch()
        message.finish()

    def handle(message):
        say(event="message", body=message.body.decode(), attempts=message.attempts)
        how = config["handle"]
        if how == "touch":
            message.enable_async()
            asyncio.ensure_future(touch(message))
            return None
        if how == "requeue" and message.attempts == 1:
            message.enable_async()
            message.requeue(delay=0, backoff=False)
            return None
        if how == "fail" and message.attempts == 1:
            raise RuntimeError("fails on purpose")
        return True

    if config.get("lookup"):
        where = {"lookupd_http_addresses": ["http://" + config["lookup"]]}
    else:
        where = {"nsqd_tcp_addresses": [config["tcp"]]}
    reader = nsq.Reader(
        topic=config["topic"],
        channel=config["channel"],
        message_handler=handle,
        max_in_flight=config["in_flight"],
        lookupd_poll_interval=1,
        lookupd_poll_jitter=0.1,
        max_backoff_duration=2,
        requeue_delay=0,
        **where,
        **connection(config),
    )

    def end():
        reader.close()
        finished.set()

    lines(lambda line: None, end)


async def main():
    config = json.loads(sys.argv[1])
    finished = asyncio.Event()
    await (produce if config["mode"] == "produce" else consume)(config, finished)
    await finished.wait()
    say(event="done")


asyncio.run(main())
