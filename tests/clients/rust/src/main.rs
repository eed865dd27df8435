//! Drives tokio-nsq as tests/clients says; see doc.go there.

use std::collections::HashSet;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio_nsq::*;

/// What the test asks for; the names are those of its JSON.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct Ask {
    mode: String,
    tcp: String,
    lookup: String,
    topic: String,
    channel: String,
    method: String,
    delay_ms: u32,
    in_flight: u32,
    handle: String,
    hold_ms: u64,
    tls_ca: String,
    compression: String,
    auth_secret: String,
}

fn say(event: serde_json::Value) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{event}").unwrap();
    out.flush().unwrap();
}

fn shared(ask: &Ask) -> NSQConfigShared {
    let mut config = NSQConfigShared::new()
        .set_flush_interval(Duration::from_millis(10))
        .set_backoff_max_wait(Duration::from_millis(200));
    if !ask.tls_ca.is_empty() {
        let mut client = rustls::ClientConfig::new();
        let pem = std::fs::read(&ask.tls_ca).unwrap();
        client.root_store.add_pem_file(&mut pem.as_slice()).unwrap();
        // This rustls knows names only, no addresses.
        config = config.set_tls(NSQConfigSharedTLS::new("localhost").set_client_config(Arc::new(client)));
    }
    match ask.compression.as_str() {
        "snappy" => config = config.set_compression(NSQConfigSharedCompression::Snappy),
        "deflate" => {
            let level = NSQDeflateLevel::new(6).unwrap();
            config = config.set_compression(NSQConfigSharedCompression::Deflate(level));
        }
        _ => {}
    }
    if !ask.auth_secret.is_empty() {
        config = config.set_credentials(ask.auth_secret.clone().into_bytes());
    }
    config
}

/// A producer says when its connection is there; what was not acknowledged when
/// it goes is to be sent again.
struct Producer {
    inner: NSQProducer,
    healthy: bool,
}

impl Producer {
    async fn event(&mut self) -> NSQEvent {
        let event = self.inner.consume().await.expect("the producer's events end");
        match event {
            NSQEvent::Healthy() => self.healthy = true,
            NSQEvent::Unhealthy() => self.healthy = false,
            _ => {}
        }
        event
    }

    async fn send(&mut self, ask: &Ask, topic: &Arc<NSQTopic>, bodies: &[Vec<u8>]) {
        loop {
            while !self.healthy {
                self.event().await;
            }
            let queued = match ask.method.as_str() {
                "mpub" => self.inner.publish_multiple(topic, bodies.to_vec()).await,
                "dpub" => self.inner.publish_deferred(topic, bodies[0].clone(), ask.delay_ms).await,
                _ => self.inner.publish(topic, bodies[0].clone()).await,
            };
            if queued.is_ok() {
                loop {
                    match self.event().await {
                        NSQEvent::Ok() => return,
                        NSQEvent::Unhealthy() => break,
                        _ => {}
                    }
                }
            } else {
                // Its own state is ahead of the events.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            say(json!({"event": "retry"}));
        }
    }
}

async fn produce(ask: Ask) {
    let topic = NSQTopic::new(ask.topic.clone()).unwrap();
    let inner = NSQProducerConfig::new(ask.tcp.clone()).set_shared(shared(&ask)).build();
    let mut producer = Producer { inner, healthy: false };
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await.unwrap() {
        let bodies: Vec<String> = serde_json::from_str(&line).unwrap();
        let bodies: Vec<Vec<u8>> = bodies.into_iter().map(String::into_bytes).collect();
        if ask.method == "mpub" {
            producer.send(&ask, &topic, &bodies).await;
        } else {
            for body in bodies.chunks(1) {
                producer.send(&ask, &topic, body).await;
            }
        }
        say(json!({"event": "published", "count": bodies.len()}));
    }
}

async fn handle(ask: Ask, message: NSQMessage) {
    say(json!({"event": "message", "body": String::from_utf8_lossy(&message.body), "attempts": message.attempt}));
    match ask.handle.as_str() {
        "touch" => {
            for _ in 0..8 {
                tokio::time::sleep(Duration::from_millis(ask.hold_ms / 8)).await;
                message.touch().await;
            }
            message.finish().await;
        }
        "requeue" if message.attempt == 1 => message.requeue(NSQRequeueDelay::NoDelay).await,
        "fail" if message.attempt == 1 => message.requeue(NSQRequeueDelay::DefaultDelay).await,
        _ => message.finish().await,
    }
}

async fn consume(ask: Ask) {
    let sources = if ask.lookup.is_empty() {
        NSQConsumerConfigSources::Daemons(vec![ask.tcp.clone()])
    } else {
        let addresses = HashSet::from([format!("http://{}", ask.lookup)]);
        let lookup = NSQConsumerLookupConfig::new().set_addresses(addresses).set_poll_interval(Duration::from_secs(1));
        NSQConsumerConfigSources::Lookup(lookup)
    };
    let mut consumer = NSQConsumerConfig::new(NSQTopic::new(ask.topic.clone()).unwrap(), NSQChannel::new(ask.channel.clone()).unwrap())
        .set_max_in_flight(ask.in_flight)
        .set_base_requeue_interval(Duration::from_millis(200))
        .set_rebalance_interval(Duration::from_millis(200))
        .set_sources(sources)
        .set_shared(shared(&ask))
        .build();
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    loop {
        tokio::select! {
            message = consumer.consume_filtered() => match message {
                Some(message) => { tokio::spawn(handle(ask.clone(), message)); }
                None => panic!("the consumer's messages end"),
            },
            line = lines.next_line() => if line.unwrap().is_none() {
                return;
            },
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let ask: Ask = serde_json::from_str(&std::env::args().nth(1).expect("an argument")).unwrap();
    if ask.mode == "produce" {
        produce(ask).await;
    } else {
        consume(ask).await;
    }
    say(json!({"event": "done"}));
    std::process::exit(0); // the library leaves tasks behind
}
