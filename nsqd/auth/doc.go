// Package auth asks an HTTP auth server what a client may do, and answers
// questions by what it said. It knows the auth server's protocol and nothing of
// connections: who asks for one (nsqd/conn) also remembers the answer and asks again
// when it has expired. For requests that belong to no connection Cache does.
//
// Source: the section AUTH of nsq.io/components/nsqd.html. Where it leaves a
// choice, the decision is that of NSQ's nsqd as seen from the outside: an auth
// server must not come to mean something else by a change of brokers.
package auth
