// Package mqtt is the part between the MQTT sessions of a broker (mqtt/session) and the sockets
// (nsqd/conn). The package knows which client ids are connected, keeps sessions over connections, opens broker
// subscriptions for the filters of a client, and publishes wills.
//
// The package must not know sockets or event loops: a connection is a Connection. Read client.go next.
package mqtt
