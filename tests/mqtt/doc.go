// Package mqtt tests MQTT at brokers: real processes and real clients. Tests of many client libraries are
// in tests/clients.
package mqtt
