"""Drives paho-mqtt as tests/clients says; see doc.go there."""

import json
import sys
import threading

import paho.mqtt.client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

PATIENCE = 60  # seconds
spoken = threading.Lock()


def say(**event):
    with spoken:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def new_client(config):
    modern = config["version"] == 5
    client = mqtt.Client(
        mqtt.CallbackAPIVersion.VERSION2,
        client_id=config["client_id"],
        protocol=mqtt.MQTTv5 if modern else mqtt.MQTTv311,
        **({} if modern else {"clean_session": not config.get("resume")}),
    )
    client.reconnect_delay_set(min_delay=1, max_delay=2)
    if config.get("will_topic"):
        client.will_set(config["will_topic"], config["will_body"], qos=1)
    if config.get("tls_ca"):
        client.tls_set(ca_certs=config["tls_ca"])
    return client


def connect(client, config):
    host, port = config["tcp"].rsplit(":", 1)
    if config["version"] != 5:
        client.connect(host, int(port), keepalive=5)
    else:
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = config.get("expiry", 0)
        # After a lost connection the client resumes its session, if it has one.
        start = False if config.get("resume") else mqtt.MQTT_CLEAN_START_FIRST_ONLY
        client.connect(host, int(port), keepalive=5, clean_start=start, properties=properties)
    client.loop_start()


def produce(config):
    client = new_client(config)
    connected = threading.Event()
    client.on_connect = lambda *_: connected.set()
    connect(client, config)
    connected.wait(PATIENCE)
    for line in sys.stdin:
        sent = [client.publish(config["topic"], body, qos=1) for body in json.loads(line)]
        for info in sent:
            info.wait_for_publish(PATIENCE)
        say(event="published", count=sum(info.is_published() for info in sent))
    return client


def consume(config):
    client = new_client(config)
    present = []

    def on_connect(client, userdata, flags, reason, properties):
        if reason.is_failure:
            say(event="retry", error=str(reason))
            return
        present.append(flags.session_present)
        client.subscribe(config["topic"], qos=1)

    def on_subscribe(client, userdata, mid, reasons, properties):
        if reasons[0].is_failure:
            say(event="error", error=str(reasons[0]))
        elif len(present) == 1:
            say(event="ready", present=present[0])
        else:
            say(event="retry", error="connected again")

    client.on_connect, client.on_subscribe = on_connect, on_subscribe
    client.on_message = lambda client, userdata, m: say(event="message", topic=m.topic, body=m.payload.decode())
    connect(client, config)
    for _ in sys.stdin:
        pass
    return client


config = json.loads(sys.argv[1])
client = (produce if config["mode"] == "produce" else consume)(config)
client.disconnect()
client.loop_stop()
say(event="done")
