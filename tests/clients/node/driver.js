// Drives nsqjs as tests/clients says; see doc.go there.
'use strict'

const fs = require('fs')
const readline = require('readline')
const nsq = require('nsqjs')

const config = JSON.parse(process.argv[2])

const say = (event) => process.stdout.write(JSON.stringify(event) + '\n')
const later = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

function connection() {
  const options = {heartbeatInterval: 5}
  if (config.tls_ca) {
    options.tls = true
    options.ca = fs.readFileSync(config.tls_ca)
  }
  if (config.compression) options[config.compression] = true
  if (config.auth_secret) options.authSecret = config.auth_secret
  return options
}

// end is called at the end of standard input. The library leaves timers behind.
function end() {
  say({event: 'done'})
  process.exit(0)
}

// A writer does not connect again by itself: its users do.
class Producer {
  async connected() {
    while (!this.writer) {
      const [host, port] = config.tcp.split(':')
      const writer = new nsq.Writer(host, Number(port), connection())
      const forget = () => {
        if (this.writer === writer) this.writer = null
      }
      const ready = new Promise((resolve) => {
        writer.on('ready', () => resolve(true))
        writer.on('error', () => resolve(false))
        writer.on('closed', () => resolve(false))
      })
      writer.on('error', forget)
      writer.on('closed', forget)
      writer.connect()
      if (await ready) this.writer = writer
      else await later(100)
    }
    return this.writer
  }

  async send(call) {
    for (;;) {
      const writer = await this.connected()
      const err = await new Promise((resolve) => {
        writer.on('closed', () => resolve(new Error('closed')))
        call(writer, (err) => resolve(err))
      })
      if (!err) return
      say({event: 'retry', error: String(err)})
      await later(100)
    }
  }
}

async function produce() {
  const producer = new Producer()
  for await (const line of readline.createInterface({input: process.stdin})) {
    const bodies = JSON.parse(line)
    if (config.method === 'mpub') {
      await producer.send((w, done) => w.publish(config.topic, bodies, done))
    } else {
      for (const body of bodies) {
        await producer.send((w, done) =>
          config.method === 'dpub'
            ? w.deferPublish(config.topic, [body], config.delay_ms, done)
            : w.publish(config.topic, body, done)
        )
      }
    }
    say({event: 'published', count: bodies.length})
  }
  end()
}

function consume() {
  const where = config.lookup
    ? {lookupdHTTPAddresses: [config.lookup]}
    : {nsqdTCPAddresses: [config.tcp]}
  const reader = new nsq.Reader(config.topic, config.channel, {
    ...connection(),
    ...where,
    maxInFlight: config.in_flight,
    lookupdPollInterval: 1,
    lookupdPollJitter: 0.1,
    maxBackoffDuration: 2,
    requeueDelay: 0,
  })
  // A broker that starts again refuses for a moment; the reader tries once more by itself.
  reader.on('error', (err) => say({event: err.code === 'ECONNREFUSED' ? 'retry' : 'error', error: String(err)}))
  reader.on('message', async (message) => {
    say({event: 'message', body: message.body.toString(), attempts: message.attempts})
    if (config.handle === 'touch') {
      for (let i = 0; i < 8; i++) {
        await later(config.hold_ms / 8)
        message.touch()
      }
      message.finish()
    } else if (config.handle === 'requeue' && message.attempts === 1) {
      message.requeue(0, false)
    } else if (config.handle === 'fail' && message.attempts === 1) {
      message.requeue()
    } else {
      message.finish()
    }
  })
  reader.connect()
  process.stdin.resume()
  process.stdin.on('end', () => {
    reader.close()
    end()
  })
}

if (config.mode === 'produce') produce()
else consume()
