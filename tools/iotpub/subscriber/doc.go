// Package subscriber receives the messages of a fleet with the unmodified go-nsq library,
// like any NSQ user. The subscriber finds brokers by lookup, finishes every message, and
// records how often and how late each message arrives. tools/iotpub/verify compares the
// record with the fleet's record.
package subscriber
