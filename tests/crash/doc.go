// Package crash kills nsqd and checks what nsqd acknowledged. Each test stops the real process,
// gracefully or not, at a random moment under load, and starts it again over the same files. Then it
// counts by id the messages that were lost, that came twice, and that came out of order. The tests
// also do to a broker what machines and clients do: a full disk, no free descriptors, subscribers that
// read nothing, publishers that send byte by byte, all of these at once, and for a long time (make
// soak, make stress).
package crash
