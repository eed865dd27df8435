// Drives mqtt.js as tests/clients says; see doc.go there.
'use strict';

const fs = require('fs');
const readline = require('readline');
const mqtt = require('mqtt');

const config = JSON.parse(process.argv[2]);
const say = (event) => process.stdout.write(JSON.stringify(event) + '\n');

const options = {
  clientId: config.client_id,
  protocolVersion: config.version === 5 ? 5 : 4,
  clean: !config.resume,
  keepalive: 5,
  reconnectPeriod: 500,
  resubscribe: true,
};
if (config.version === 5) options.properties = { sessionExpiryInterval: config.expiry || 0 };
if (config.will_topic) options.will = { topic: config.will_topic, payload: config.will_body, qos: 1, retain: false };
if (config.tls_ca) options.ca = fs.readFileSync(config.tls_ca);

const client = mqtt.connect((config.tls_ca ? 'mqtts://' : 'mqtt://') + config.tcp, options);
client.on('error', (error) => say({ event: 'retry', error: String(error) }));

const lines = readline.createInterface({ input: process.stdin });
const end = () => client.end(false, {}, () => {
  say({ event: 'done' });
  process.exit(0);
});

if (config.mode === 'produce') {
  let all = Promise.resolve();
  lines.on('line', (line) => {
    const bodies = JSON.parse(line);
    all = all.then(async () => {
      await Promise.all(bodies.map((body) => client.publishAsync(config.topic, body, { qos: 1 })));
      say({ event: 'published', count: bodies.length });
    }).catch((error) => say({ event: 'error', error: String(error) }));
  });
  lines.on('close', () => all.then(end));
} else {
  client.once('connect', async (answer) => {
    try {
      await client.subscribeAsync(config.topic, { qos: 1 });
      say({ event: 'ready', present: answer.sessionPresent });
    } catch (error) {
      say({ event: 'error', error: String(error) });
    }
  });
  client.on('message', (topic, body) => say({ event: 'message', topic, body: body.toString() }));
  lines.on('close', end);
}
