// Package session is the server's side of one client's MQTT conversation, 3.1.1 or 5.0, as a pure state
// machine. Its inputs are bytes and times. Its outputs are the operations of nsq/session, packets for
// the client, and a deadline. So one driver (nsqd/conn) serves both protocols.
//
// The driver runs the loop that nsq/session describes. In addition:
//
//   - The driver answers OpConnect, OpSubscribe, OpUnsubscribe and OpDisconnect before the next Step.
//   - The driver opens a broker subscription, a source, for each topic of each filter, and numbers the
//     sources. AppendMessage encodes a source's messages. Window bounds the messages on their way.
//   - A PUBACK of the client becomes OpFin with the message's id and the number of its source.
//
// The package must not know sockets or queues, and reads no clock. Names and rules are mqtt/names; read
// nsqd/conn next.
package session
