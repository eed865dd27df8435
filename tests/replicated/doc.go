// Package replicated tests brokers that keep their messages in NATS JetStream: take-overs, restarts,
// and the loss of brokers and of NATS servers. The package contains only tests.
package replicated
