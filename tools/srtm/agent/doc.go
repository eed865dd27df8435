// Package agent is `srtm agent`: a server on loopback that speaks NSQ's V2 protocol to
// producers that do not know SRTM. The agent publishes their messages through package
// client, which finds the broker, forwards, retries and follows migrations. A producer
// gets its OK after the broker's OK. So the agent holds no acknowledged message, and its
// crash loses none.
//
// A publisher is a topic plus the client_id of IDENTIFY, or plus one id for all. If a
// producer publishes without waiting for answers, the messages go to the broker in the
// same order.
//
// server.go accepts and stops; conn.go serves one producer. client/pool has the shared
// publishers. Read nsq/session (protocol rules) and client (resends) first.
package agent
