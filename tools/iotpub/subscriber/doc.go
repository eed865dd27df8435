// Package subscriber receives what a fleet sends, with the unmodified go-nsq
// library as any user of NSQ would: it finds brokers by lookup, finishes every
// message, and keeps account of which came how often and how late. The account
// is compared with the fleet's by tools/iotpub/verify.
package subscriber
