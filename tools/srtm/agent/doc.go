// Package agent is `srtm agent`: a server on loopback that speaks NSQ's V2
// protocol to producers that know nothing of SRTM, and publishes what they send
// through package client, which finds the broker, forwards, retries and follows
// migrations. A producer gets its OK after the broker's OK, so the agent holds
// nothing that was acknowledged: when it dies nothing acknowledged is lost.
//
// A publisher is a topic and the client_id of IDENTIFY, or one id for all. What
// a producer publishes ahead of the answers goes to the broker in that order.
//
// server.go accepts and stops, conn.go is one producer's connection;
// the publishers that they share are client/pool's. The rules of the protocol are nsq/session's,
// and what is resent when is client's: read those first.
package agent
